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
def waits(holders):
    print("waits", *holders, flush=True)
with MachineLock(waits, Path(sys.argv[1]), command=sys.argv[2], wait="--wait" in sys.argv) as lock:
    print("ready", flush=True)
    sys.stdin.readline()
    lock.begin_measuring()
    print("measures", flush=True)
    sys.stdin.readline()
"""


def other(path: Path, command: str = "", wait: str = "--wait") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path), command, wait],
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
        assert says(first).startswith("waits process")  # for the second to be ready
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
    measuring = other(path, "headrace bench --work resnet")
    try:
        assert says(measuring) == "ready"
        tell(measuring)
        assert says(measuring) == "measures"
        late = other(path)
        waits = says(late)
        assert waits.startswith(f"waits process {measuring.pid} since ")
        assert waits.endswith("(headrace bench --work resnet)")
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
        with MachineLock(lambda holders: waited.append("waits"), path) as lock:
            lock.begin_measuring()
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")  # somebody else's file
    with MachineLock(lambda holders: waited.append("waits"), tmp_path / "link") as lock:
        lock.begin_measuring()
    assert not waited


def test_without_waiting_both_measure_and_the_other_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    measuring, hurried, late = other(path, "first"), other(path, "second", "--no-wait"), None
    try:
        assert (says(measuring), says(hurried)) == ("ready", "ready")
        tell(hurried)
        assert says(hurried).startswith(f"waits process {measuring.pid} since ")
        assert says(hurried) == "measures"
        tell(measuring)
        assert says(measuring) == "measures"  # the hurried one holds nothing
        late = other(path)
        told = says(late)
        assert "(first)" in told
        assert "(second)" not in told
    finally:
        for process in filter(None, (measuring, hurried, late)):
            process.kill()
            process.communicate()


def test_those_that_have_ended_are_not_named(tmp_path: Path) -> None:
    """Their names stay in the file until somebody measures alone."""
    path = tmp_path / "lock"
    holding, killed, hurried = other(path, "holds"), other(path, "was killed"), None
    try:
        assert (says(holding), says(killed)) == ("ready", "ready")
        killed.kill()
        killed.wait()
        path.write_bytes(path.read_bytes() + b'{"pid": 1\n{"version": 2}\n')
        hurried = other(path, wait="--no-wait")
        assert says(hurried) == "ready"
        tell(hurried)
        told = says(hurried)
        assert f"process {holding.pid} " in told
        assert "was killed" not in told
        assert told.count("process") == 1
    finally:
        for process in filter(None, (holding, killed, hurried)):
            process.kill()
            process.communicate()
