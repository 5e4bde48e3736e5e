"""One checkpoint is one folder, `step-00001234/`, and a folder of those is what training resumes
from. Each is written beside and renamed, so what bears such a name was whole once; that it still
is, checksums tell."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
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
from headrace.schema import require_whole

log = logging.getLogger("headrace")

FORMAT = "headrace-checkpoint"
VERSION = 1
STATE_FILE = "state.json"
TENSOR_FILE = "tensors.safetensors"
# From the content of each older version to that of the next: {1: _from_1_to_2}, say.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_RANK_FILE = re.compile(r"tensors-\d{5,}-of-\d{5,}\.safetensors")
# What a state may raise that no Headrace wrote, though its checksum is right.
_UNREADABLE = (
    *(CheckpointError, LookupError, ValueError, TypeError, AttributeError, RuntimeError),
    *(OverflowError, MemoryError),
)
_NAME = re.compile(r"(?P<replaced>\.replaced-)?step-(?P<step>\d{8,})(?(replaced)-[0-9a-f]+)")


# --- writing ----------------------------------------------------------------------------------


def save_checkpoint(
    folder: str | Path, state: object, *, step: int, keep: int = 2, device: Device | None = None
) -> Path:
    """Write `state` into a new checkpoint in `folder`, and remove the oldest beyond `keep`.

    The state is a nest of dicts, lists, tuples, plain values and tensors. Waits for tensors that
    lie on a device, in `device`'s ledger if it is given; `CheckpointWriter` does not. A good
    checkpoint of the same step is replaced. After an error the older ones are as they were.
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
        raise CheckpointError(
            f"the checkpoint of step {step} was not written to {folder}: "
            f"{problem.strerror or problem}; {still_there(folder)}"
        ) from problem
    return target


def commit(temporary: Path, target: Path, content: Mapping[str, Any], *, keep: int) -> None:
    """Write `state.json` beside the tensors in a folder of a writer's own, give it its name, and
    remove the oldest beyond `keep`."""
    with DurableFile(temporary / STATE_FILE) as file:
        file.write(_state_json(content))
    atomic_files.sync_folder(temporary)
    _put_in_place(temporary, target)
    atomic_files.sync_folder(target.parent)
    _tidy(target.parent, target, keep)


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


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename, where a folder of that name may be already. Between the two renames the one that is
    replaced still counts, under its other name."""
    replaced = atomic_files.unique_path(target, "replaced")
    if target.exists():
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise


def still_there(folder: Path) -> str:
    try:
        names = [found.path.name for found in _found(folder)]
    except OSError:
        return "that folder cannot be read"
    return f"still there: {', '.join(names)}" if names else "no older one is there"


def _tidy(folder: Path, written: Path, keep: int) -> None:
    """Remove what is not needed any more. The checkpoint is written: nothing here is fatal."""
    try:
        atomic_files.remove_abandoned(folder, "*step-*")
        _restore_replaced(folder)
        for path in _surplus(folder, written, keep):
            atomic_files.remove_folder(path)
    except OSError as problem:
        log.warning("older checkpoints in %s were not removed: %s", folder, problem)


def _restore_replaced(folder: Path) -> None:
    """After a crash between two renames: what was to be replaced gets its name back."""
    for found in _found(folder):
        target = folder / f"step-{found.step:08d}"
        missing = not found.in_place and not target.exists()
        if missing and problem_of(found.path, every_byte=True) is None:
            found.path.rename(target)


def _surplus(folder: Path, written: Path, keep: int) -> list[Path]:
    """The good checkpoints beyond the newest `keep`, and those that were replaced. Bad ones do not
    count, and are left for someone to look at; older ones are not read for it, only measured."""
    kept: list[_Found] = []
    surplus: list[Path] = []
    seen_written = False
    for found in _found(folder):
        if found.path == written:
            kept.append(found)
            seen_written = True
            continue
        # Of a later step than the one just written: it may be the newest good one, or not.
        if problem_of(found.path, every_byte=not seen_written) is not None:
            continue
        replaced = any(found.step == other.step for other in kept)
        if replaced or len(kept) >= keep:
            surplus.append(found.path)
        else:
            kept.append(found)
    return surplus


# --- finding ----------------------------------------------------------------------------------


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest good checkpoint in `folder`; None if there is none.

    Every byte is checked. One that is torn, foreign or of an unknown version is named in a
    warning, and the one before is taken.
    """
    for path in candidates(Path(folder)):
        problem = problem_of(path, every_byte=True)
        if problem is None:
            return path
        say_refused(str(problem))
    return None


