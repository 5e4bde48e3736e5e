"""Checkpoints as folders: `step-00001234/` is one, and training resumes from the newest good one.

A checkpoint is written under another name and renamed when it is complete. Checksums show whether
it has been damaged since.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace import atomic_files
from headrace.atomic_files import DurableFile
from headrace.checkpoint import states
from headrace.checkpoint.pieces import StoredTensors
from headrace.checkpoint.snapshot import on_host
from headrace.checkpoint.tensor_file import FileDigest, read_tensors, write_tensors
from headrace.device import Device, open_device
from headrace.errors import CheckpointError
from headrace.schema import Fields, Invalid, read_json, require_whole

log = logging.getLogger("headrace")

FORMAT = "headrace-checkpoint"
VERSION = 1
STATE_FILE = "state.json"
TENSOR_FILE = "tensors.safetensors"

_RANK_FILE = re.compile(r"tensors-\d{5,}-of-\d{5,}\.safetensors")
# What decoding may raise if another program wrote the state, with a valid checksum.
_DECODING_ERRORS = (
    *(CheckpointError, LookupError, ValueError, TypeError, AttributeError, RuntimeError),
    *(OverflowError, MemoryError),
)
_NAME = re.compile(r"(?P<replaced>\.replaced-)?step-(?P<step>\d{8,})(?(replaced)-[0-9a-f]+)")


# --- writing ----------------------------------------------------------------------------------


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
        file.write(_state_json(content))
    atomic_files.sync_folder(temporary)
    _rename(temporary, target)
    atomic_files.sync_folder(target.parent)
    _clean_up(target.parent, target, keep)


def require_counts(*, step: int = 0, keep: int = 1) -> None:
    """Raise `CheckpointError` if a step or the number of checkpoints to keep is not valid."""
    require_whole("step", step, 0, CheckpointError)
    require_whole("keep", keep, 1, CheckpointError)


def _state_json(content: Mapping[str, Any]) -> bytes:
    head = {"format": FORMAT, "version": VERSION, "sha256": _checksum(content)}
    return _dumps({**head, "content": content}).encode() + b"\n"


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _checksum(content: object) -> str:
    return hashlib.sha256(_dumps(content).encode()).hexdigest()


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
        names = [found.path.name for found in _checkpoint_folders(folder)]
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
    for found in _checkpoint_folders(folder):
        target = folder / f"step-{found.step:08d}"
        is_missing = found.is_replaced and not target.exists()
        if is_missing and find_problem(found.path, every_byte=True) is None:
            found.path.rename(target)


def _surplus(folder: Path, written: Path, keep: int) -> list[Path]:
    """Good checkpoints that are not among the newest `keep`, or were replaced.

    Bad ones do not count: they stay, for somebody to look at. Of checkpoints older than `written`
    only the size is checked, since reading them takes long.
    """
    kept: list[_CheckpointFolder] = []
    surplus: list[Path] = []
    is_older = False
    for found in _checkpoint_folders(folder):
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


# --- finding ----------------------------------------------------------------------------------


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
        return [found.path for found in _checkpoint_folders(folder)]
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"cannot look for checkpoints: {problem}") from problem


def warn_refused(problem: str) -> None:
    log.warning("checkpoint refused: %s; trying the next older one", problem)


@dataclass(frozen=True, slots=True)
class _CheckpointFolder:
    """A folder with a checkpoint's name. A replaced one has been renamed to `.replaced-…`."""

    step: int
    is_replaced: bool
    changed_ns: int
    path: Path


def _checkpoint_folders(folder: Path) -> list[_CheckpointFolder]:
    """All folders with a checkpoint's name, newest first; replaced ones after their replacement."""
    found = []
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None and path.is_dir():
            is_replaced, changed_ns = bool(name["replaced"]), path.stat().st_mtime_ns
            found.append(_CheckpointFolder(int(name["step"]), is_replaced, changed_ns, path))
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
        for file, digest in _tensor_files(path, _read_content(path))[rank::ranks]:
            if every_byte:
                digest.require(file)
            else:
                digest.require_size(file, file.stat().st_size)
    except CheckpointError as problem:
        return problem
    except OSError as problem:
        return _unreadable(path, problem)
    return None


