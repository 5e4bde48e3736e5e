"""Files and folders that are whole or not there, whenever the process or the machine dies.

Each is written beside its place under a name that begins with a dot, made durable, and renamed.
While it is written it is locked. The lock goes with the process, so what nobody locks has been
left behind and is removed by the next writer: no process number, which another may bear by then.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from headrace.errors import CheckpointError

log = logging.getLogger("headrace")

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What tells a whole file from a torn one."""

    nbytes: int
    sha256: str

    def require_size(self, path: Path, found: int) -> None:
        if found != self.nbytes:
            raise CheckpointError(f"{path} has {found} bytes: expected {self.nbytes}; it is torn")

    def require(self, path: Path, found: FileDigest) -> None:
        self.require_size(path, found.nbytes)
        if found.sha256 != self.sha256:
            raise CheckpointError(
                f"{path} has the checksum {found.sha256[:12]}…: expected {self.sha256[:12]}…; "
                "its bytes have changed"
            )


class DurableFile:
    """A new file, locked while it is written; on the disk when the `with` block is left."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._checksum = hashlib.sha256()
        self._nbytes = 0
        _lock(self._descriptor)

    def write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            written = os.write(self._descriptor, left[:_PIECE_BYTES])
            self._checksum.update(left[:written])
            self._nbytes += written
            left = left[written:]

    def digest(self) -> FileDigest:
        return FileDigest(self._nbytes, self._checksum.hexdigest())

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def unique(path: Path, purpose: str) -> Path:
    """A name beside `path` that nobody has: `.writing-step-00000010-1f0c…`."""
    return path.with_name(f".{purpose}-{path.name}-{secrets.token_hex(8)}")


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A new, locked folder beside `place`; removed at the end, unless it was renamed."""
    folder, descriptor = _claim(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _claim(place: Path) -> tuple[Path, int]:
    while True:
        folder = unique(place, "writing")
        folder.mkdir()
        # Another writer that tidies up may be quicker than the lock, and take it for left behind.
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            _lock(descriptor)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make durable which names the folder has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a folder so that it is never seen in parts."""
    doomed = unique(folder, "writing")
    folder.rename(doomed)
    sync_folder(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_left_behind(folder: Path, pattern: str) -> None:
    """Remove what dead writers left in `folder` under names like `.writing-step-*`."""
    for path in sorted(folder.glob(f".writing-{pattern}-*")):
        with suppress(OSError):  # gone in the meantime, locked, or on a file system without locks
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # some network file systems have no locks; then nothing is removed
        fcntl.flock(descriptor, fcntl.LOCK_EX)
