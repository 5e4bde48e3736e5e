"""The last operations and waits of a fake device, for the picture of a race."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.races.race import Access, Race
from headrace.source_lines import Site

_KEPT = 2048
# How many operations of a stream a picture shows around each access, how many waits before the
# first access, and how many after it, from either end.
_SHOWN_AROUND, _WAITS_BEFORE, _WAITS_BETWEEN = 2, 2, 3


class Moment(NamedTuple):
    """One thing that the program did. `lane` is the stream or host thread where it happens.

    `does` is "operation", "record" (an event) or "wait". A wait is ordered after the moment with
    the number `after`.
    """

    number: int
    lane: str
    does: str
    name: str
    site: Site
    after: int | None = None


class History:
    """What happened last, in the program's order."""

    def __init__(self) -> None:
        # No deque: in a block, deques order the threads that use them.
        self._moments: list[Moment] = []
        self._count = 0
        self._last: dict[str, int] = {}

    def add(self, lane: str, does: str, name: str, site: Site, after: int | None = None) -> int:
        self._count += 1
        self._moments.append(Moment(self._count, lane, does, name, site, after))
        if len(self._moments) > 2 * _KEPT:
            del self._moments[:_KEPT]
        self._last[lane] = self._count
        return self._count

    def last_on(self, lane: str) -> int | None:
        """The number of the last moment on a stream."""
        return self._last.get(lane)

    def around(self, race: Race) -> Picture:
        """What to show of a race that was found just now."""
        moments = list(self._moments)
        first = _find(moments, race.first)
        second = _find(moments, race.second)
        if first is None:
            first = self._made_up(race.first, moments[0].number - 1 if moments else 0)
            moments.insert(0, first)
        if second is None or second.number <= first.number:
            second = self._made_up(race.second, self._count + 1)
            moments.append(second)
        lanes = {race.first.where, race.second.where}
        waits = _waits_between(lanes, moments, second.number)
        earlier = [wait for wait in waits if wait.number < first.number][-_WAITS_BEFORE:]
        later = [wait for wait in waits if wait.number > first.number]
        if len(later) > 2 * _WAITS_BETWEEN:
            later = [*later[:_WAITS_BETWEEN], *later[-_WAITS_BETWEEN:]]
        kept = {moment.number: moment for moment in (first, second, *earlier, *later)}
        causes = {wait.after for wait in (*earlier, *later)}
        kept.update((moment.number, moment) for moment in moments if moment.number in causes)
        for lane in lanes:
            here = [m for m in moments if m.lane == lane and m.does == "operation"]
            for place in (first.number, second.number):
                before = [m for m in here if m.number < place][-_SHOWN_AROUND:]
                after = [m for m in here if place < m.number < second.number][:_SHOWN_AROUND]
                kept.update((m.number, m) for m in (*before, *after))
        shown = tuple(kept[number] for number in sorted(kept))
        return Picture(first.number, second.number, shown)

    @staticmethod
    def _made_up(access: Access, number: int) -> Moment:
        return Moment(number, access.where, "operation", access.operation, access.site)


class Picture(NamedTuple):
    """The moments around a race, in the program's order, and the numbers of the two that race. A
    gap in the numbers means that there were more."""

    first: int
    second: int
    moments: tuple[Moment, ...]

    def lanes(self) -> list[str]:
        """The streams and host threads of these moments, those of the two accesses first."""
        numbers = {moment.number: moment for moment in self.moments}
        first = [numbers[self.first].lane, numbers[self.second].lane]
        return list(dict.fromkeys([*first, *(moment.lane for moment in self.moments)]))


def _find(moments: Sequence[Moment], access: Access) -> Moment | None:
    if access.moment is not None:
        return next((moment for moment in moments if moment.number == access.moment), None)
    # An allocation is no moment of its own: take the operation that made it.
    here = [m for m in moments if (m.lane, m.site) == (access.where, access.site)]
    return here[-1] if here else None


def _waits_between(lanes: set[str], moments: Sequence[Moment], until: int) -> list[Moment]:
    """The waits of one of these streams or host threads for another one, up to a moment."""
    by_number = {moment.number: moment for moment in moments}
    return [
        moment
        for moment in moments
        if moment.does == "wait"
        and moment.lane in lanes
        and moment.number < until
        and moment.after in by_number
        and by_number[moment.after].lane in lanes - {moment.lane}
    ]
