"""Contestants take turns. What each turn has measured is stored before the next one begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.bench.contestants import Contestant
from headrace.bench.known import Activity, EarlierResults, Loss
from headrace.bench.trainable import DeviceLost

log = logging.getLogger("headrace")
#: Storing takes at most this share of the time. Short turns are not stored one by one.
STORING_SHARE = 0.05


class ContestantTurns:
    """The contestants of one benchmark. `store` is called after a turn, to show what is known.

    With `known`, they go on from what an earlier process has measured. Raises `BenchError` if that
    process was ended by the workload itself, not by a contestant.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        known: EarlierResults | None,
        store: Callable[[], object],
    ) -> None:
        self._contestants, self._known, self._store = contestants, known, store
        self._store_after_s = 0.0  # on the monotonic clock
        #: Why there is no profile, if a contestant has ended the process under the profiler.
        self.unprofiled: str | None = None
        #: Who has left this process without a usable device, and how.
        self.lost: Loss | None = None
        if known is not None:
            losses = known.resume(contestants)
            for loss in losses:
                self._lose(loss)
            if losses:
                log.warning("%s %s; measuring goes on without it", losses[-1].name, losses[-1])

    def begin(self) -> None:
        """The workload is built. An end of the process is nobody's turn."""
        if self._known is not None:
            self._known.begin(None)

    @contextmanager
    def of(self, contestant: Contestant, activity: Activity) -> Iterator[None]:
        """The contestant's turn, in which it may end this process. Passes on `DeviceLost`: then no
        other turn is possible here."""
        if self._known is not None:
            self._known.begin(contestant.name, activity)
        try:
            yield
        except DeviceLost as problem:
            self.lost = Loss(contestant.name, activity, str(problem))
            self._lose(self.lost)
            if self._known is not None:
                self._known.lose(self.lost)
            raise
        if self._known is not None:
            self._known.keep(contestant)
        began_s = time.monotonic()
        if began_s >= self._store_after_s:
            self._store()
            ended_s = time.monotonic()
            self._store_after_s = ended_s + (ended_s - began_s) * (1 / STORING_SHARE - 1)

    def _lose(self, loss: Loss) -> None:
        contestant = next(one for one in self._contestants if one.name == loss.name)
        contestant.fail(str(loss))
        if loss.activity == "profiling":  # it may be the profiler's fault: try no other
            self.unprofiled = f"{loss.name} {loss}"
