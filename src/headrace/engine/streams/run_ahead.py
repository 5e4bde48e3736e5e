"""The run-ahead window: how far the host may be ahead of the device, in steps and in bytes."""

from __future__ import annotations

import math
from collections import deque

import torch

from headrace.device import Device, Event, Stream, open_device


class RunAhead:
    """Limits the steps that are launched and not yet done, and the bytes of their batches.

    Without a limit the host would queue minutes of work: it would react late to an interrupt, and
    batches in flight would take any amount of memory. While the window is full, `admit` waits for
    the oldest step (asleep, not spinning). The ledger records this wait as `run_ahead`.
    """

    def __init__(
        self, device: Device | str | torch.device, steps: int, max_bytes: int | None = None
    ) -> None:
        self._device = open_device(device)
        self._max_steps = steps
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._steps_in_flight: deque[tuple[Event, int]] = deque()
        self._bytes_in_flight = 0
        self._spare_events: list[Event] = []
        self._admitted_bytes = 0

    def admit(self, nbytes: int = 0) -> None:
        """Call before a step is launched. A step with more than `max_bytes` runs alone."""
        in_flight = self._steps_in_flight
        while in_flight and (
            len(in_flight) >= self._max_steps or self._bytes_in_flight + nbytes > self._max_bytes
        ):
            oldest, freed = in_flight[0]
            if not oldest.query():
                self._device.wait(oldest, "run_ahead")
            in_flight.popleft()
            self._bytes_in_flight -= freed
            self._spare_events.append(oldest)
        self._admitted_bytes = nbytes

    def launched(self, stream: Stream) -> None:
        """Call after the step's last operation was launched on `stream`."""
        event = self._spare_events.pop() if self._spare_events else self._device.event()
        event.record(stream)
        self._steps_in_flight.append((event, self._admitted_bytes))
        self._bytes_in_flight += self._admitted_bytes

    def finish(self) -> None:
        """Call after the last step. `RunAhead` waits for nothing here; `HostSync` does."""

    @property
    def in_flight(self) -> int:
        """Steps launched and not known to be done. Checked only when the window is full."""
        return len(self._steps_in_flight)
