"""Models, batches, loaders and engines."""
