"""Calls the user's loss function, compiled or as it is, and checks what it is and returns."""
