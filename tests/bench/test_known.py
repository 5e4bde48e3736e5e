"""What is known survives the process that measured it, whatever became of that."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.bench.known import Activity, EarlierResults, Loss
from headrace.errors import BenchError


@dataclass
class Plan:
    name: str
    found: dict[str, Any] = field(default_factory=dict)
    timings: list[int] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        return self.found

    def resume(self, measured: dict[str, Any]) -> None:
        self.found = measured


def in_child(known: EarlierResults, *records: tuple[str, Any]) -> None:
    """Another process stores these and ends without a word."""
    child = os.fork()
    if not child:
        for what, arguments in records:
            getattr(known, what)(*arguments)
        os._exit(3)
    os.waitpid(child, 0)


def begins(name: str | None, activity: Activity | None = None) -> tuple[str, Any]:
    return "begin", (name, activity)


def test_a_child_leaves_what_it_has_measured_and_in_whose_turn_it_ended() -> None:
    known = EarlierResults()
    measured = [("keep", (Plan("a", {"ms": 1}),)), ("keep", (Plan("a", {"ms": 2}),))]
    in_child(known, begins(None), begins("a", "timing"), *measured, begins("b", "timing"))
    assert known.has_grown()
    assert not known.has_grown()
    known.ended("SIGSEGV")
    plans = [Plan("a"), Plan("b")]
    lost = Loss("b", "timing", "ended the process (SIGSEGV)")
    assert known.resume(plans) == [lost]
    assert str(lost) == "ended the process (SIGSEGV) while timing"
    assert [plan.found for plan in plans] == [{"ms": 2}, {}]
    in_child(known, begins(None), begins("a", "profiling"))
    known.ended("exit code 3")
    assert known.resume(plans) == [lost, Loss("a", "profiling", "ended the process (exit code 3)")]


def test_one_that_said_itself_whom_it_lost_is_believed() -> None:
    known, lost = EarlierResults(), Loss("a", "timing", "ended the device's context (…)")
    in_child(known, begins("a", "timing"), ("lose", (lost,)))
    known.ended("exit code 75")
    assert known.resume([Plan("a")]) == [lost]


def test_an_end_in_nobodys_turn_is_an_error() -> None:
    known = EarlierResults()
    in_child(known, begins("a", "timing"), begins(None))
    known.ended("SIGABRT")
    with pytest.raises(BenchError, match=r"workload ended the process \(SIGABRT\) while it was"):
        known.resume([Plan("a")])


def test_each_timing_is_stored_once() -> None:
    """Over a thousand rounds the file must not grow by a thousand rounds each."""
    known, plan = EarlierResults(), Plan("a", {}, [1, 2])
    in_child(known, ("keep", (plan,)), ("keep", (plan,)))
    again = Plan("a")
    known.resume([again])
    again.timings.append(3)
    in_child(known, ("keep", (again,)))
    last = Plan("a")
    known.resume([last])
    assert last.timings == [1, 2, 3]


def test_a_half_written_record_is_dropped_and_written_over() -> None:
    known = EarlierResults()
    known.keep(Plan("a", {"ms": 1}))
    whole = os.fstat(known._file.fileno()).st_size
    known.keep(Plan("a", {"ms": 2}))
    known._file.truncate(whole + 7)
    plan = Plan("a")
    assert known.resume([plan]) == []
    known.keep(Plan("a", {"ms": 3}))
    known.resume([plan])
    assert plan.found == {"ms": 3}


def test_what_is_settled_stays_so_and_the_end_is_seen_by_all() -> None:
    known = EarlierResults()
    in_child(known, ("settled", ("path", "first.json")))
    assert known.settled("path", "second.json") == "first.json"
    assert not known.is_over
    in_child(known, ("end", ()))
    assert known.is_over
