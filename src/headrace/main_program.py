"""Run somebody's script or module as `python` would run it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from headrace.errors import ProgramError


def require_program(program: str, *, as_module: bool) -> None:
    """Raise `ProgramError` if there is no such script or module."""
    if not as_module and not Path(program).is_file():
        raise ProgramError(f"{program}: no such file; expected a Python script, or -m and a module")
    if as_module and not _is_module(program):
        raise ProgramError(f"{program}: no such module; expected one that `python -m` would find")


def run_as_main(program: str, arguments: Sequence[str], *, as_module: bool) -> int:
    """Run a script, or a module as `python -m` does. Returns its exit code. An error of the
    program's is printed as Python prints it; Ctrl-C is raised."""
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


def _is_module(name: str) -> bool:
    """Whether `python -m` would find it. Imports nothing: its package belongs to the program."""
    with _command_line([name], str(Path.cwd())):
        parts, where = name.split("."), None
        for end in range(1, len(parts) + 1):
            found = (one.find_spec(".".join(parts[:end]), where) for one in sys.meta_path)
            spec = next((one for one in found if one is not None), None)
            if spec is None:
                return False
            where = spec.submodule_search_locations
            if where is None and end < len(parts):
                return False
    return True


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
