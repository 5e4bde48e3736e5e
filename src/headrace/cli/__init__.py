"""The command line, a file for each command: it parses, calls and prints.

In go arguments; out come results on stdout, everything else on stderr, and an exit code.
"""

from __future__ import annotations

from headrace.cli.program import app, main

__all__ = [
    "app",
    "main",
]
