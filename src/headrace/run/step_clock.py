"""Milliseconds of a step before and after its parts were captured.

Marks in the device's stream at the ends of optimizer steps say how long the device took from one to
the next, with all that it waited for. The host does not wait for them until the program has ended.
"""

from __future__ import annotations

import statistics

from headrace.capture import Counts
from headrace.device import Device, Event
from headrace.errors import DeviceError

#: The first steps load kernels and try algorithms.
_WARM_UP = 2
_MAX_TIMED = 64


class StepClock:
    """The steps of one optimizer. `before_end` is the first step that may differ from the plain
    loop: it is watched, so that it can be captured."""

    def __init__(self, device: Device, before_end: int) -> None:
        self._device, self._before_end = device, before_end
        self.steps = 0
        self._before: list[tuple[Event, Event]] = []
        self._after: list[tuple[Event, Event]] = []
        self._last: Event | None = None
        self._counts: Counts | None = None

    def ended(self, counts: Counts) -> None:
        """A step has ended."""
        self.steps += 1
        before, self._counts = self._counts, counts
        timed = self._list_for(before, counts)
        is_early = _WARM_UP <= self.steps < self._before_end
        if not is_early and (counts.replays == 0 or len(self._after) >= _MAX_TIMED):
            self._last = None
            return
        mark = self._device.event(timing=True)
        mark.record()
        if timed is not None and self._last is not None:
            timed.append((self._last, mark))
        self._last = mark

    def _list_for(self, before: Counts | None, now: Counts) -> list[tuple[Event, Event]] | None:
        """Where the time since the last step belongs, if it was an ordinary step."""
        if now.replays == 0:
            return self._before if self.steps < self._before_end else None
        if before is None or before.replays == 0:
            return None
        return self._after if now.is_replay_after(before) else None

    @property
    def is_timed(self) -> bool:
        """Whether there are times before and after."""
        return bool(self._before and self._after)

    def medians(self) -> tuple[float | None, float | None]:
        """Milliseconds of a step before and after; None if there were too few. The device must be
        idle."""
        return self._median(self._before), self._median(self._after)

    def _median(self, marks: list[tuple[Event, Event]]) -> float | None:
        try:
            found = [begin.elapsed_ms(end) for begin, end in marks]
        except (DeviceError, RuntimeError):  # an error of the program's has broken the device
            return None
        return statistics.median(found) if len(found) >= 2 else None
