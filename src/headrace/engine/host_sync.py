"""The plan's host waits: after every batch, or every so many, by stream or by event."""

from __future__ import annotations

from headrace.device import Device, Event, Stream
from headrace.engine.run_ahead import RunAhead
from headrace.plan import Plan


class HostSync:
    """A run-ahead window in which the host also waits as the plan says."""

    def __init__(self, window: RunAhead, device: Device, plan: Plan, last: Stream) -> None:
        self._window, self._device, self._last = window, device, last
        self._by_event = plan.sync == "event"
        self._every = 1 if plan.sync == "batch" else plan.sync_every
        self._events: list[Event] = []
        self._batches = self._synchronized = 0

    def admit(self, nbytes: int = 0) -> None:
        self._window.admit(nbytes)

    def launched(self, stream: Stream) -> None:
        self._window.launched(stream)
        self._batches += 1
        if self._by_event:
            self._mark()
        if self._batches % self._every == 0:
            self._wait()

    def finish(self) -> None:
        """Also after the last batch, if it was not just done."""
        if self._batches > self._synchronized:
            self._wait()

    def _mark(self) -> None:
        """An event for this batch; a look, without waiting, at which earlier ones have passed."""
        event = self._device.event()
        event.record(self._last)
        self._events = [earlier for earlier in self._events if not earlier.query()]
        self._events.append(event)

    def _wait(self) -> None:
        if self._by_event:
            self._device.wait(self._events[-1], "sync")
            self._events.clear()
        else:
            self._device.synchronize("sync", self._last)
        self._synchronized = self._batches
