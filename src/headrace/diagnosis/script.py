"""Run somebody's script unchanged, and explain what its steps wait for."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from headrace.bench import environment_of
from headrace.device import Device, cuda_namespace, open_device
from headrace.diagnosis.explanation import explain
from headrace.diagnosis.ranks import Meeting
from headrace.diagnosis.session import Session, Settings
from headrace.diagnosis.verdict import line_count
from headrace.errors import ProgramError
from headrace.main_program import ProgramEnded, ProgramTerminated, require_program, run_as_main
from headrace.records import DiagnosisResult, TimeParts

Then = Literal["stop", "continue"]


def diagnose_program(
    program: str,
    arguments: Sequence[str] = (),
    *,
    as_module: bool = False,
    settings: Settings | None = None,
    then: Then = "stop",
    fake: bool = False,
    command: str = "",
    on_complete: Callable[[DiagnosisResult], object] = lambda result: None,
) -> DiagnosisResult:
    """Run a script or module and diagnose its steps.

    With `then="stop"` the script is ended after the last window; with "continue" it runs on, and
    `on_complete` is called with the result meanwhile. `fake` runs it on the fake device, which
    tells waits and races but no times. On Ctrl-C or SIGTERM, the result has what is known, and exit
    code 130 or 143.
    """
    require_program(program, as_module=as_module)
    with _device_for(fake) as device:
        run = _Run(program, device, command, settings, then, on_complete)
        exit_code = run.run(lambda: run_as_main(program, arguments, as_module=as_module))
        return run.result(exit_code)


@contextmanager
def _device_for(fake: bool) -> Iterator[Device | None]:
    if not fake:
        yield None
        return
    from headrace.fake import fake_cuda

    with fake_cuda(check=False, keep_timeline=False) as device:
        yield device


class _Run:
    """One run of a program, from its start to the result."""

    def __init__(
        self,
        program: str,
        fake: Any,
        command: str,
        settings: Settings | None,
        then: Then,
        on_complete: Callable[[DiagnosisResult], object],
    ) -> None:
        self._program, self._fake, self._command = program, fake, command
        self._then, self._on_complete = then, on_complete
        self._session = Session(settings, fake, self._completed, takes_batches=then == "stop")
        self._complete: DiagnosisResult | None = None
        self._is_ended = False
        self._ended_in: int | None = None
        self._meeting: Meeting | None = None

    def run(self, work: Callable[[], int]) -> int | None:
        """The exit code of the program; None if it was ended."""
        by = ""
        try:
            with self._session:
                exit_code = work()
        except ProgramTerminated as end:
            by, exit_code = "SIGTERM", end.exit_code
        except ProgramEnded:
            return None
        except KeyboardInterrupt:
            by, exit_code = "Ctrl-C", 130
        if self._is_ended:  # a thread of the program's may have trained
            return None
        self._session.seen.signal = by
        return exit_code

    def result(self, exit_code: int | None) -> DiagnosisResult:
        if self._complete is None or self._fake is not None:
            return self._of_all(
                self._explain(exit_code)
            )  # there may be races after the last window
        return replace(self._complete, exit_code=exit_code)

    def _completed(self) -> None:
        thread = threading.get_ident()
        self._meeting = Meeting.now()
        if self._then == "stop" and self._ended_in != thread:
            self._is_ended = True
            self._ended_in = thread
            raise ProgramEnded
        if self._then == "stop":  # this thread has been ended, and steps again
            self._is_ended = False
            self._session.seen.note("the script caught SystemExit, which should end it: it runs on")
        # The script runs on: what is drawn meanwhile must not change its random numbers. Libraries
        # that format text draw some when they are loaded.
        state = random.getstate()
        self._complete = self._of_all(self._explain(None))
        self._on_complete(self._complete)
        random.setstate(state)

    def _of_all(self, result: DiagnosisResult) -> DiagnosisResult:
        """With those of other ranks, if all have come to the end of the windows."""
        if self._meeting is None or not result.ranks:
            return result
        return self._meeting.gathered(result)

    def _explain(self, exit_code: int | None) -> DiagnosisResult:
        seen = self._session.seen
        if self._fake is None and not cuda_namespace().is_available():
            seen.note("PyTorch found no CUDA device: --fake finds waits and races without one")
        races = len(self._fake.findings()) if self._fake is not None else None
        with torch._C.DisableTorchFunction():
            environment = environment_of(seen.device or open_device("cpu"), self._command)
        return explain(seen, self._program, exit_code, environment, races)


# --- for CI ---------------------------------------------------------------------------------------

_CONDITION = re.compile(r"([\w ]+?)\s*(>=|>)\s*(\d+(?:\.\d+)?)\s*(%?)")
_COUNTS = ("waits", "races", "lines")


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition of `--fail-on`, such as `waits>2` or `idle>20%`."""

    name: str
    value: float
    or_equal: bool

    def is_exceeded_by(self, found: float | None) -> bool:
        """Whether a figure that was found exceeds the limit."""
        if found is None:
            return False
        return found >= self.value if self.or_equal else found > self.value

    def describe(self, found: float | None) -> str:
        unit = "" if self.name in _COUNTS else " %"
        sign = ">=" if self.or_equal else ">"
        return f"{self.name} is {found:.3g}{unit} ({sign} {self.value:g}{unit})"


def parse_limits(text: str) -> list[Limit]:
    """The conditions of `--fail-on`, separated by commas."""
    return parse_conditions(text, _COUNTS, ("idle", *TimeParts.__slots__), "waits>2 or idle>20%")


def parse_conditions(
    text: str, counts: Sequence[str], shares: Sequence[str], example: str
) -> list[Limit]:
    """Conditions on figures with these names; shares are in per cent."""
    known = [f"counts are {', '.join(counts)}"] if counts else []
    known.append(f"shares {'are ' if not counts else ''}{', '.join(shares)}")
    limits = []
    for part in text.split(","):
        found = _CONDITION.fullmatch(part.strip())
        name = found[1].strip().replace(" ", "_") if found is not None else ""
        if (
            found is None
            or name not in (*counts, *shares)
            or (found[4] == "%") is not (name in shares)
        ):
            raise ProgramError(
                f"{part.strip() or repr(text)}: expected conditions such as {example}; "
                f"{', '.join(known)}"
            )
        limits.append(Limit(name, float(found[3]), found[2] == ">="))
    return limits


def _figure(result: DiagnosisResult, name: str) -> float | None:
    if name == "waits":
        return result.waits_per_step
    if name == "races":
        return None if result.races is None else float(result.races)
    if name == "lines":
        return None if result.waits_per_step is None else float(line_count(result))
    if result.step_ms is None or result.parts is None:
        return None
    if name == "idle":
        return 100 * (result.idle_share or 0.0)
    return 100 * float(getattr(result.parts, name)) / result.step_ms


def exit_code_of(
    result: DiagnosisResult, limits: Sequence[Limit], tell: Callable[[str], object]
) -> int:
    """3 if a limit is exceeded or could not be measured, else the program's own exit code; 0 if it
    was ended. `tell` is called with a sentence for each such limit."""
    if result.exit_code:
        unknown: list[Limit] = []  # the program has failed: that says enough
    else:
        unknown = [limit for limit in limits if _figure(result, limit.name) is None]
    exceeded = [limit for limit in limits if limit.is_exceeded_by(_figure(result, limit.name))]
    for limit in exceeded:
        tell(f"--fail-on: {limit.describe(_figure(result, limit.name))}")
    for limit in unknown:
        tell(f"--fail-on: {limit.name} could not be measured in this run")
    return 3 if exceeded or unknown else result.exit_code or 0
