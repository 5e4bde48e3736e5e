"""File locks: between processes, shared or not, and ended by the process's death."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.file_lock import FileLock

pytest.importorskip("fcntl")

# Locks the path, says so, and keeps the lock until it is killed.
HOLD = """
import sys
from pathlib import Path
from headrace.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
print(lock.acquire(shared=sys.argv[2] == "shared", wait=False), flush=True)
sys.stdin.read()
"""


def hold(path: Path, kind: str = "exclusive") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_lasts_until_its_process_dies(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    with hold(path) as other, FileLock(path) as lock:
        assert not lock.acquire(wait=False)
        other.kill()
        other.wait()
        assert lock.acquire(wait=False)


def test_shared_locks(tmp_path: Path) -> None:
    path = tmp_path / "it"
    with hold(path, "shared") as other, FileLock(path) as mine, FileLock(path) as third:
        assert mine.acquire(shared=True, wait=False)
        assert not third.acquire(wait=False)
        other.kill()
        other.wait()
        assert not third.acquire(wait=False)
        mine.release()
        assert third.acquire(wait=False)


def test_closing_releases(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "it")
    assert first.acquire()
    first.close()
    first.close()
    with pytest.raises(ValueError, match="after its close"):
        first.acquire()
    with FileLock(tmp_path / "it") as second:
        assert second.acquire(wait=False)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "missing", create=False)
    assert not (tmp_path / "missing").exists()
    (tmp_path / "link").symlink_to(tmp_path / "target")  # it could be somebody else's file
    with pytest.raises(OSError, match="symbolic link"):
        FileLock(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def _wait(pipe: Any) -> None:
    pipe.send("up")
    pipe.recv()


def test_a_forked_process_does_not_hold_its_parents_locks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    lock = FileLock(tmp_path / "it")
    assert lock.acquire()
    worker = context.Process(target=_wait, args=(theirs,), daemon=True)
    worker.start()
    assert ours.recv() == "up"
    lock._close()  # as when the process dies: nothing is unlocked on purpose
    with FileLock(tmp_path / "it") as other:
        assert other.acquire(wait=False)
        assert worker.is_alive()
    ours.send("go")
    worker.join()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with FileLock(tmp_path / "it") as lock, pytest.raises(OSError, match="not supported"):
        lock.acquire()
