"""Several ranks: which one the others wait for, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.diagnosis.ranks import Meeting, of_ranks
from headrace.diagnosis.text import text_of
from headrace.records import DiagnosisResult, HostLine, LineRecord, RankFigures, TimeParts
from headrace.report.diagnosis_page import diagnosis_page
from support.processes.process_groups import fake_process_group

SLEEPS = LineRecord("train.py", 12, "step", "time.sleep(0.02)")
BACKWARD = LineRecord("train.py", 14, "step", "loss.backward()")
MS = 1_000_000


def rank(
    number: int, waits_ms: float, lines: dict[LineRecord, float], parts: TimeParts | None = None
) -> DiagnosisResult:
    figures = RankFigures(
        number,
        f"node{number}",
        25.0,
        None if parts is None else parts.computing,
        waits_ms,
        tuple(HostLine(line, ms) for line, ms in lines.items()),
    )
    return DiagnosisResult(
        step_ms=25.0, verdict=("A step takes 25.0 ms.",), parts=parts, ranks=(figures,)
    )


def test_the_slowest_rank_is_named_with_its_line() -> None:
    fast = rank(0, 20.0, {BACKWARD: 24.0})
    result = of_ranks([fast, rank(1, 0.1, {SLEEPS: 20.0, BACKWARD: 4.0}), fast])
    assert result.verdict == (
        "Of 3 ranks, rank 1 waits least for the others, 0.1 ms a step (rank 0: 20.0 ms): they wait "
        "for it. This is its diagnosis.",
        "Its host spends 20.0 ms more than the others at train.py:12: time.sleep(0.02)",
        "A step takes 25.0 ms.",
    )
    table = text_of(result)
    assert "waits for others ms" in table
    assert "node1" in table
    page = diagnosis_page(result, "{}")
    assert "node1" in page
    assert "train.py:12 (" in page


def test_a_single_rank_needs_no_table() -> None:
    alone = rank(0, 0.0, {SLEEPS: 20.0})
    assert "waits for others" not in text_of(alone)
    assert "waits for others" not in diagnosis_page(alone, "{}")


def test_the_part_of_a_step_that_is_longer_is_named() -> None:
    fast, slow = TimeParts(computing=10, other_ranks=15), TimeParts(computing=24, other_ranks=1)
    result = of_ranks([rank(0, 15.0, {}, fast), rank(1, 1.0, {}, slow)])
    assert result.verdict[1] == "Of its step, 14.0 ms more than on the others are computing."
    assert result.parts == slow


def test_ranks_that_wait_alike_have_no_slowest() -> None:
    result = of_ranks([rank(0, 1.0, {}), rank(1, 1.1, {})])
    assert result.verdict[0].startswith("None of 2 ranks waits much longer")
    assert len(result.ranks) == 2


class Store:
    """As a process group's, without others."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def wait(self, keys: list[str], timeout: Any) -> None:
        if not set(keys) <= self.values.keys():
            raise RuntimeError("wait timeout")

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_rank_0_gets_all_results_and_tells_what_did_not_come() -> None:
    store = Store()
    results = [rank(0, 20.0, {}), rank(1, 0.1, {SLEEPS: 20.0})]
    assert Meeting(store, 1, 3).gathered(results[1]) is results[1]
    merged = Meeting(store, 0, 3).gathered(results[0])
    assert [one.rank for one in merged.ranks] == [0, 1]
    assert "rank 1 waits least" in merged.verdict[0]
    assert merged.missing == ("no diagnosis came from rank 2",)
    alone = Meeting(Store(), 0, 2).gathered(results[0])
    assert replace(alone, missing=()) == results[0]


def test_ranks_meet_at_the_store_of_the_process_group() -> None:
    assert Meeting.now() is None
    with fake_process_group(2):
        meeting = Meeting.now()
    assert meeting is not None
    assert (meeting.rank, meeting.size) == (0, 2)
