"""A lock for the machine: benchmarks take turns on it. Several may make themselves
ready at a time, but while one measures no other does anything. Two at once would each show the
other's load, not the plans'."""

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
except ImportError:  # no such locks here: two at once are not noticed
    fcntl = None


class MachineLock:
    """In the block this benchmark makes itself ready; from `begin_measuring` on it is alone.

    A lock on a file, which goes with the process: one in each. `on_wait` is called before waiting
    for others. Where no file can be locked, nobody is waited for.
    """

    def __init__(self, on_wait: Callable[[], object], path: Path | None = None) -> None:
        self._on_wait = on_wait
        self._path = path if path is not None else _usual_path()
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
        """Wait until no other benchmark is at work; none begins before the block's end."""
        if fcntl is not None and self._file is not None:
            # Not in one step: of two that ask for more, each would wait for the other.
            fcntl.lockf(self._file, fcntl.LOCK_UN)
            self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> None:
        assert fcntl is not None
        assert self._file is not None
        if self._try(kind | fcntl.LOCK_NB) == "held":
            self._on_wait()
            self._try(kind)

    def _try(self, kind: int) -> Literal["mine", "held", "none"]:
        """Take the lock, or see that another process has it, or that there are no locks here."""
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


def _usual_path() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"headrace-{user}-measuring.lock"
