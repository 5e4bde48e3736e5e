"""One epoch over a loader: the loop, the values that it hands out, and its result."""
