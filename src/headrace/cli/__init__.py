"""The command line, one file per command: parse the arguments, call the library, print.

Results go to stdout and everything else to stderr.
"""

from __future__ import annotations

from headrace.cli.program import app, main

__all__ = [
    "app",
    "main",
]
