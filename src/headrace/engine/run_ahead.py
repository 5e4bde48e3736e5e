"""The run-ahead window: how far the host may be ahead of the device, in steps and in bytes."""

from __future__ import annotations

from collections import deque

import torch

from headrace.device import Device, Event, Stream, open_device


class RunAhead:
    """Bounds the steps, and the bytes of their batches, that are launched and not yet done.

    Without a bound the host would queue work for minutes ahead: an interrupt would answer late,
    and memory for batches in flight would have no limit. `admit` waits (asleep, not spinning) for
    the oldest step while the window is full; the ledger knows it as `run_ahead`.
    """

    def __init__(
        self, device: Device | str | torch.device, steps: int, max_bytes: int | None = None
    ) -> None:
        self._device = open_device(device)
        self._steps = steps
        self._max_bytes = max_bytes
        self._flying: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._spare: list[Event] = []
        self._admitted_bytes = 0

    def admit(self, nbytes: int = 0) -> None:
        """Call before a step is launched. A step larger than the whole window goes alone."""
        while self._is_full(nbytes):
            if not self._flying[0][0].query():
                self._device.wait(self._flying[0][0], "run_ahead")
            self._land()
        self._admitted_bytes = nbytes

    def _is_full(self, nbytes: int) -> bool:
        if len(self._flying) >= self._steps:
            return True
        bounded = self._max_bytes is not None and len(self._flying) > 0
        return bounded and self._bytes + nbytes > (self._max_bytes or 0)

    def launched(self, stream: Stream) -> None:
        """Call after the step's last operation was put on `stream`."""
        event = self._spare.pop() if self._spare else self._device.event()
        event.record(stream)
        self._flying.append((event, self._admitted_bytes))
        self._bytes += self._admitted_bytes

    def finish(self) -> None:
        """After the last step. A window has nothing to wait for then; a plan's host sync may."""

    @property
    def in_flight(self) -> int:
        """Steps launched and not known to be done; looked at only when the window is full."""
        return len(self._flying)

    def _land(self) -> None:
        event, nbytes = self._flying.popleft()
        self._bytes -= nbytes
        self._spare.append(event)
