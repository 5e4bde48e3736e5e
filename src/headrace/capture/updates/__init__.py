"""An optimizer whose step is replayed as a graph, in anybody's loop."""
