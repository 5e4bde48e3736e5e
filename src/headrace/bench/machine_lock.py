"""A machine-wide lock: while one benchmark measures, the others wait.

Several may prepare at the same time. Two that measure at once would measure each other's load.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from headrace.file_lock import FileLock

_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Holder:
    """A benchmark that has the lock; `since_s` is in seconds since 1970."""

    pid: int
    since_s: float
    command: str

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since_s))
        return f"process {self.pid} since {since} ({self.command})"


class MachineLock:
    """Inside the block this benchmark may prepare; from `begin_measuring` on it is alone.

    `on_wait` is called before waiting for other benchmarks, with those that are known; they know
    this one by its `command`. Without `wait` it is called as well, and then this benchmark goes on
    without the lock. If the file cannot be locked, the benchmark does not wait.
    """

    def __init__(
        self,
        on_wait: Callable[[Sequence[Holder]], object],
        path: Path | None = None,
        *,
        command: str = "",
        wait: bool = True,
    ) -> None:
        self._on_wait, self._command, self._wait = on_wait, command, wait
        self._path = path if path is not None else _default_path()
        self._lock: FileLock | None = None

    def __enter__(self) -> MachineLock:
        with suppress(OSError):
            self._lock = FileLock(self._path, mode=0o600)
        try:
            self._acquire(shared=True)
        except BaseException:  # Ctrl-C while waiting
            self._close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def begin_measuring(self) -> None:
        """Wait until no other benchmark is running; none starts before the block ends."""
        if self._lock is not None:
            # Two that held on to their shared locks here would wait for each other forever.
            self._lock.release()
            self._acquire(shared=False)

    def _acquire(self, *, shared: bool) -> None:
        if not self._try(shared=shared, wait=False):
            self._on_wait(self._holders())
            if not self._wait:
                self._close()
                return
            self._try(shared=shared, wait=True)
        self._enter_name(shared=shared)

    def _try(self, *, shared: bool, wait: bool) -> bool:
        """Whether this benchmark has the lock, or can do without: there are no locks here."""
        if self._lock is not None:
            try:
                return self._lock.acquire(shared=shared, wait=wait)
            except OSError:  # a file system without locks
                self._close()
        return True

    def _enter_name(self, *, shared: bool) -> None:
        """Tell those that will wait who has the lock. Who is alone drops the names before."""
        if self._lock is None:
            return
        holder = Holder(os.getpid(), time.time(), self._command or "a Python program")
        flags = os.O_WRONLY | os.O_APPEND | (0 if shared else os.O_TRUNC)
        with suppress(OSError):  # only a message needs it; the disk may be full
            file = os.open(self._path, flags | getattr(os, "O_NOFOLLOW", 0))
            try:
                os.write(file, json.dumps(asdict(holder)).encode() + b"\n")
            finally:
                os.close(file)

    def _holders(self) -> list[Holder]:
        """The others that have the lock. A name may be missing for a moment."""
        lines: list[bytes] = []
        if self._lock is not None:
            with suppress(OSError):
                os.lseek(self._lock.fileno(), 0, os.SEEK_SET)
                lines = os.read(self._lock.fileno(), _MAX_BYTES).splitlines()
        named: dict[int, Holder] = {}
        for line in lines:
            with suppress(ValueError, TypeError):  # half written, or by another version
                holder = Holder(**json.loads(line))
                if holder.pid != os.getpid() and _is_running(holder):
                    named[holder.pid] = holder
        return list(named.values())

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _is_running(holder: Holder) -> bool:
    try:
        return psutil.Process(holder.pid).create_time() <= holder.since_s
    except psutil.Error:
        return False


def _default_path() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"headrace-{user}-measuring.lock"
