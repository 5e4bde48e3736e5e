"""Ranks that end beside this one: killed, failed, or finished."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from headrace.parallel.rank_watch import RankWatch

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds here")


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that wait for their input to end, and then exit with what it says."""
    found = [subprocess.Popen(["sh", "-c", "read code; exit $code"], stdin=-1) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[bytes], code: int) -> None:
    assert process.stdin is not None
    process.stdin.write(b"%d\n" % code)
    process.stdin.flush()


def watched(rank: int, others: dict[int, subprocess.Popen[bytes]], shown: list[str]) -> RankWatch:
    processes = {rank: os.getpid(), **{number: other.pid for number, other in others.items()}}
    return RankWatch(rank, processes, shown.append)


def test_a_killed_rank_is_named_with_its_signal(ranks: list[subprocess.Popen[bytes]]) -> None:
    for number, hint in ((signal.SIGKILL, " (as the kernel does when"), (signal.SIGSEGV, "")):
        process, shown = ranks.pop(), list[str]()
        with watched(0, {3: process}, shown) as watch:
            process.send_signal(number)
            sentence = watch.killed(60)
        process.communicate()
        assert sentence.startswith(
            f"rank 3 (process {process.pid}) was killed by {number.name}{hint}"
        )
        assert shown == [sentence]


def test_only_the_lowest_rank_left_says_so(ranks: list[subprocess.Popen[bytes]]) -> None:
    shown: list[str] = []
    with watched(2, {0: ranks[0], 1: ranks[1]}, shown) as watch:
        ranks[1].kill()
        assert "rank 1 (process" in watch.killed(60)
    assert shown == []
    with watched(2, {1: ranks[0]}, shown) as watch:
        ranks[0].kill()
        watch.killed(60)
    assert [text[:6] for text in shown] == ["rank 1"]


def test_a_rank_that_failed_says_why_itself(ranks: list[subprocess.Popen[bytes]]) -> None:
    """What is killed after it, torchrun killed."""
    shown: list[str] = []
    with watched(0, {1: ranks[0], 2: ranks[1]}, shown) as watch:
        end(ranks[0], 1)
        assert watch.killed(60) == ""
        assert watch.ended == [1]
        ranks[1].kill()
    assert shown == []


def test_a_rank_that_finished_is_no_failure(ranks: list[subprocess.Popen[bytes]]) -> None:
    shown: list[str] = []
    with watched(1, {0: ranks[0], 2: ranks[1]}, shown) as watch:
        end(ranks[0], 0)
        ranks[0].communicate()
        ranks[1].kill()
        assert watch.killed(60).startswith("rank 2 ")
        assert watch.ended == [0, 2]
    assert len(shown) == 1  # rank 0 has ended, so this is the lowest one left


def test_without_pidfds_nothing_is_watched(
    ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    shown: list[str] = []
    with watched(0, {1: ranks[0]}, shown) as watch:
        ranks[0].kill()
        assert (watch.killed(60), watch.ended, shown) == ("", [], [])


def test_a_status_that_torchrun_took_first_is_unknown(
    ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankWatch, "_exit_status", lambda self, rank: None)
    shown: list[str] = []
    with watched(0, {1: ranks[0], 2: ranks[1]}, shown) as watch:
        ranks[0].kill()
        ranks[1].kill()
        while watch.ended != [1, 2]:
            watch.killed(0.01)
        assert watch.killed(0) == ""
    assert shown == []
