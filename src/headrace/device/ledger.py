"""The ledger: every host wait, with its reason and duration.

A *host wait* is a moment in which a Python thread blocks because the device, the loader or another
rank has not finished. Headrace waits in no other way, so the ledger is complete.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from math import log2
from threading import get_ident
from typing import Any

from headrace.text_table import text_table

_NS_PER_MS = 1_000_000
# Durations are counted in buckets, each 2^(1/32) times as wide as the one before, so memory does
# not grow with the run. A percentile is off by at most 1.1 %.
_BUCKETS_PER_OCTAVE = 32
_COUNTED = ("count", "blocked", "total_ns", "max_ns")


@dataclass(frozen=True, slots=True)
class WaitStatistics:
    """Host waits of one reason. Times in milliseconds.

    `count` is how often the host asked to wait, and `blocked` how often it had to: in the other
    cases the work was done already. `total_ms` leaves out waits that were nested in this one: they
    count under their own reason only. p50 and p99 are exact to 1.1 %.
    """

    reason: str
    count: int
    blocked: int
    total_ms: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class WaitUnderWay:
    """A thread that waits now: the reason, and for how many milliseconds."""

    thread: str
    reason: str
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """A snapshot of the ledger. Times in milliseconds.

    `total_ms` adds up the waits of all threads. `wall_ms` is how long at least one thread waited:
    two threads that wait during the same second add two seconds to `total_ms` and one to `wall_ms`.
    A wait that has not ended counts in `wall_ms` up to now, and in the other figures when it ends.
    """

    reasons: tuple[WaitStatistics, ...]
    count: int
    blocked: int
    total_ms: float
    wall_ms: float

    def __getitem__(self, reason: str) -> WaitStatistics:
        """The waits of `reason`; all zero if there were none."""
        for waits in self.reasons:
            if waits.reason == reason:
                return waits
        return _Tally().statistics(reason)

    def device_waits(self) -> int:
        """How often the host waited for the device: all waits but those for the loader."""
        return self.count - self["data"].count

    def table(self) -> str:
        """The statistics as a text table, the longest total first."""
        if not self.reasons:
            return "The host never waited."
        columns = ("host wait", "count", "blocked", "total ms", "mean ms", "p50", "p99", "max")
        rows = [
            (w.reason, w.count, w.blocked, w.total_ms, w.mean_ms, w.p50_ms, w.p99_ms, w.max_ms)
            for w in sorted(self.reasons, key=lambda w: (-w.total_ms, w.reason))
        ]
        return text_table(columns, rows)

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists and numbers, ready for `json.dumps`."""
        return {
            "count": self.count,
            "blocked": self.blocked,
            "total_ms": self.total_ms,
            "wall_ms": self.wall_ms,
            "reasons": {w.reason: _without_reason(w) for w in self.reasons},
        }


