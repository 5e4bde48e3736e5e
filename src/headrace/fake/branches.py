"""Races inside a graph: between the streams of one capture.

Nothing runs during a capture, and a replay puts the whole graph on one stream. What orders its
operations among themselves is the order of the captured streams, which is the same in each replay.
So it is checked once, while the graph is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.races.actors import Clock, join
from headrace.races.checker import Checker
from headrace.races.entries import Entries, Entry
from headrace.races.race import Launch
from headrace.races.storages import Storage

if TYPE_CHECKING:
    from headrace.fake.streams import FakeStream


class Branches:
    """The order of the operations of one capture. The actors of its clocks are the streams."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._clocks: dict[int, Clock] = {}
        self._entries: dict[int, tuple[Storage, Entries]] = {}

    def clock(self, stream: FakeStream) -> Clock:
        """What the next operation on a captured stream is ordered after."""
        number = stream.state.number
        return self._clocks.setdefault(number, {number: 0})

    def wait(self, stream: FakeStream, clock: Clock) -> None:
        """Let a stream wait for a position in another one."""
        join(self.clock(stream), clock)

    def launched(self, stream: FakeStream, launch: Launch) -> None:
        """Check a captured operation against those before it."""
        number, clock = stream.state.number, self.clock(stream)
        clock[number] += 1
        for tensor, access in launch.accesses(stream.name, False, None):
            place = self._checker.place(tensor)
            if place is None:
                continue
            tracked, layout = place
            _, entries = self._entries.setdefault(id(tracked), (tracked, Entries()))
            entry = Entry(number, clock[number], layout, access)
            for before in entries.record(entry, clock):
                self._checker.report(tracked, before.access, access)
