"""Results go to stdout; everything else that runs inside a command prints to stderr."""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer

_STDOUT, _STDERR = 1, 2


def print_result(content: dict[str, Any], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(content, indent=2) if as_json else text)


@contextmanager
def results_only() -> Iterator[None]:
    """Redirect stdout to stderr inside the block. Print results after it.

    This covers what a user's workload prints in this process, in loader processes and in C code.
    """
    _flush()
    real = _duplicate(_STDOUT)
    try:
        if real is not None:
            _send_stdout_to_stderr()
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()  # text that is still buffered belongs to the block
        if real is not None:
            os.dup2(real, _STDOUT)
            os.close(real)


def replace_unknown_characters() -> None:
    """Print "?" for characters that the output's encoding lacks, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
            # File names that are not UTF-8 are printed as the bytes that they are.
            if not (is_utf8 and stream.errors == "surrogateescape"):
                stream.reconfigure(errors="replace")


def end_of_results() -> None:
    """Redirect to stderr what exit handlers print. Call this at the end of the program."""
    try:
        _flush()
    except BrokenPipeError:  # the reader has closed the pipe
        _drop_stdout()
    else:
        _send_stdout_to_stderr()


def _send_stdout_to_stderr() -> None:
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # there is no stderr
        _drop_stdout()


def _drop_stdout() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)
    if nowhere != _STDOUT:
        os.close(nowhere)


def _duplicate(descriptor: int) -> int | None:
    """A copy of the descriptor; None if it is not open."""
    try:
        return os.dup(descriptor)
    except OSError:
        return None


def _flush() -> None:
    """Flush the buffers of Python and of the C library."""
    for stream in {id(stream): stream for stream in (sys.stdout, sys.__stdout__)}.values():
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
