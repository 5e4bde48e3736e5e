"""How long a rank waits for the others, and where its host is."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from headrace.diagnosis.python_lines import Sample
from headrace.diagnosis.rank_waits import CollectiveWaits, has_ranks, host_lines, this_rank
from headrace.records import LineRecord
from support.processes.process_groups import fake_process_group

SLEEPS = LineRecord("train.py", 12, "step", "time.sleep(0.02)")
BACKWARD = LineRecord("train.py", 14, "step", "loss.backward()")
MS = 1_000_000


def test_the_process_group_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_rank() == (0, 1)
    assert not has_ranks()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert this_rank() == (3, 4)
    assert has_ranks()
    with fake_process_group(2):
        assert this_rank() == (0, 2)


def test_time_without_work_in_backward_and_collectives_is_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, cpu = [0], [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: wall[0])
    monkeypatch.setattr(time, "thread_time_ns", lambda: cpu[0])

    def passes(wall_ms: int, cpu_ms: int) -> None:
        wall[0] += wall_ms * MS
        cpu[0] += cpu_ms * MS

    def barrier() -> None:
        passes(7, 1)

    monkeypatch.setattr(dist, "barrier", barrier)
    waits = CollectiveWaits()
    with waits.watching():
        waits.edge("backward")
        passes(20, 15)
        dist.barrier()  # a hook of the script's: a part of backward
        waits.edge("after backward")
        waits.edge("optimizer")
        passes(9, 0)
        dist.barrier()
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        thread.join()
    assert dist.barrier is barrier
    assert waits.ns == (27 - 16 + 6) * MS


def test_lines_by_the_time_between_samples() -> None:
    samples = [Sample(at * MS, line) for at, line in ((0, SLEEPS), (3, SLEEPS), (5, BACKWARD))]
    samples.append(Sample(6 * MS, LineRecord("lib.py", 1), called_from=SLEEPS))
    found = host_lines(samples, steps=2)
    assert [(one.line.line, one.ms) for one in found] == [(12, 2.0), (14, 1.0)]
