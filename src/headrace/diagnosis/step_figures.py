"""What steps took that are watched all the time, and when the user is warned of them."""

from __future__ import annotations

from dataclasses import dataclass

#: A step is slower than at first, and the loader the limit, from these shares on, twice in a row.
_SLOWER, _LOADER_LIMIT = 1.2, 0.2


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A line at which the host waits for the device, and for how long per step, from samples."""

    place: str
    title: str
    ms: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What steps took since the last figures. `step` is the number of the last one, `steps` how
    many there were. `step_ms` is the median, `data_wait_ms` how long the loader was waited for per
    step. Memory is PyTorch's on the device; `memory_growth_bytes` is since the first figures."""

    step: int
    steps: int
    step_ms: float
    slowest_ms: float
    data_wait_ms: float
    waits: tuple[WaitingLine, ...] = ()
    memory_bytes: int | None = None
    memory_growth_bytes: int | None = None

    def __str__(self) -> str:
        text = f"step {self.step:,}: {self.step_ms:.2f} ms, {self.data_wait_ms:.2f} ms for data"
        return "; ".join([text, *(f"{one.place} {one.ms:.2f} ms" for one in self.waits)])


class StepWarnings:
    """Says once when a step has become slower, and once when the loader is the limit."""

    def __init__(self) -> None:
        self._first: StepFigures | None = None
        self._before: dict[str, bool] = {}
        self._told: set[str] = set()

    def of(self, figures: StepFigures) -> list[str]:
        first = self._first = self._first or figures
        slower = figures.step_ms / first.step_ms
        found = {
            "slower": (
                slower >= _SLOWER,
                f"a step takes {figures.step_ms:.1f} ms, {slower:.2f} times as long as at first"
                f"{_why(first, figures)}",
            ),
            "loader": (
                figures.data_wait_ms >= _LOADER_LIMIT * figures.step_ms,
                f"the data loader is the limit: {figures.data_wait_ms:.2f} ms of a step of "
                f"{figures.step_ms:.2f} ms are spent waiting for it; more processes (num_workers) "
                "make it faster",
            ),
        }
        warnings = []
        for name, (holds, text) in found.items():
            if holds and self._before.get(name) and name not in self._told:
                self._told.add(name)
                warnings.append(f"step {figures.step:,}: {text}")
            self._before[name] = holds
        return warnings


def _why(first: StepFigures, now: StepFigures) -> str:
    """What has grown most, if that is a good part of the difference."""
    before = {one.place: one.ms for one in first.waits}
    grown = {f"at {one.place}": one.ms - before.get(one.place, 0.0) for one in now.waits}
    grown["waiting for the data loader"] = now.data_wait_ms - first.data_wait_ms
    most = max(grown, key=lambda name: grown[name])
    is_much = grown[most] >= 0.5 * (now.step_ms - first.step_ms)
    return f"; {grown[most]:.1f} ms more are spent {most}" if is_much else ""
