"""The fake device's streams and events: queues that are checked instead of run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.device.base import Event, Stream
from headrace.testing.checker import Clock, join

if TYPE_CHECKING:
    from headrace.testing.fake import FakeDevice


class FakeStream(Stream):
    device: FakeDevice

    def __init__(self, device: FakeDevice, name: str, priority: int = 0) -> None:
        super().__init__(device, name, priority)
        self.actor = device.checker.new_actor(name, is_host=False)

    def query(self) -> bool:
        with self.device.lock:
            return self.device.host_knows(dict(self.actor.clock), self.actor.time_ns)

    def _wait_event(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self.device.lock:
            join(self.actor.clock, event.clock)
            self.actor.time_ns = max(self.actor.time_ns, event.passes_ns)

    def _wait_stream(self, other: Stream) -> None:
        assert isinstance(other, FakeStream)
        with self.device.lock:
            self.device.launch(other.actor)  # the hidden event is recorded now
            join(self.actor.clock, other.actor.clock)
            self.actor.time_ns = max(self.actor.time_ns, other.actor.time_ns)


class FakeEvent(Event):
    device: FakeDevice

    def __init__(self, device: FakeDevice, timing: bool) -> None:
        super().__init__(device, timing)
        self.clock: Clock = {}
        self.passes_ns = 0

    def _record(self, stream: Stream) -> None:
        assert isinstance(stream, FakeStream)
        with self.device.lock:
            self.device.launch(stream.actor)
            # A new dict each time: a stream that waits keeps what the event was when it waited.
            self.clock = dict(stream.actor.clock)
            self.passes_ns = max(stream.actor.time_ns, self.device.host().time_ns)

    def _query(self) -> bool:
        with self.device.lock:
            return self.device.host_knows(self.clock, self.passes_ns)

    def _synchronize(self) -> None:
        with self.device.lock:
            self.device.host_waits(self.clock, self.passes_ns, "wait for event")

    def _elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, FakeEvent)
        return (end.passes_ns - self.passes_ns) / 1e6
