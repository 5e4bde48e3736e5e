"""What processes do to run folders at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.lifecycle import RunFolder


def create_many(project: Path, barrier: Any, made: Any) -> None:
    """Create twenty runs as soon as all processes have started, and put their names into `made`."""
    barrier.wait()
    made.put([RunFolder.create(project).name for _ in range(20)])
