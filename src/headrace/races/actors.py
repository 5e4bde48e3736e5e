"""Host threads and streams, each with its vector clock."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.races.checker import Checker
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.races.checker import Checker

Clock = dict[int, int]
# How far one host thread may be behind another on the same stream and still know its clock.
_HISTORY = 4096


def join(into: Clock, other: Clock) -> None:
    """Order `into` after everything that `other` is ordered after."""
    for actor, tick in other.items():
        if into.get(actor, 0) < tick:
            into[actor] = tick


class StreamState:
    """What all host threads share of a stream."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        #: Virtual time at which the stream will have done all its work.
        self.time_ns = 0
        self.views: list[StreamView] = []


class Actor:
    """A host thread, or a stream as one host thread uses it, with its vector clock."""

    is_host = False
    #: For a stream: its `StreamState.number`.
    stream_number = -1
    #: The host thread, or the one that uses the stream.
    host: Host
    time_ns: int

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {number: 0}

    def advance(self) -> None:
        """Count one more operation of this actor."""
        self.clock[self.number] += 1

    def knows(self, actor: int, tick: int) -> bool:
        return self.clock.get(actor, 0) >= tick


class StreamView(Actor):
    """A stream as one host thread uses it. Its clock is what the thread's next operation on the
    stream will be ordered after.

    The thread's own clock counts what it puts on the stream, under `queue_number`. A thread that is
    ordered after the n-th of these puts its work behind it: its view joins the clock that this one
    had then. With one host thread there is nobody to tell, and nothing is counted.
    """

    def __init__(self, number: int, queue_number: int, stream: StreamState, host: Host) -> None:
        super().__init__(number, stream.name)
        self._stream = stream
        self.stream_number = stream.number
        self.queue_number = queue_number
        self.host = host
        self._history: deque[tuple[int, Clock]] = deque(maxlen=_HISTORY)
        self._seen: Clock = {}

    @property
    def time_ns(self) -> int:
        return self._stream.time_ns

    @time_ns.setter
    def time_ns(self, value: int) -> None:
        self._stream.time_ns = value

    def refresh(self) -> None:
        """Learn what other threads have put on the stream, as far as this thread knows of it."""
        for other in self._stream.views if len(self._stream.views) > 1 else ():
            known = self.host.clock.get(other.queue_number, 0)
            if other is not self and known > self._seen.get(other.queue_number, 0):
                self._seen[other.queue_number] = known
                join(self.clock, other.clock_at(known))

    def clock_at(self, count: int) -> Clock:
        """The clock that this view had when `count` things were on the stream."""
        for number, clock in reversed(self._history):
            if number <= count:
                return clock
        return {}

    def queued(self) -> None:
        """Count that this thread has put something on the stream."""
        clock = self.host.clock
        count = clock[self.queue_number] = clock.get(self.queue_number, 0) + 1
        self._history.append((count, dict(self.clock)))


class Host(Actor):
    """A host thread. Its clock is what the thread has waited for."""

    is_host = True

    def __init__(self, number: int, name: str, checker: Checker) -> None:
        super().__init__(number, name)
        self.host = self
        self.time_ns = 0
        self.views: dict[int, StreamView] = {}
        self._checker = checker

    def view(self, stream: StreamState) -> StreamView:
        """The stream as this thread uses it."""
        view = self.views.get(stream.number)
        if view is None:
            view = self.views[stream.number] = self._checker.new_view(stream, self)
        return view
