"""Processes, ranks and terminals."""
