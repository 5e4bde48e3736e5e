"""Steps that are captured, and values that change under a graph."""