# --- reading ----------------------------------------------------------------------------------


def load_checkpoint(
    path: str | Path, *, device: Device | torch.device | str | None = None, parts: bool = False
) -> Any:
    """The state in a checkpoint, checked byte by byte. Nothing is unpickled.

    Tensors are on the host, from where `load_state_dict` copies them, or all of them on `device`;
    then the host waits for the copies. With `parts`, weights in a checkpoint of several ranks are
    `StoredTensor`s: each rank reads its part later, and their bytes are not checked.
    """
    path = Path(path)
    try:
        content = _read_content(path)
        files = _tensor_files(path, content)
        tensors: Mapping[str, Any]
        several_ranks = "files" in content
        if not (several_ranks and parts):
            for file, digest in files:
                digest.require(file)
        if several_ranks:
            stored = StoredTensors([file for file, _ in files], content, parts=parts)
            tensors = stored if parts else dict(stored)
        else:
            tensors = read_tensors(files[0][0])
    except OSError as problem:
        raise _unreadable(path, problem) from problem
    except CheckpointError:
        raise
    except _DECODING_ERRORS as problem:
        raise CheckpointError(
            f"{path / STATE_FILE} does not describe its tensors ({problem!r})"
        ) from problem
    if device is not None:
        tensors = _moved(tensors, open_device(device))
    try:
        return states.decode(content["state"], tensors, content.get("own", ()))
    except OSError as problem:
        raise _unreadable(path, problem) from problem
    except _DECODING_ERRORS as problem:
        raise CheckpointError(
            f"{path / STATE_FILE} holds no state that can be read: {problem!r}"
        ) from problem


def _moved(tensors: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
    if not device.asynchronous:
        return tensors
    # Pinned memory would not pay: each tensor is copied once.
    with device.ledger.waiting("checkpoint_load"):
        return {name: tensor.to(device.torch_device) for name, tensor in tensors.items()}


def _read_content(path: Path) -> dict[str, Any]:
    """The `content` of state.json."""
    file = path / STATE_FILE
    document = read_json(file, CheckpointError, max_bytes=None)
    if document.values.get("format") != FORMAT:
        raise document.problem("format", repr(FORMAT))
    version = document.values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise document.problem("version", f"{VERSION}, which this Headrace reads")
    content = dict(document.section("content").values)
    if _checksum_or_none(content) != document.values.get("sha256"):
        raise CheckpointError(f"{file} does not match its own checksum: the file was changed")
    return content


def _checksum_or_none(content: object) -> str | None:
    try:
        return _checksum(content)
    except (ValueError, RecursionError):  # NaN, which no checkpoint contains, or nested too deeply
        return None


def _tensor_files(path: Path, content: dict[str, Any]) -> list[tuple[Path, FileDigest]]:
    """The tensor files with their sizes and checksums: one, or one for each rank that wrote."""
    fields = Fields(content, str(path / STATE_FILE), CheckpointError, "content")
    described = fields.children("files") or [fields.section("tensors")]
    files = [one.record(_TensorFile) for one in described]
    return [(path / file.name, FileDigest(file.bytes, file.sha256)) for file in files]


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """A tensor file as state.json describes it."""

    bytes: int
    sha256: str
    name: str = TENSOR_FILE

    def invalid(self) -> Invalid | None:
        if self.name == TENSOR_FILE or _RANK_FILE.fullmatch(self.name):
            return None
        return Invalid("name", self.name, "tensors-00000-of-00008.safetensors or its like")


def _unreadable(path: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} cannot be read: {problem}")
