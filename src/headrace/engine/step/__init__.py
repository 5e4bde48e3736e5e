"""Trains on one batch; and what happens to a batch that fails or does not fit."""
