"""Folders that are there whole or not at all.

A folder is built beside its place and renamed into it. Who builds holds a lock that the system lets
go of when the process ends, however it ends: so what a dead build left behind can be told from
what a living one is at work on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def build_folder(
    final: Path, build: Callable[[Path], None], *, usable: Callable[[Path], bool]
) -> None:
    """Let `build` fill a folder, and put it at `final`.

    Two builds at once do no harm: the first one there stays. A folder at `final` that is not
    `usable` is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead(final.parent)
    with _own_name(final) as (temporary, old):
        temporary.mkdir()
        build(temporary)
        if final.exists() and not usable(final):
            final.rename(old)
        try:
            temporary.rename(final)
        except OSError:
            if not usable(final):  # and not just another build that was quicker
                raise


def _siblings(lock: Path) -> tuple[Path, Path]:
    return lock.with_suffix(".building"), lock.with_suffix(".old")


@contextlib.contextmanager
def _own_name(final: Path) -> Iterator[tuple[Path, Path]]:
    """Two names nobody else uses, locked while they are in use, and gone afterwards."""
    while True:
        lock = final.with_name(f".{final.name}-{uuid.uuid4().hex[:12]}.lock")
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
        _lock(descriptor)
        # Somebody cleaning up may have taken it for dead before it was locked: then another name.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                break
        os.close(descriptor)
    try:
        yield _siblings(lock)
    finally:
        _remove(lock)
        os.close(descriptor)


def _remove_dead(folder: Path) -> None:
    for lock in folder.glob(".*.lock"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                if _lock(descriptor, wait=False):
                    _remove(lock)
            finally:
                os.close(descriptor)


def _remove(lock: Path) -> None:
    """The folders first: while the lock's file is there, somebody knows of them."""
    for sibling in _siblings(lock):
        shutil.rmtree(sibling, ignore_errors=True)
    with contextlib.suppress(OSError):
        lock.unlink()


def _lock(descriptor: int, *, wait: bool = True) -> bool:
    """Whether it was to be had. Where there are no such locks nothing counts as dead."""
    if sys.platform == "win32":
        return wait
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
