"""Checkpoints and run folders, and ways to lose them."""
