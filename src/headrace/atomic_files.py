"""Files and folders that are complete or not there, whenever the process or the machine dies.

Everything is written into a temporary folder beside its final place, `.writing-NAME-…`, synced to
the disk and renamed. The writer locks the temporary folder, and the lock ends with its process: so
the next writer can tell what a dead one left behind, and removes it.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from headrace.errors import HeadraceError
from headrace.file_lock import FileLock

_WRITE_BYTES = 16 << 20  # a signal is handled between two writes
_MAX_NAME_BYTES = 180  # of a file's name in a temporary one; file systems take 255 in all


class DurableFile:
    """A new file whose content is on the disk when the `with` block ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._descriptor, rest[:_WRITE_BYTES]) :]

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


@contextmanager
def atomic_file(path: Path) -> Iterator[DurableFile]:
    """A new file that replaces `path` when the block ends. After an error `path` is unchanged. A
    link stays a link: the file behind it is replaced."""
    path = path.resolve()
    with temporary_folder(path) as folder:
        temporary = folder / path.name
        with DurableFile(temporary) as file:
            yield file
        temporary.replace(path)
        sync_folder(path.parent)
    remove_abandoned(path.parent, glob.escape(_shortened(path.name)))


def replace_file(path: Path, content: bytes, error: type[HeadraceError]) -> None:
    """Write `content` to `path`: a reader sees the old file or the new one, never a part. A pipe, a
    device, or the file behind stdout or stderr (/dev/stdout) is not replaced, but written to.

    Raises `error` if the system cannot write it.
    """
    try:
        if is_special(path):
            _write_to(path, content)
            return
        with atomic_file(path) as file:
            file.write(content)
    except OSError as problem:
        raise error(f"{path}: cannot be written ({problem.strerror or problem})") from problem


def is_special(path: Path) -> bool:
    """Whether it is a pipe, a device, or the file behind this process's stdout or stderr."""
    if _output_stream(path) is not None:
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_to(path: Path, content: bytes) -> None:
    descriptor = _output_stream(path)
    if descriptor is None:
        path.write_bytes(content)
        return
    # After what was printed so far. To open the file again would be to write over that.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(content)


def _output_stream(path: Path) -> int | None:
    """The descriptor of stdout or stderr if `path` is the file behind it."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def build_folder(
    path: Path, build: Callable[[Path], None], *, usable: Callable[[Path], bool]
) -> None:
    """Let `build` fill a temporary folder, and rename it to `path`.

    If two processes build it at once, the first one's folder stays. A folder at `path` that is not
    `usable` is replaced. Nothing is synced: `usable` has to notice files that a crash of the
    machine cut short.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, "*")
    with temporary_folder(path) as temporary:
        build(temporary)
        if path.exists() and not usable(path):
            with suppress(FileNotFoundError):  # another process was faster
                remove_folder(path)
        try:
            temporary.rename(path)
        except OSError:
            if not usable(path):  # else another process was faster
                raise


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new, locked folder beside `path`; removed when the block ends, unless it was renamed."""
    with ExitStack() as stack:
        folder = _create_locked(path, stack)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _create_locked(path: Path, stack: ExitStack) -> Path:
    while True:
        folder = unique_path(path, "writing")
        folder.mkdir()
        # Where there are no locks, nothing is ever taken for abandoned.
        with suppress(OSError):
            stack.enter_context(FileLock(folder, create=False)).acquire()
        # Before it was locked, another writer may have taken it for abandoned.
        if folder.exists():
            return folder


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove what dead writers left in `folder` under names that match `.writing-PATTERN-*`."""
    for path in sorted(folder.glob(f".writing-{pattern}-*")):
        # It may be gone by now, not ours to remove, or on a file system without locks.
        with suppress(OSError), FileLock(path, create=False) as lock:
            if not lock.acquire(wait=False):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no reader sees a part of it."""
    doomed = unique_path(folder, "writing")
    folder.rename(doomed)
    sync_folder(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make new, renamed and removed names in `folder` durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # one may write to this folder, but not read it
        return
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems cannot sync a folder, only files.
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def unique_path(path: Path, purpose: str) -> Path:
    """A new path beside `path`: `.writing-step-00000010-1f0c…` for the purpose "writing"."""
    return path.with_name(f".{purpose}-{_shortened(path.name)}-{secrets.token_hex(8)}")


def _shortened(name: str) -> str:
    return os.fsencode(name)[:_MAX_NAME_BYTES].decode(errors="ignore")


def user_cache() -> Path:
    """The folder for files that can be made again: `$XDG_CACHE_HOME/headrace`, or
    `~/.cache/headrace`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
