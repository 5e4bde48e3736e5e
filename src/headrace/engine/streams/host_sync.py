"""Host waits that a plan asks for (`sync`): after every batch or every few, by stream or event."""

from __future__ import annotations

from headrace.device import Device, Event, Stream
from headrace.engine.streams.run_ahead import RunAhead
from headrace.plan import Plan


class HostSync:
    """A run-ahead window that also makes the host wait, as the plan's `sync` says. `stream` is the
    one on which a step ends."""

    def __init__(self, window: RunAhead, device: Device, plan: Plan, stream: Stream) -> None:
        self._window, self._device, self._stream = window, device, stream
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
            self._record_event()
        if self._batches % self._every == 0:
            self._wait()

    def finish(self) -> None:
        """Wait for the last batch, unless the host has just done so."""
        if self._batches > self._synchronized:
            self._wait()

    def _record_event(self) -> None:
        """Record an event for this batch, and drop those that have passed. Never blocks."""
        event = self._device.event()
        event.record(self._stream)
        self._events = [earlier for earlier in self._events if not earlier.query()]
        self._events.append(event)

    def _wait(self) -> None:
        if self._by_event:
            self._device.wait(self._events[-1], "sync")
            self._events.clear()
        else:
            self._device.synchronize("sync", self._stream)
        self._synchronized = self._batches
