"""Checkpoints as folders: `step-00001234/` is one, and training resumes from the newest good one.

A checkpoint is written under another name and renamed when it is complete. Checksums show whether
it has been damaged since.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace import atomic_files
from headrace.atomic_files import DurableFile
from headrace.checkpoint import states
from headrace.checkpoint.content import STATE_FILE, TENSOR_FILE, state_json
from headrace.checkpoint.finding import CheckpointFolder, checkpoint_folders, find_problem
from headrace.checkpoint.snapshot import on_host
from headrace.checkpoint.tensor_file import write_tensors
from headrace.device import Device
from headrace.errors import CheckpointError
from headrace.schema import require_whole

log = logging.getLogger("headrace")


def save_checkpoint(
    folder: str | Path, state: object, *, step: int, keep: int = 2, device: Device | None = None
) -> Path:
    """Write `state` to a new checkpoint in `folder`; keep the newest `keep`, remove older ones.

    The state consists of dicts, lists, tuples, plain values and tensors. The host waits for tensors
    on a device, in the ledger of `device` if given; `CheckpointWriter` does not wait. A checkpoint
    of the same step is replaced. After an error the older checkpoints are unchanged.
    """
    require_counts(step=step, keep=keep)
    document, tensors = states.encode(state)
    with on_host(tensors, device) as arrived:
        return write_checkpoint(Path(folder), document, arrived, step=step, keep=keep)


def write_checkpoint(
    folder: Path, document: Any, tensors: Mapping[str, torch.Tensor], *, step: int, keep: int
) -> Path:
    """Write an encoded state whose tensors are on the host."""
    target = folder / f"step-{step:08d}"
    try:
        with atomic_files.temporary_folder(target) as temporary:
            with DurableFile(temporary / TENSOR_FILE) as file:
                digest = write_tensors(file, tensors)
            content = {
                "step": step,
                "tensors": {"bytes": digest.nbytes, "sha256": digest.sha256},
                "state": document,
            }
            commit(temporary, target, content, keep=keep)
    except OSError as problem:
        raise not_written(step, folder, problem.strerror or str(problem)) from problem
    return target


def commit(temporary: Path, target: Path, content: Mapping[str, Any], *, keep: int) -> None:
    """Write `state.json` to the temporary folder, which has the tensors, and rename it to `target`.
    Then remove checkpoints beyond the newest `keep`."""
    with DurableFile(temporary / STATE_FILE) as file:
        file.write(state_json(content))
    atomic_files.sync_folder(temporary)
    _rename(temporary, target)
    atomic_files.sync_folder(target.parent)
    _clean_up(target.parent, target, keep)


def require_counts(*, step: int = 0, keep: int = 1) -> None:
    """Raise `CheckpointError` if a step or the number of checkpoints to keep is not valid."""
    require_whole("step", step, 0, CheckpointError)
    require_whole("keep", keep, 1, CheckpointError)


def _rename(temporary: Path, target: Path) -> None:
    """Rename a folder; one that has the name already is renamed first. Between the two renames that
    one still counts as a checkpoint, under its `.replaced-` name."""
    replaced = atomic_files.unique_path(target, "replaced")
    if target.exists():
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise


def not_written(step: int, folder: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that was not written; it lists those that are still there."""
    try:
        names = [found.path.name for found in checkpoint_folders(folder)]
    except OSError:
        older = "that folder cannot be read"
    else:
        older = f"still there: {', '.join(names)}" if names else "no older one is there"
    return CheckpointError(
        f"the checkpoint of step {step} was not written to {folder}: {why}; {older}"
    )


def _clean_up(folder: Path, written: Path, keep: int) -> None:
    """Remove what is no longer needed. An error is only a warning: the checkpoint is written."""
    try:
        atomic_files.remove_abandoned(folder, "*step-*")
        _restore_replaced(folder)
        for path in _surplus(folder, written, keep):
            atomic_files.remove_folder(path)
    except OSError as problem:
        log.warning("older checkpoints in %s were not removed: %s", folder, problem)


def _restore_replaced(folder: Path) -> None:
    """Undo the first rename of a replacement that crashed before the second one."""
    for found in checkpoint_folders(folder):
        target = folder / f"step-{found.step:08d}"
        is_missing = found.is_replaced and not target.exists()
        if is_missing and find_problem(found.path, every_byte=True) is None:
            found.path.rename(target)


def _surplus(folder: Path, written: Path, keep: int) -> list[Path]:
    """Good checkpoints that are not among the newest `keep`, or were replaced.

    Bad ones do not count: they stay, for somebody to look at. Of checkpoints older than `written`
    only the size is checked, since reading them takes long.
    """
    kept: list[CheckpointFolder] = []
    surplus: list[Path] = []
    is_older = False
    for found in checkpoint_folders(folder):
        if found.path == written:
            kept.append(found)
            is_older = True
            continue
        if find_problem(found.path, every_byte=not is_older) is not None:
            continue
        was_replaced = any(found.step == other.step for other in kept)
        if was_replaced or len(kept) >= keep:
            surplus.append(found.path)
        else:
            kept.append(found)
    return surplus