class Ledger:
    """Counts host waits by reason, for the current epoch and in all. Safe in any thread.

        with ledger.waiting("run_ahead"):
            event.synchronize()
        ledger.passed("run_ahead")          # there was nothing to wait for

    `clock_ns` returns monotonic nanoseconds; the fake device passes its virtual clock. `on_wait`,
    if set, is called after each wait with its reason, start and end by that clock.
    """

    on_wait: Callable[[str, int, int], object] | None = None

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._epoch = _Tallies()
        self._before = _Tallies()
        self._around: list[_Tallies] = []  # the epochs outside the blocks of `apart`
        self._waiting_threads = 0
        self._wall_since_ns = 0
        #: The innermost wait of each thread that waits now.
        self._under_way: dict[int, _WaitBlock] = {}

    def now_ns(self) -> int:
        """The time by this ledger's clock, which is virtual on the fake device."""
        return self._clock_ns()

    def passed(self, reason: str) -> None:
        """Count a wait whose work was done already, with a duration of 0."""
        with self._lock:
            self._epoch.of(reason).count += 1

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Count the block as a host wait, also if it raises."""
        return _WaitBlock(self, reason)

    @contextmanager
    def telling(self, on_wait: Callable[[str, int, int], object]) -> Iterator[None]:
        """Inside the block, call `on_wait` after each wait: its reason, beginning and end."""
        before, self.on_wait = self.on_wait, on_wait
        try:
            yield
        finally:
            self.on_wait = before

    def start_epoch(self) -> None:
        """Start `epoch_statistics` from zero; `statistics` goes on counting.

        A wait that has begun and not ended belongs to the epoch in which it ends, with all of its
        time. Only `wall_ms` is split at this moment.
        """
        with self._lock:
            self._close_wall()
            self._before.add(self._epoch)
            self._epoch = _Tallies()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep waits inside the block out of the current epoch, which goes on after it."""
        with self._lock:
            self._close_wall()
            self._around.append(self._epoch)
            self._epoch = _Tallies()
        try:
            yield
        finally:
            with self._lock:
                self._close_wall()
                self._before.add(self._epoch)
                self._epoch = self._around.pop()

    def statistics(self) -> LedgerStatistics:
        """All waits since the ledger was made."""
        with self._lock:
            return self._everything().statistics()

    def epoch_statistics(self) -> LedgerStatistics:
        """The waits since the last `start_epoch`."""
        with self._lock:
            self._close_wall()
            return self._epoch.statistics()

    def under_way(self) -> tuple[WaitUnderWay, ...]:
        """The threads that wait at this moment, each with the reason of its innermost wait."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        now_ns = self._clock_ns()
        return tuple(
            WaitUnderWay(
                names.get(ident, f"thread {ident}"),
                wait._reason,
                (now_ns - wait._start_ns) / _NS_PER_MS,
            )
            for ident, wait in list(self._under_way.items())
        )

    def state_dict(self) -> dict[str, Any]:
        """All waits since the ledger was made, as plain values."""
        with self._lock:
            return self._everything().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state, which replaces what was counted here."""
        with self._lock:
            self._close_wall()
            self._before, self._epoch = _Tallies.of_state(state), _Tallies()

    def _everything(self) -> _Tallies:
        self._close_wall()
        everything = _Tallies()
        for part in (self._before, *self._around, self._epoch):
            everything.add(part)
        return everything

    def _close_wall(self) -> None:
        """Add the wall time up to now: an epoch may end during a wait."""
        if self._waiting_threads:
            now_ns = self._clock_ns()
            # On the fake device each thread has its own clock, and this thread's may be behind.
            if now_ns > self._wall_since_ns:
                self._epoch.wall_ns += now_ns - self._wall_since_ns
                self._wall_since_ns = now_ns


class _WaitBlock:
    """The block of `Ledger.waiting`. It runs in every step, so it is a class with few calls."""

    __slots__ = ("_around", "_ident", "_ledger", "_nested_ns", "_reason", "_start_ns")

    def __init__(self, ledger: Ledger, reason: str) -> None:
        self._ledger = ledger
        self._reason = reason

    def __enter__(self) -> None:
        ledger, self._nested_ns = self._ledger, 0
        self._ident = ident = get_ident()
        self._around: _WaitBlock | None = ledger._under_way.get(ident)
        if self._around is not None:
            self._start_ns = ledger._clock_ns()
        else:
            with ledger._lock:  # with the clock: else another thread's wait could count in between
                self._start_ns = start_ns = ledger._clock_ns()
                if not ledger._waiting_threads:
                    ledger._wall_since_ns = start_ns
                ledger._waiting_threads += 1
        ledger._under_way[ident] = self

    def __exit__(self, *exception: object) -> None:
        ledger, around = self._ledger, self._around
        end_ns = ledger._clock_ns()
        elapsed_ns = end_ns - self._start_ns
        with ledger._lock:
            ledger._epoch.of(self._reason).add_wait(elapsed_ns - self._nested_ns)
            if around is None:
                ledger._under_way.pop(self._ident, None)
                # As `_close_wall`, without a call: some thread waits, this one.
                if end_ns > ledger._wall_since_ns:
                    ledger._epoch.wall_ns += end_ns - ledger._wall_since_ns
                    ledger._wall_since_ns = end_ns
                ledger._waiting_threads -= 1
            else:
                ledger._under_way[self._ident] = around
                around._nested_ns += elapsed_ns  # the outer wait does not count this time, too
        if ledger.on_wait is not None:
            ledger.on_wait(self._reason, self._start_ns, end_ns)


