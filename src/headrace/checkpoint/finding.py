"""Finds checkpoints in a folder, and says what is wrong with one."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.content import read_content, tensor_files, unreadable
from headrace.errors import CheckpointError

log = logging.getLogger("headrace")


_NAME = re.compile(r"(?P<replaced>\.replaced-)?step-(?P<step>\d{8,})(?(replaced)-[0-9a-f]+)")


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest good checkpoint in `folder`, checked byte by byte; None if there is none.

    Logs a warning for each one that is incomplete, damaged, of another program or of an unknown
    version, and goes on to the next older one.
    """
    for path in candidates(Path(folder)):
        problem = find_problem(path, every_byte=True)
        if problem is None:
            return path
        warn_refused(str(problem))
    return None


def candidates(folder: Path) -> list[Path]:
    """All folders with a checkpoint's name, newest first, good or bad."""
    try:
        return [found.path for found in checkpoint_folders(folder)]
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"cannot look for checkpoints: {problem}") from problem


def warn_refused(problem: str) -> None:
    log.warning("checkpoint refused: %s; trying the next older one", problem)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with a checkpoint's name. A replaced one has been renamed to `.replaced-…`."""

    step: int
    is_replaced: bool
    changed_ns: int
    path: Path


def checkpoint_folders(folder: Path) -> list[CheckpointFolder]:
    """All folders with a checkpoint's name, newest first; replaced ones after their replacement."""
    found = []
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None and path.is_dir():
            is_replaced, changed_ns = bool(name["replaced"]), path.stat().st_mtime_ns
            found.append(CheckpointFolder(int(name["step"]), is_replaced, changed_ns, path))
    return sorted(found, key=lambda one: (-one.step, one.is_replaced, -one.changed_ns))


def find_problem(
    path: Path, *, every_byte: bool, share: tuple[int, int] = (0, 1)
) -> CheckpointError | None:
    """What is wrong with a checkpoint; None if it is good.

    Without `every_byte` only the sizes of its tensor files are checked. With `share = (rank,
    ranks)`, only every `ranks`-th file is: other ranks check the others.
    """
    rank, ranks = share
    try:
        for file, digest in tensor_files(path, read_content(path))[rank::ranks]:
            if every_byte:
                digest.require(file)
            else:
                digest.require_size(file, file.stat().st_size)
    except CheckpointError as problem:
        return problem
    except OSError as problem:
        return unreadable(path, problem)
    return None