def candidates(folder: Path) -> list[Path]:
    """What bears a checkpoint's name, the newest first, good or not."""
    try:
        return [found.path for found in _found(folder)]
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"no checkpoint was looked for: {problem}") from problem


def say_refused(problem: str) -> None:
    log.warning("checkpoint refused: %s; the one before is taken, if any", problem)


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    """A folder with a checkpoint's name. They sort by age."""

    step: int
    in_place: bool
    changed_ns: int
    path: Path


def _found(folder: Path) -> list[_Found]:
    """What bears a checkpoint's name, the newest first."""
    found = []
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None and path.is_dir():
            changed_ns = path.stat().st_mtime_ns
            found.append(_Found(int(name["step"]), not name["replaced"], changed_ns, path))
    return sorted(found, reverse=True)


def problem_of(
    path: Path, *, every_byte: bool, share: tuple[int, int] = (0, 1)
) -> CheckpointError | None:
    """What is wrong with a checkpoint. Without `every_byte`, sizes are looked at, not tensors;
    `share` (rank, ranks) leaves most of its files to others."""
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
    """The state in one checkpoint, checked byte for byte. Nothing in it is ever run.

    Tensors come back on the host, from where `load_state_dict` takes them, or all of them on
    `device`: then the host waits for their copies. With `parts`, large tensors of a checkpoint of
    several ranks come as `StoredTensor`s, of which a rank reads its part; they are not checked.
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
    except _UNREADABLE as problem:
        raise CheckpointError(
            f"{path / STATE_FILE} does not describe its tensors ({problem!r})"
        ) from problem
    if device is not None:
        tensors = _moved(tensors, open_device(device))
    try:
        return states.decode(content["state"], tensors, content.get("own", ()))
    except OSError as problem:
        raise _unreadable(path, problem) from problem
    except _UNREADABLE as problem:
        raise CheckpointError(
            f"{path / STATE_FILE} holds no state that can be read: {problem!r}"
        ) from problem


def _moved(tensors: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
    if not device.asynchronous:
        return tensors
    with device.ledger.waiting("checkpoint_load"):  # the memory is not pinned, and used only once
        return {name: tensor.to(device.torch_device) for name, tensor in tensors.items()}


def _read_content(path: Path) -> dict[str, Any]:
    """What state.json holds, as the present version has it."""
    file = path / STATE_FILE
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{file} is incomplete, or not JSON: {problem}") from problem
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{file} has format = {found!r}: expected {FORMAT!r}")
    version = document.get("version")
    if type(version) is not int or (version != VERSION and version not in UPGRADES):
        known = ", ".join(map(str, sorted([*UPGRADES, VERSION])))
        raise CheckpointError(f"{file} has version = {version!r}: this Headrace reads {known}")
    content: dict[str, Any] | None = document.get("content")
    if not isinstance(content, dict) or _checksum_or_none(content) != document.get("sha256"):
        raise CheckpointError(f"{file} does not match its own checksum: the file was changed")
    while version != VERSION:
        content, version = UPGRADES[version](content), version + 1
    return content


def _checksum_or_none(content: object) -> str | None:
    try:
        return _checksum(content)
    except (ValueError, RecursionError):  # a bare NaN, which no checkpoint has, or too deep
        return None


def _tensor_files(path: Path, content: dict[str, Any]) -> list[tuple[Path, FileDigest]]:
    """The files that hold the tensors: one, or one for each rank that wrote."""
    try:
        told = content.get("files") or [{"name": TENSOR_FILE, **content["tensors"]}]
        for one in told:
            if one["name"] != TENSOR_FILE and not _RANK_FILE.fullmatch(one["name"]):
                raise ValueError(f"no file of a checkpoint is called {one['name']!r}")
        return [
            (path / one["name"], FileDigest(int(one["bytes"]), str(one["sha256"]))) for one in told
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointError(f"{path / STATE_FILE} does not describe its tensors") from problem


def _unreadable(path: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} cannot be read: {problem}")
