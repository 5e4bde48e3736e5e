"""What code reads besides its arguments, found in its bytecode, and the places that keep it.

`reading` walks over a function and over all that it calls of the user's; nothing is run. `places`
and `comparison` say later whether what it has found is as it was.
"""
