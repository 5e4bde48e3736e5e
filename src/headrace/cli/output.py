"""Results go to stdout; everything else that runs inside a command prints to stderr."""

from __future__ import annotations

import codecs
import ctypes
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, NoReturn

import typer

from headrace.errors import HeadraceError

_STDOUT, _STDERR = 1, 2
#: What `context.obj` is if the command has its process to itself.
OWN_PROCESS = object()


def print_result(content: dict[str, Any], text: str, as_json: bool) -> None:
    print_line(json.dumps(content, indent=2) if as_json else text)


def print_line(text: str) -> None:
    """Print a result, or a part of it, to stdout."""
    try:
        typer.echo(text)
    except BrokenPipeError:  # the reader has seen enough
        raise
    except OSError as problem:
        raise HeadraceError(
            f"the result could not be written to stdout ({problem.strerror or problem})"
        ) from problem


class OwnStderr:
    """Stderr as it is now, whatever a user's script does with its own: it may replace, close or
    redirect it."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        descriptor = _duplicate(_STDERR) if self._stream is sys.__stderr__ else None
        if descriptor is not None and self._stream is not None:
            encoding, errors = self._stream.encoding, self._stream.errors
            self._stream = os.fdopen(descriptor, "w", 1, encoding, errors)

    def tell(self, text: str) -> None:
        """Print, if it can be written: neither the script nor its exit code may change because
        nobody can read the text."""
        with suppress(OSError):
            typer.echo(text, file=self._stream, err=True)


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


class ScriptExit(SystemExit):
    """The end of a command that has run a user's script, whose output is on stdout."""


class ScriptInterrupted(BaseException):
    """The end of a command that has run a user's script as its own, which Ctrl-C has ended. Its
    traceback has been printed."""


def end_as_script(exit_code: int | None, *, has_script_output: bool) -> NoReturn:
    """End as a script does that has ended with this exit code, or that Ctrl-C has ended (None)."""
    if exit_code is None:
        raise ScriptInterrupted
    raise ScriptExit(exit_code) if has_script_output else typer.Exit(exit_code)


def end_of_results(*, has_script_output: bool = False) -> None:
    """Redirect to stderr what exit handlers print, unless they may be those of a script whose
    output is on stdout. Call this at the end of the program."""
    try:
        _flush()
    except OSError:  # the reader has closed the pipe, or the disk is full
        _drop_stdout()
    else:
        if not has_script_output:
            _send_stdout_to_stderr()


def end_program(exit_code: int, *, at_once: bool, has_script_output: bool = False) -> NoReturn:
    """End with an exit code; `at_once`: without waiting for threads that a script has left."""
    if at_once:
        end_of_results()
        os._exit(exit_code)
    raise ScriptExit(exit_code) if has_script_output else typer.Exit(exit_code)


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
