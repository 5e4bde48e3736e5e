"""The ledger: counts, times, nesting, threads, epochs. The tests set the clock."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import Ledger

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(clock)


def wait(ledger: Ledger, clock: Clock, reason: str, ms: float) -> None:
    with ledger.waiting(reason):
        clock.ns += round(ms * MS)


def test_waits_are_counted_by_reason(ledger: Ledger, clock: Clock) -> None:
    for ms in (1, 2, 3):
        wait(ledger, clock, "run_ahead", ms)
    wait(ledger, clock, "losses", 10)
    statistics = ledger.statistics()
    run_ahead = statistics["run_ahead"]
    assert (run_ahead.count, run_ahead.total_ms, run_ahead.mean_ms) == (3, 6.0, 2.0)
    assert run_ahead.max_ms == 3.0
    assert (statistics.count, statistics.total_ms, statistics.wall_ms) == (4, 16.0, 16.0)


def test_a_wait_whose_work_was_done_already(ledger: Ledger, clock: Clock) -> None:
    ledger.passed("run_ahead")
    wait(ledger, clock, "run_ahead", 4)
    waits = ledger.statistics()["run_ahead"]
    assert (waits.count, waits.blocked, waits.mean_ms) == (2, 1, 2.0)


def test_a_reason_that_never_occurred_is_all_zero(ledger: Ledger) -> None:
    assert ledger.statistics()["never"].count == 0
    assert ledger.statistics()["never"].p99_ms == 0.0


def test_nested_waits_are_counted_once(ledger: Ledger, clock: Clock) -> None:
    with ledger.waiting("drain"):
        clock.ns += 2 * MS
        wait(ledger, clock, "losses", 3)
        clock.ns += 1 * MS
        with ledger.waiting("copy"):
            wait(ledger, clock, "losses", 5)
            clock.ns += 4 * MS
    statistics = ledger.statistics()
    assert statistics["drain"].total_ms == 3.0
    assert statistics["copy"].total_ms == 4.0
    assert statistics["losses"].total_ms == 8.0
    assert statistics.total_ms == statistics.wall_ms == 15.0


def test_threads_that_wait_together_count_once_in_wall_time(ledger: Ledger, clock: Clock) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with ledger.waiting("worker"):
            inside.set()
            leave.wait()

    with ledger.waiting("main"):
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        clock.ns += 10 * MS
        leave.set()
        thread.join()
    statistics = ledger.statistics()
    assert statistics["main"].total_ms == statistics["worker"].total_ms == 10.0
    assert statistics.total_ms == 20.0
    assert statistics.wall_ms == 10.0


def test_many_threads_lose_nothing() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(500):
            with ledger.waiting("one"):
                ledger.passed("two")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = ledger.statistics()
    assert statistics["one"].count == statistics["two"].count == 4000


def test_an_exception_is_counted_and_passed_on(ledger: Ledger, clock: Clock) -> None:
    def broken() -> None:
        clock.ns += 7 * MS
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), ledger.waiting("data"):
        broken()
    wait(ledger, clock, "data", 1)
    assert ledger.statistics()["data"].total_ms == 8.0
    assert ledger.statistics().wall_ms == 8.0


def test_epochs_begin_at_zero_and_the_total_goes_on(ledger: Ledger, clock: Clock) -> None:
    wait(ledger, clock, "run_ahead", 5)
    ledger.start_epoch()
    assert ledger.epoch_statistics().count == 0
    wait(ledger, clock, "run_ahead", 3)
    assert ledger.epoch_statistics()["run_ahead"].total_ms == 3.0
    assert ledger.statistics()["run_ahead"].total_ms == 8.0
    assert ledger.statistics()["run_ahead"].max_ms == 5.0


def test_an_epoch_may_end_inside_a_wait(ledger: Ledger, clock: Clock) -> None:
    with ledger.waiting("data"):
        clock.ns += 4 * MS
        ledger.start_epoch()
        clock.ns += 2 * MS
    assert ledger.epoch_statistics().wall_ms == 2.0
    assert ledger.statistics().wall_ms == 6.0
    # The wait itself belongs to the epoch in which it ended.
    assert ledger.epoch_statistics()["data"].total_ms == 6.0
    assert ledger.epoch_statistics()["data"].count == 1


def test_wall_time_never_goes_back(ledger: Ledger, clock: Clock) -> None:
    # On the fake device each thread has its own clock, and one may be behind another.
    clock.ns = 100 * MS
    with ledger.waiting("data"):
        clock.ns = 40 * MS
        assert ledger.statistics().wall_ms == 0.0
        ledger.start_epoch()
        clock.ns = 103 * MS
        assert ledger.statistics().wall_ms == 3.0
    assert ledger.statistics().wall_ms == 3.0


@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=200))
def test_percentiles_are_exact_to_one_percent(durations_ns: list[int]) -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for ns in durations_ns:
        with ledger.waiting("x"):
            clock.ns += ns
    waits = ledger.statistics()["x"]
    ordered = sorted(durations_ns)
    for share, found_ms in ((0.50, waits.p50_ms), (0.99, waits.p99_ms)):
        exact_ms = ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)] / MS
        assert found_ms == pytest.approx(exact_ms, rel=0.0225)
    assert waits.p50_ms <= waits.p99_ms <= waits.max_ms


def test_a_table_and_a_dict(ledger: Ledger, clock: Clock) -> None:
    wait(ledger, clock, "losses", 2)
    wait(ledger, clock, "run_ahead", 30)
    lines = ledger.statistics().table().splitlines()
    assert lines[2].split()[0] == "run_ahead"  # the longest total first
    assert lines[3].split()[:4] == ["losses", "1", "1", "2.000"]
    content = json.loads(json.dumps(ledger.statistics().to_dict()))
    assert content["reasons"]["run_ahead"]["max_ms"] == 30.0
    assert content["count"] == 2


def test_an_empty_ledger_says_so(ledger: Ledger) -> None:
    assert ledger.statistics().table() == "The host never waited."
    assert ledger.statistics().to_dict()["reasons"] == {}


def test_on_wait_is_called_for_each_wait(ledger: Ledger, clock: Clock) -> None:
    heard: list[tuple[str, int, int]] = []
    ledger.on_wait = lambda reason, start_ns, end_ns: heard.append((reason, start_ns, end_ns))
    clock.ns = 5
    wait(ledger, clock, "losses", 2)
    ledger.passed("losses")
    assert heard == [("losses", 5, 5 + 2 * MS)]


def test_wall_time_is_not_counted_twice_when_a_thread_is_delayed() -> None:
    """A thread reads the clock, and another one waits before the first has registered its wait."""
    has_read, go_on = threading.Event(), threading.Event()
    now: list[int] = [0]
    can_be_delayed: list[bool] = []

    def clock_ns() -> int:
        if threading.current_thread().name == "late" and not can_be_delayed:
            can_be_delayed.append(not ledger._lock.locked())
            has_read.set()
            if can_be_delayed[0]:
                go_on.wait(60)
            return 0
        return now[0]

    ledger = Ledger(clock_ns)

    def wait() -> None:
        with ledger.waiting("late"):
            now[0] += 10

    late = threading.Thread(target=wait, name="late")
    late.start()
    has_read.wait(60)
    if not can_be_delayed[0]:  # it has the lock: others come after it
        late.join(60)
    with ledger.waiting("other"):
        now[0] += 200
    go_on.set()
    late.join(60)
    assert ledger.statistics().wall_ms == pytest.approx(210e-6)


def test_a_wait_may_be_entered_again() -> None:
    now = [0]
    ledger = Ledger(lambda: now[0])
    outer = ledger.waiting("outer")
    for _ in range(2):
        with outer:
            now[0] += 10
            with ledger.waiting("inner"):
                now[0] += 1000
    assert ledger.statistics()["outer"].total_ms == pytest.approx(20e-6)
