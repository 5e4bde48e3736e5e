"""The fake device's streams and events: queues that are checked instead of run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.device import Event, Stream
from headrace.fake import graphs
from headrace.fake.tape import Tape
from headrace.fake.tape_entries import Mark
from headrace.races.actors import Clock, StreamView, join
from headrace.races.frames import calling_site

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice


class FakeStream(Stream):
    device: FakeDevice

    def __init__(self, device: FakeDevice, name: str, priority: int = 0) -> None:
        super().__init__(device, name, priority)
        self.state = device.checker.new_stream(name)
        #: The capture that this stream is part of.
        self.tape: Tape | None = None

    def joins_capture(self, tape: Tape | None) -> None:
        """Become a part of this capture, or, with None, of none."""
        self.tape = tape

    @property
    def actor(self) -> StreamView:
        """The stream as the calling thread uses it."""
        return self.device.host().view(self.state)

    def mark(self) -> Mark | None:
        """The stream's position in its capture; None if it is not being captured."""
        return None if self.tape is None else self.tape.mark(self)

    def query(self) -> bool:
        graphs.refuse(self.device, "stream.query()", self)
        with self.device.lock:
            actor = self.actor
            actor.refresh()
            return self.device.host_queries(dict(actor.clock), actor.time_ns)

    def _wait_event(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        if graphs.wait(self, event.captured):
            return
        with self.device.lock:
            self.device.note_wait(self.name, "wait_event", event.moment)
            self.joins(event.clock, event.passes_ns)

    def _wait_stream(self, other: Stream) -> None:
        assert isinstance(other, FakeStream)
        if graphs.wait(self, other.mark()):
            return
        with self.device.lock:
            last = self.device.history.last_on(other.name)
            self.device.note_wait(self.name, f"wait_stream({other.name})", last)
            recorded = other.actor
            self.device.launch(recorded)  # CUDA records a hidden event on it now
            self.joins(recorded.clock, recorded.time_ns)

    def joins(self, clock: Clock, time_ns: int) -> None:
        """Let what comes next wait for work of other streams. The device's lock is held."""
        actor = self.actor
        self.device.launch(actor)
        join(actor.clock, clock)
        actor.time_ns = max(actor.time_ns, time_ns)
        self.device.queued(actor)


class FakeEvent(Event):
    device: FakeDevice

    def __init__(self, device: FakeDevice, timing: bool) -> None:
        super().__init__(device, timing)
        self.clock: Clock = {}
        self.passes_ns = 0
        self.captured: Mark | None = None
        #: The number of the last record in the device's history.
        self.moment: int | None = None

    def _record(self, stream: Stream) -> None:
        assert isinstance(stream, FakeStream)
        self.captured = stream.mark()
        if self.captured is not None:
            return
        with self.device.lock:
            site, history = calling_site(), self.device.history
            self.moment = history.add(stream.name, "record", "record_event", site)
            actor = stream.actor
            self.device.launch(actor)
            # A new dict each time: a stream that waited for the last record keeps the old one.
            self.clock = dict(actor.clock)
            self.passes_ns = max(actor.time_ns, actor.host.time_ns)

    def _query(self) -> bool:
        self._refuse_captured("event.query()")
        with self.device.lock:
            return self.device.host_queries(self.clock, self.passes_ns)

    def _synchronize(self) -> None:
        self._refuse_captured("a wait for an event")
        self.device.wait_while_hung()
        with self.device.lock:
            self.device.note_wait(self.device.host().name, "event.synchronize", self.moment)
            self.device.host_waits(self.clock, self.passes_ns, "wait for event")

    def _elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, FakeEvent)
        for event in (self, end):
            event._refuse_captured("event.elapsed_ms()")
        return (end.passes_ns - self.passes_ns) / 1e6

    def _refuse_captured(self, what: str) -> None:
        graphs.refuse(self.device, what)
        if self.captured is not None:
            raise RuntimeError(
                "operation not permitted on an event last recorded in a capturing stream: " + what
            )
