"""Eager runs under a trace: whether two of them agree, and whether a graph still does the same.

`trials` runs them, `trace` records one, `watch` compares those before a capture, `recheck` says
when a graph is checked again.
"""
