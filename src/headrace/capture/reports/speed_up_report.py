"""What `speed_up` did with all parts of a loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace.capture.reports.part import PartReport
from headrace.capture.reports.report import Way


@dataclass(frozen=True, slots=True)
class SpeedUpReport:
    """What `speed_up` did. `off` says why it does nothing at all; None if it is at work. `way` is
    the most that is replayed now: "parts", only "children" of a model, or nothing ("eager").
    `break_ms` is, for each part of a model that runs eagerly, how long a call of it keeps the host,
    without the parts inside it. `decision` says what `plan="auto"` has measured and chosen; None if
    it has not yet."""

    parts: tuple[PartReport, ...]
    off: str | None = None
    way: Way = "eager"
    break_ms: Mapping[str, float] = field(default_factory=dict)
    decision: str | None = None

    def __str__(self) -> str:
        if self.off is not None:
            return f"speed_up does nothing: {self.off}"
        return "\n".join(filter(None, [*self._lines(None, ""), self.decision]))

    def _lines(self, parent: str | None, indent: str) -> Iterator[str]:
        """The parts below a part, each with those below it."""
        for part in self.parts:
            if self._parent_of(part.name) != parent:
                continue
            lines = str(part).splitlines()
            if part.name in self.break_ms:
                lines[0] += f", {self.break_ms[part.name]:.2f} ms a call of its own"
            yield from (indent + line for line in lines)
            yield from self._lines(part.name, indent + "    ")

    def _parent_of(self, name: str) -> str | None:
        """The part that a child was made of: the longest name that its own begins with."""
        above = [one.name for one in self.parts if name.startswith(f"{one.name}.")]
        return max(above, key=len, default=None)
