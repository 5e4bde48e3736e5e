"""Run somebody's script or module under `fake_cuda()`, as `python` would run it."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from headrace.errors import DeviceError
from headrace.testing.cuda import FakeCuda, fake_cuda
from headrace.testing.findings import Finding


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and the races in it. `accepted` counts those that a comment accepts."""

    exit_code: int
    findings: tuple[Finding, ...]
    accepted: int


def run_program(program: str, arguments: Sequence[str], *, as_module: bool) -> ProgramResult:
    """Run a script, or a module as `python -m` does. An error of the program's is printed as Python
    prints it."""
    if not as_module and not Path(program).is_file():
        raise DeviceError(f"{program}: no such file; expected a Python script, or -m and a module")
    if as_module and not _is_module(program):
        raise DeviceError(f"{program}: no such module; expected one that `python -m` would find")
    with fake_cuda(check=False) as device:
        exit_code = _run(program, arguments, as_module)
    findings = tuple(device.findings())
    return ProgramResult(exit_code, findings, _accepted(device))


def _is_module(name: str) -> bool:
    with _command_line([name], str(Path.cwd())):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError as problem:
            # Its package is missing, or imports something that is.
            if problem.name is not None and f"{name}.".startswith(f"{problem.name}."):
                return False
            raise


def _accepted(device: FakeCuda) -> int:
    return len(device.checker.races) - len(device.races)


def _run(program: str, arguments: Sequence[str], as_module: bool) -> int:
    folder = str(Path.cwd()) if as_module else str(Path(program).resolve().parent)
    with _command_line([program, *arguments], folder):
        try:
            if as_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            return _exit_code(end.code)
        except Exception as problem:
            inside = _users_part(problem.__traceback__)
            traceback.print_exception(type(problem), problem, inside)
            return 1
    return 0


@contextmanager
def _command_line(arguments: list[str], folder: str) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the program expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = arguments
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that ran the program."""
    whole = trace
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen "):
            return trace
        trace = trace.tb_next
    return whole
