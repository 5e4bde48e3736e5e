"""A machine-wide lock: while one benchmark measures, the others wait.

Several may prepare at the same time. Two that measure at once would measure each other's load.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Literal

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # this platform has no such locks: benchmarks do not wait for each other
    fcntl = None


class MachineLock:
    """A context manager: inside the block a benchmark prepares, and from `begin_measuring` on no
    other one runs.

    The lock is on a file and ends with the process; a process can hold one. `on_wait` is called
    before waiting for others. If the file cannot be locked, benchmarks do not wait.
    """

    def __init__(self, on_wait: Callable[[], object], path: Path | None = None) -> None:
        self._on_wait = on_wait
        self._path = path if path is not None else _default_path()
        self._file: int | None = None

    def __enter__(self) -> MachineLock:
        if fcntl is not None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError:
                return self
            try:
                self._lock(fcntl.LOCK_SH)
            except BaseException:  # Ctrl-C while waiting
                self._close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def begin_measuring(self) -> None:
        """Wait until no other benchmark runs. None starts before the end of the block."""
        if fcntl is not None and self._file is not None:
            # Unlock first: two benchmarks that both upgrade their lock would wait for each other.
            fcntl.lockf(self._file, fcntl.LOCK_UN)
            self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> None:
        assert fcntl is not None
        assert self._file is not None
        if self._try(kind | fcntl.LOCK_NB) == "held":
            self._on_wait()
            self._try(kind)

    def _try(self, kind: int) -> Literal["mine", "held", "none"]:
        """Take the lock. "held": another process has it; "none": files cannot be locked here."""
        assert fcntl is not None
        assert self._file is not None
        try:
            fcntl.lockf(self._file, kind)
        except (BlockingIOError, PermissionError):
            return "held"
        except OSError:
            self._close()
            return "none"
        return "mine"

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _default_path() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"headrace-{user}-measuring.lock"
