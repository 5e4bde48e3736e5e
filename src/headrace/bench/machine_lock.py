"""A machine-wide lock: while one benchmark measures, the others wait.

Several may prepare at the same time. Two that measure at once would measure each other's load.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace.file_lock import FileLock


class MachineLock:
    """Inside the block this benchmark may prepare; from `begin_measuring` on it is alone.

    `on_wait` is called before waiting for other benchmarks. If the file cannot be locked, the
    benchmark does not wait.
    """

    def __init__(self, on_wait: Callable[[], object], path: Path | None = None) -> None:
        self._on_wait = on_wait
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
            self._on_wait()
            self._try(shared=shared, wait=True)

    def _try(self, *, shared: bool, wait: bool) -> bool:
        """Whether this benchmark has the lock, or can do without: there are no locks here."""
        if self._lock is not None:
            try:
                return self._lock.acquire(shared=shared, wait=wait)
            except OSError:  # a file system without locks
                self._close()
        return True

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _default_path() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"headrace-{user}-measuring.lock"
