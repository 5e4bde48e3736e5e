"""Benchmarks take turns: over real processes, since that is what the locks are between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.bench.machine_lock import MachineLock

# Another benchmark: gets ready, says so, and measures when it is told to and may.
OTHER = """
import sys
from pathlib import Path
from headrace.bench.machine_lock import MachineLock
with MachineLock(lambda: print("waits", flush=True), Path(sys.argv[1])) as lock:
    print("ready", flush=True)
    sys.stdin.readline()
    lock.begin_measuring()
    print("measures", flush=True)
    sys.stdin.readline()
"""


def other(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_make_ready_at_a_time_and_measure_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = other(path), other(path)
    try:
        assert (says(first), says(second)) == ("ready", "ready")
        tell(first)
        assert says(first) == "waits"  # for the second to be ready
        tell(second)
        # Either may be let in first; the other is only when that one has ended.
        order = (second, first) if says(second) == "measures" else (first, second)
        if order[0] is first:
            assert says(first) == "measures"
        tell(order[0])
        assert order[0].wait() == 0
        assert says(order[1]) == "measures"
        tell(order[1])
        assert order[1].wait() == 0
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_nobody_begins_while_one_measures_and_a_killed_one_is_not_waited_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    measuring = other(path)
    try:
        assert says(measuring) == "ready"
        tell(measuring)
        assert says(measuring) == "measures"
        late = other(path)
        assert says(late) == "waits"
        measuring.kill()
        assert says(late) == "ready"
        tell(late)
        assert says(late) == "measures"
        tell(late)
        assert late.wait() == 0
    finally:
        for process in (measuring, late):
            process.kill()
            process.communicate()


def test_where_nothing_can_be_locked_nobody_is_waited_for(tmp_path: Path) -> None:
    waited: list[str] = []
    for path in (tmp_path / "missing" / "lock", tmp_path):
        with MachineLock(lambda: waited.append("waits"), path) as lock:
            lock.begin_measuring()
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")  # somebody else's file
    with MachineLock(lambda: waited.append("waits"), tmp_path / "link") as lock:
        lock.begin_measuring()
    assert not waited