class _Tally:
    """Running figures of one reason."""

    __slots__ = ("blocked", "buckets", "count", "max_ns", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.blocked = 0
        self.total_ns = 0
        self.max_ns = 0
        self.buckets: dict[int, int] = {}

    def add_wait(self, ns: int) -> None:
        self.count += 1
        self.blocked += 1
        self.total_ns += ns
        if ns > self.max_ns:
            self.max_ns = ns
        bucket = int(log2(ns) * _BUCKETS_PER_OCTAVE) if ns > 0 else -1
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def add(self, other: _Tally) -> None:
        self.count += other.count
        self.blocked += other.blocked
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def percentile_ms(self, share: float) -> float:
        """The duration that a `share` of all waits did not exceed; waits that passed count as 0."""
        rank = math.ceil(share * self.count) - (self.count - self.blocked)
        if rank <= 0:
            return 0.0
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                middle_ns = 2.0 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE) if bucket >= 0 else 0.0
                return min(middle_ns, self.max_ns) / _NS_PER_MS
        return self.max_ns / _NS_PER_MS

    def statistics(self, reason: str) -> WaitStatistics:
        return WaitStatistics(
            reason=reason,
            count=self.count,
            blocked=self.blocked,
            total_ms=self.total_ns / _NS_PER_MS,
            mean_ms=self.total_ns / self.count / _NS_PER_MS if self.count else 0.0,
            p50_ms=self.percentile_ms(0.50),
            p99_ms=self.percentile_ms(0.99),
            max_ms=self.max_ns / _NS_PER_MS,
        )


class _Tallies:
    """The tallies of all reasons over one period."""

    def __init__(self) -> None:
        self.by_reason: dict[str, _Tally] = {}
        self.wall_ns = 0

    def of(self, reason: str) -> _Tally:
        tally = self.by_reason.get(reason)
        if tally is None:
            tally = self.by_reason[reason] = _Tally()
        return tally

    def add(self, other: _Tallies) -> None:
        self.wall_ns += other.wall_ns
        for reason, tally in other.by_reason.items():
            self.of(reason).add(tally)

    def state_dict(self) -> dict[str, Any]:
        reasons = {
            reason: {
                **{name: getattr(tally, name) for name in _COUNTED},
                "buckets": dict(tally.buckets),
            }
            for reason, tally in self.by_reason.items()
        }
        return {"wall_ns": self.wall_ns, "reasons": reasons}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> _Tallies:
        tallies = cls()
        tallies.wall_ns = state["wall_ns"]
        for reason, counted in state["reasons"].items():
            tally = tallies.of(reason)
            for name in _COUNTED:
                setattr(tally, name, counted[name])
            tally.buckets = dict(counted["buckets"])
        return tallies

    def statistics(self) -> LedgerStatistics:
        tallies = self.by_reason.values()
        return LedgerStatistics(
            reasons=tuple(tally.statistics(reason) for reason, tally in self.by_reason.items()),
            count=sum(tally.count for tally in tallies),
            blocked=sum(tally.blocked for tally in tallies),
            total_ms=sum(tally.total_ns for tally in tallies) / _NS_PER_MS,
            wall_ms=self.wall_ns / _NS_PER_MS,
        )


def _without_reason(waits: WaitStatistics) -> dict[str, object]:
    figures = asdict(waits)
    del figures["reason"]
    return figures
