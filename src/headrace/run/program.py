"""Run somebody's script unchanged, sped up, and say what became of its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.main_program import (
    ProgramTerminated,
    print_error,
    require_program,
    run_as_main,
    run_as_python,
)
from headrace.run.settings import RunSettings
from headrace.run.tracebacks import users_tracebacks
from headrace.run.when_imported import when_imported

if TYPE_CHECKING:
    from headrace.records import RunResult
    from headrace.run.session import SpeedUpSession


def run_sped_up(
    program: str,
    arguments: Sequence[str],
    *,
    as_module: bool,
    settings: RunSettings,
    tell: Callable[[str], object],
    ended: Callable[[RunResult | None], object],
    fake: bool = False,
    is_own_process: bool = True,
    command: str = "",
) -> int | None:
    """Run a script, or a module as `python -m` does. Returns its exit code; None if Ctrl-C has
    ended it. `tell` is called with a sentence about each part, and `ended` with the result, once
    the script has ended, also by `os._exit`: None if it has not imported PyTorch.

    In its own process the script runs as with `python`, and PyTorch is not imported before it. Else
    what it has set is undone at the end. `fake` runs it on the fake device.
    """
    require_program(program, as_module=as_module)
    run = _SpedUpRun(program, settings, tell, ended, command)
    if fake:
        from headrace.fake import fake_cuda

        with fake_cuda(check=False, keep_timeline=False) as device, run.watching(device):
            exit_code = _run_inside(program, arguments, as_module)
            run.end(exit_code)
            return exit_code
    with run.watching(None):
        if not is_own_process:
            exit_code = _run_inside(program, arguments, as_module)
            run.end(exit_code)
            return exit_code
        found = run_as_python(
            program, arguments, as_module=as_module, before_exit=lambda: run.end(None)
        )
        run.end(found)
        return found


def _run_inside(program: str, arguments: Sequence[str], as_module: bool) -> int | None:
    """Run a program in a process that goes on. Returns its exit code; None after Ctrl-C, whose
    traceback has been printed."""
    try:
        return run_as_main(program, arguments, as_module=as_module)
    except ProgramTerminated as end:
        return end.exit_code
    except KeyboardInterrupt as problem:
        print_error(problem)
        # PyTorch's compiler, which the fake device loads, imports it at exit. That runs code from
        # text, after which Python no longer knows that Ctrl-C has ended it.
        with suppress(ImportError):
            import_module("tabulate")
        return None


class _SpedUpRun:
    """One run of a program, from its start to the result."""

    def __init__(
        self,
        program: str,
        settings: RunSettings,
        tell: Callable[[str], object],
        ended: Callable[[RunResult | None], object],
        command: str,
    ) -> None:
        self._program, self._settings, self._command = program, settings, command
        self._tell, self._ended = tell, ended
        self._process = os.getpid()
        self._session: SpeedUpSession | None = None
        self._given: Any = None

    @contextmanager
    def watching(self, device: Any) -> Iterator[None]:
        self._given = device
        with users_tracebacks(), when_imported("torch", self._begin):
            try:
                yield
            finally:
                self._leave()

    def _begin(self) -> None:
        """PyTorch is there."""
        from headrace.run.session import SpeedUpSession

        self._session = SpeedUpSession(self._settings, self._tell, self._given)
        self._session.begin()

    def _leave(self) -> None:
        if self._session is not None:
            self._session.leave()

    def end(self, exit_code: int | None) -> None:
        """The program has ended: give the result, unless this is a process that it has forked."""
        if os.getpid() != self._process:
            return
        session = self._session
        if session is None:  # a record would import PyTorch
            self._ended(None)
            return
        from headrace.run.result import result_of

        session.leave()
        self._ended(result_of(session, self._program, exit_code, self._command))
