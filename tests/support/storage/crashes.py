"""Processes that die in the middle of a write. Run it in a process of its own: it forks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISK_CALLS = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def crash_at_each_call(
    prepare: Callable[[int], Path],
    work: Callable[[Path], object],
    calls: tuple[str, ...] = DISK_CALLS,
) -> None:
    """For n = 1, 2, …, do `work(prepare(n))` in a child process that dies in its n-th call that
    changes the disk, until one lives to the end. The n-th write is done in half."""
    n, status = 0, None
    while status != 0:
        n += 1
        folder = prepare(n)
        child = os.fork()
        if child == 0:
            _die_at(n, calls)
            work(folder)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), status


def _die_at(n: int, calls: tuple[str, ...]) -> None:
    count = 0

    def patch(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == n:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os._exit(9)
            return original(*args, **kwargs)

        setattr(os, name, call)

    for name in calls:
        patch(name)
