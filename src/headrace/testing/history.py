"""The last operations and waits of a fake device, for the picture of a race."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.source_lines import Site
from headrace.testing.races import Access, Race

_KEPT = 4096
# How many operations of one stream a picture shows on each side of what matters.
_SHOWN_AROUND = 2


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
        self._moments: deque[Moment] = deque(maxlen=_KEPT)
        self._count = 0
        self._last: dict[str, int] = {}

    def add(self, lane: str, does: str, name: str, site: Site, after: int | None = None) -> int:
        self._count += 1
        self._moments.append(Moment(self._count, lane, does, name, site, after))
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
        shown = [
            moment
            for moment in moments
            if first.number - 2 * _SHOWN_AROUND <= moment.number <= second.number
            and (moment.lane in lanes or moment.does == "wait")
        ]
        return Picture(first.number, second.number, tuple(_thinned(shown, first, second, lanes)))

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
    here = [m for m in moments if (m.lane, m.site) == (access.where, access.site)]
    exact = [moment for moment in here if moment.name == access.operation]
    # An allocation is no moment of its own: take the operation that made it.
    return (exact or here)[-1] if here else None


def _thinned(
    moments: Sequence[Moment], first: Moment, second: Moment, lanes: set[str]
) -> list[Moment]:
    """Keep the two accesses, the waits between their streams with what they wait for, and the
    nearest operations."""
    by_number = {moment.number: moment for moment in moments}
    kept = {first.number: first, second.number: second}
    for moment in moments:
        if moment.does != "wait" or moment.after is None:
            continue
        cause = by_number.get(moment.after)
        if cause is not None and moment.lane in lanes and cause.lane in lanes:
            kept[moment.number] = moment
            kept[cause.number] = cause
    waits = sorted(number for number in kept if by_number[number].does == "wait")
    for number in waits[3:-3]:
        del kept[number]
    for lane in lanes:
        here = [m for m in moments if m.lane == lane and m.does == "operation"]
        for place in (first.number, second.number):
            before = [m for m in here if m.number < place][-_SHOWN_AROUND:]
            after = [m for m in here if m.number > place][:_SHOWN_AROUND]
            kept.update((m.number, m) for m in (*before, *after))
    return [kept[number] for number in sorted(kept)]
