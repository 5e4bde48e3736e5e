"""What a run has shown, as a record."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench import environment_of
from headrace.device import Device, open_device
from headrace.errors import HeadraceError
from headrace.records import Environment, PartCheck, RunPart, RunResult
from headrace.run.parts import line_record

if TYPE_CHECKING:
    from headrace.run.parts import Part
    from headrace.run.session import SpeedUpSession


def result_of(
    session: SpeedUpSession, program: str, exit_code: int | None, command: str
) -> RunResult:
    """The result of a run that has ended."""
    parts = [record for part in session.parts.all for record in _records(part)]
    device = session.devices[0] if session.devices else None
    before, after = _before_and_after(session, device)
    fake: Any = session.given
    return RunResult(
        program=program,
        exit_code=exit_code,
        parts=(*parts, *session.loaders.records()),
        steps=session.device_steps,
        cpu_steps=session.cpu_steps,
        before_ms=before,
        after_ms=after,
        peak_bytes=_peak_bytes(device),
        races=None if fake is None else len(fake.findings()),
        decisions=tuple(session.gain.decisions),
        notes=() if session.off is None else (session.off,),
        environment=_environment(device, command),
    )


def _records(part: Part) -> list[RunPart]:
    return [
        RunPart(
            kind=part.kind,
            name=name,
            line=line_record(part.site),
            replays=report.replays,
            captures=report.captures,
            eager=report.eager,
            memory_bytes=report.memory_bytes,
            why=report.why,
            rounding=report.rounding,
            check=None if report.check is None else PartCheck(**asdict(report.check)),
        )
        for name, report in part.reports()
    ]


def _before_and_after(
    session: SpeedUpSession, device: Device | None
) -> tuple[float | None, float | None]:
    """Of the optimizer whose steps took longest: where there are several, it steps most rarely."""
    if device is None or not _is_idle(device):
        return None, None
    found = [clock.medians() for clock in session.clocks]
    both = [one for one in found if None not in one]
    return max(both or found, key=lambda one: one[0] or 0.0, default=(None, None))


def _is_idle(device: Device) -> bool:
    """Wait for the device. Returns False if an error of the program's has broken it."""
    try:
        device.synchronize("the end of the program")
    except (HeadraceError, RuntimeError):
        return False
    return True


def _peak_bytes(device: Device | None) -> int:
    return 0 if device is None else device.memory().peak_allocated


def _environment(device: Device | None, command: str) -> Environment:
    with torch._C.DisableTorchFunction():
        return environment_of(device or open_device("cpu"), command)
