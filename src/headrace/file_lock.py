"""Locks between processes, on a file or a folder."""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import suppress
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None


class FileLock:
    """A lock on a file, which is created if needed, or on an existing folder.

        with FileLock(path) as lock:
            if not lock.acquire(wait=False):
                ...                         # another process, or another FileLock, holds it

    The system releases the lock when the process ends, however it ends: a lock tells what is in
    use from what a dead process left behind. A process number could not; the system may have
    given it to another process. A locked file must not be removed by anyone but its holder, else
    two processes could lock two files of the same name.
    """

    def __init__(self, path: Path, *, create: bool = True, mode: int = 0o666) -> None:
        """Open `path`, and do not lock it yet. With `create` false it must exist."""
        self._descriptor: int | None = None
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | (os.O_CREAT if create else 0)
        # A link could lead to somebody else's file.
        self._descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)
        _open_locks.add(self)

    def acquire(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Lock the file. False if it is locked already and `wait` is false.

        Any number of `shared` locks may be held at once. Raises `OSError` where the file system
        has no locks.
        """
        if fcntl is None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fileno(), kind if wait else kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # NFS has the latter
            return False
        return True

    def release(self) -> None:
        """Unlock the file, which stays open."""
        if fcntl is not None and self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unlock and close the file. Does nothing if it is closed already."""
        if self._descriptor is None:
            return
        # Closing is not enough: a worker forked a moment ago may still have the file open.
        with suppress(OSError):  # there are no locks here, so there is nothing to release
            self.release()
        self._close()

    def fileno(self) -> int:
        if self._descriptor is None:
            raise ValueError("a FileLock was used after its close")
        return self._descriptor

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked loader worker shares the locks, and would hold them after its parent has died."""
    for lock in list(_open_locks):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
