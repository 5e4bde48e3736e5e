"""Traces, and code that makes the host wait."""
