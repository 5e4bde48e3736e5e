"""The command line, a file for each group of commands: they parse, call and print.

In go arguments; out come results on stdout, everything else on stderr, and an exit code.
"""

from __future__ import annotations

from headrace.cli.program import app, main

__all__ = [
    "app",
    "main",
]
