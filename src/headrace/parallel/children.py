"""Processes that this one has started."""

from __future__ import annotations

import psutil


def kill_children() -> None:
    """Kill this process's children, so that none outlive it when it exits at once."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=5)
