"""Run somebody's script or module under `fake_cuda()`, as `python` would run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.fake.cuda import fake_cuda
from headrace.main_program import ProgramTerminated, require_program, run_as_main
from headrace.races.findings import Finding

# The exit code of a program that Ctrl-C ended.
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and the races in it. `accepted` counts those that a comment accepts,
    `launches` the operations that were checked."""

    exit_code: int
    findings: tuple[Finding, ...]
    accepted: int
    launches: int


def run_program(program: str, arguments: Sequence[str], *, as_module: bool) -> ProgramResult:
    """Run a script, or a module as `python -m` does. An error of the program's is printed as Python
    prints it. Ctrl-C and SIGTERM end the program, and what it did until then is checked."""
    require_program(program, as_module=as_module)
    with fake_cuda(check=False, keep_timeline=False) as device:
        try:
            exit_code = run_as_main(program, arguments, as_module=as_module)
        except ProgramTerminated as end:
            exit_code = end.exit_code
        except KeyboardInterrupt:
            exit_code = _INTERRUPTED
    findings = tuple(device.findings())
    return ProgramResult(exit_code, findings, len(device.checker.accepted), device.launches)
