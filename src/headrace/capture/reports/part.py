"""What becomes of a part of a loop, a model or an optimizer: replays, eager calls, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.capture.reports.differences import CheckReport, Differences
from headrace.capture.reports.reasons import UNSETTLED
from headrace.capture.state.held_buffers import captures_keep_buffers
from headrace.device import Device

# A part whose graphs are dropped this often with hardly a replay between is not captured.
_MAX_DROPS = 8
_FEW_REPLAYS = 10


@dataclass(frozen=True, slots=True)
class PartReport:
    """What became of one part. `why` says why it always runs eagerly; None if graphs are in use.
    `eager` are the calls that ran eagerly, by reason. `rounding` says why the last digits differ
    from the plain loop's; None if nothing is known to change them. `check` is what comparisons of
    its first replays have found; None if nothing was compared."""

    name: str
    replays: int
    captures: int
    eager: dict[str, int]
    memory_bytes: int
    why: str | None = None
    rounding: str | None = None
    check: CheckReport | None = None

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.replays:,} replays, {sum(self.eager.values()):,} eager calls"]
        if self.captures:
            lines[0] += f", {self.captures} captures, {self.memory_bytes / 1e6:,.0f} MB"
        if not self.replays and not self.eager and self.why is None:
            lines.append(
                "  has not been called, or only inside compiled code: a model's methods besides "
                "forward, and an optimizer's besides step, run eagerly"
            )
        if self.why is not None:
            lines.append(f"  runs eagerly, because {self.why}")
        lines += [
            f"  eager {count:,} times: {why}"
            for why, count in self.eager.items()
            if why != self.why
        ]
        if self.rounding is not None:
            lines.append(f"  {self.rounding}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many calls of some parts were replayed so far, and how many were on the way to that."""

    replays: int = 0
    unsettled: int = 0

    def is_replay_after(self, before: Counts) -> bool:
        """Whether calls were replayed since then, and none was watched, captured or compared."""
        return self.replays > before.replays and self.unsettled == before.unsettled


class PartTally:
    """Counts what becomes of a part."""

    def __init__(self, device: Device, name: str, check: int = 0) -> None:
        self._device = device
        self.name = name
        #: Compares the first replays.
        self.check = Differences(device, check)
        #: Why it is not captured (any more).
        self.why: str | None = None
        self.replays = 0
        self.captures = 0
        #: Why the last digits differ from the plain loop's, if something is known to change them.
        self.rounding: str | None = None
        #: Calls that ran eagerly, by reason.
        self.eager: Counter[str] = Counter()
        self._memory_bytes = 0
        # The replays so far at each of the last drops of its graphs.
        self._drops: list[int] = []

    def report(self) -> PartReport:
        return PartReport(
            self.name,
            self.replays,
            self.captures,
            dict(self.eager),
            self._memory_bytes,
            self.why,
            self.rounding,
            self.check.report(),
        )

    @property
    def unsettled(self) -> int:
        """How many calls ran eagerly, were captured or compared, on the way to a graph or to check
        one."""
        unsettled = sum(self.eager[reason] for reason in UNSETTLED)
        return self.captures + self.check.replays + unsettled

    @staticmethod
    def counts(tallies: Iterable[PartTally]) -> Counts:
        """The sums over several parts."""
        replays = unsettled = 0
        for one in tallies:
            replays, unsettled = replays + one.replays, unsettled + one.unsettled
        return Counts(replays, unsettled)

    def ran_eagerly(self, why: str) -> None:
        self.eager[why] += 1

    def replayed(self) -> None:
        self.replays += 1

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture in this block. If it succeeds, it counts, with the memory that it has taken."""
        before = self._device.memory().reserved
        with captures_keep_buffers():
            yield
        self.captures += 1
        self._memory_bytes += max(0, self._device.memory().reserved - before)

    def note_rounding(self, why: str | None) -> None:
        """Why replays of what was captured differ in the last digits."""
        self.rounding = why

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close all graphs in this block."""
        with captures_keep_buffers():
            yield
        self._memory_bytes = 0

    def note_change(self) -> bool:
        """What graphs use has changed. Returns whether that has happened too often."""
        if self._drops and self.replays - self._drops[-1] >= _FEW_REPLAYS:
            self._drops.clear()
        self._drops.append(self.replays)
        return len(self._drops) >= _MAX_DROPS

    def give_up(self, why: str) -> bool:
        """Capture nothing any more, and log why. Returns False if that was so before."""
        if self.why is not None:
            return False
        self.why = why
        self._device.warn_once(
            f"parts: {self.name}: {why}", "%s runs eagerly, because %s", self.name, why
        )
        return True

    def leave(self, why: str) -> None:
        """Capture nothing any more, as somebody has chosen who says why."""
        self.why = self.why or why

    def close(self) -> None:
        self.leave("speed_up was closed")
