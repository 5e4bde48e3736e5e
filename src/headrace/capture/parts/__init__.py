"""`speed_up(model, optimizer)`: the parts of a loop as graphs, and the loop as it is.

Finds the parts, puts graphs in their place and takes them out again, and measures what that gains.
"""
