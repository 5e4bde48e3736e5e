"""A checkpoint that several ranks write together: one tensor file each, and state.json by rank 0.

    rank 0   create a temporary folder │ write a file │ gather │ write state.json, rename the folder
    others                             │ write a file │        │

Each rank writes its shard of a sharded tensor. Replicated tensors are divided among the ranks. The
folder gets its name when every file is on the disk. If one rank cannot write, all ranks raise its
error, and older checkpoints are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace import atomic_files
from headrace.atomic_files import DurableFile
from headrace.checkpoint import finding, folders, states, tensor_file
from headrace.checkpoint.tensor_file import FileDigest
from headrace.checkpoint.tensor_names import StatePath
from headrace.device import Ledger
from headrace.errors import CheckpointError
from headrace.parallel import Ranks, is_sharded, local_shard, shard_region

_REASON = "checkpoint_ranks"


@dataclass
class SharedState:
    """An encoded state: the document that rank 0 writes, and this rank's values and tensors."""

    document: Any
    own: list[Any]
    tensors: dict[str, torch.Tensor]
    shards: dict[str, Any] = field(default_factory=dict)


def encode(state: object, ranks: Ranks) -> SharedState:
    """Encode the state, and choose the tensors that this rank writes."""
    encoder = _SharedEncoder(ranks.rank)
    document = encoder.encode(state, ())
    replicated = {
        name: tensor
        for name, tensor in encoder.tensors.items()
        if name not in encoder.shards and name not in encoder.own_names
    }
    mine = _divide(replicated, ranks.size)[ranks.rank]
    kept = {
        name: tensor
        for name, tensor in encoder.tensors.items()
        if name not in replicated or name in mine
    }
    return SharedState(document, encoder.own, kept, encoder.shards)


def _divide(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[set[str]]:
    """The tensors that each rank writes, by name: about the same bytes each.

    All ranks have the same tensors, so all compute the same division.
    """
    names: list[set[str]] = [set() for _ in range(ranks)]
    nbytes = [0] * ranks
    for name, tensor in tensors.items():
        smallest = nbytes.index(min(nbytes))
        names[smallest].add(name)
        nbytes[smallest] += tensor.numel() * tensor.element_size()
    return names


class _SharedEncoder(states.Encoder):
    """Also encodes sharded tensors and `PerRank` values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.own: list[Any] = []
        self.own_names: set[str] = set()
        self.shards: dict[str, Any] = {}

    def encode(self, value: object, path: StatePath) -> Any:
        if not isinstance(value, states.PerRank):
            return super().encode(value, path)
        number, before = len(self.own), set(self.tensors)
        self.own.append(super().encode(value.own, (f"rank-{self._rank:05d}", number)))
        self.own_names |= set(self.tensors) - before
        return {"$ranks": number}

    def _tensor(self, tensor: torch.Tensor, path: StatePath) -> dict[str, Any]:
        if not is_sharded(tensor):
            return super()._tensor(tensor, path)
        if tensor.dtype not in tensor_file.DTYPE_NAMES:
            raise CheckpointError(
                f"{states.expression(path)} is sharded and {tensor.dtype}, which safetensors "
                "does not support"
            )
        offset, _ = shard_region(tensor)
        name = self._name(local_shard(tensor), path)
        self.shards[name] = {"offset": list(offset), "shape": list(tensor.shape)}
        return {"$tensor": name}


def write_shared(
    folder: Path,
    state: SharedState,
    tensors: Mapping[str, torch.Tensor],
    *,
    step: int,
    keep: int,
    ranks: Ranks,
    ledger: Ledger,
) -> Path:
    """Write this rank's part of a checkpoint; `tensors` are the state's, on the host.

    Returns when the checkpoint is complete, on every rank.
    """
    target = folder / f"step-{step:08d}"
    creation: AbstractContextManager[Path | None] = nullcontext()
    if ranks.is_first:
        creation = atomic_files.temporary_folder(target)
    temporary: Path | None = None
    try:
        with creation as temporary:
            return _write_together(target, temporary, state, tensors, step, keep, ranks, ledger)
    except OSError as problem:
        why = problem.strerror or str(problem)
        if ranks.is_first and temporary is None:  # the other ranks wait for the folder's name
            ranks.broadcast({"error": f"{folder}: {why}"}, ledger, _REASON)
        raise folders.not_written(step, folder, why) from problem


def _write_together(
    target: Path,
    temporary: Path | None,
    state: SharedState,
    tensors: Mapping[str, torch.Tensor],
    step: int,
    keep: int,
    ranks: Ranks,
    ledger: Ledger,
) -> Path:
    message: dict[str, Any] = ranks.broadcast({"folder": str(temporary)}, ledger, _REASON)
    _raise_errors([message], step, target)
    temporary = Path(message["folder"])
    name = f"tensors-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"
    try:
        with DurableFile(temporary / name) as file:
            digest = tensor_file.write_tensors(file, tensors)
        message = _written(name, digest, state)
    except OSError as problem:
        message = {"error": f"rank {ranks.rank}: {problem.strerror or problem}"}
    messages = ranks.all_gather(message, ledger, _REASON)
    _raise_errors(messages, step, target)
    message = {}
    if ranks.is_first:
        try:
            content = _content(state.document, messages, step)
            folders.commit(temporary, target, content, keep=keep)
        except OSError as problem:
            message = {"error": f"rank 0: {problem.strerror or problem}"}
    _raise_errors([ranks.broadcast(message, ledger, _REASON)], step, target)
    return target


def _written(name: str, digest: FileDigest, state: SharedState) -> dict[str, Any]:
    """The message in which a rank describes its file to the others."""
    whole = [tensor for tensor in state.tensors if tensor not in state.shards]
    return {
        "file": {"name": name, "bytes": digest.nbytes, "sha256": digest.sha256},
        "own": state.own,
        "whole": whole,
        "shards": state.shards,
    }


def _raise_errors(messages: list[dict[str, Any]], step: int, target: Path) -> None:
    """Raise the errors that ranks reported, on every rank."""
    errors = [message["error"] for message in messages if "error" in message]
    if errors:
        raise folders.not_written(step, target.parent, "; ".join(errors))


def _content(document: Any, written: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """The `content` of state.json, from what each rank has written."""
    whole: dict[str, int] = {}
    sharded: dict[str, Any] = {}
    for number, one in enumerate(written):
        whole |= dict.fromkeys(one["whole"], number)
        for name, shard in one["shards"].items():
            known = sharded.setdefault(name, {"shape": shard["shape"], "pieces": []})
            # Ranks that replicate each other have the same piece.
            if all(shard["offset"] != offset for _, offset in known["pieces"]):
                known["pieces"].append([number, shard["offset"]])
    return {
        "step": step,
        "files": [one["file"] for one in written],
        "whole": whole,
        "sharded": sharded,
        "own": [one["own"] for one in written],
        "state": document,
    }


def agreed_checkpoint(folder: str | Path, ranks: Ranks, ledger: Ledger) -> Path | None:
    """The newest good checkpoint, the same on all ranks; each rank checks some of its files."""
    folder = Path(folder)
    if not ranks.several:
        return finding.latest_checkpoint(folder)
    names: list[str] = []
    if ranks.is_first:
        names = [path.name for path in finding.candidates(folder)]
    for name in ranks.broadcast(names, ledger, _REASON):
        path = folder / name
        problem = finding.find_problem(path, every_byte=True, share=(ranks.rank, ranks.size))
        found = ranks.all_gather(None if problem is None else str(problem), ledger, _REASON)
        problems = [f"rank {rank}: {one}" for rank, one in enumerate(found) if one is not None]
        if not problems:
            return path
        if ranks.is_first:
            finding.warn_refused("; ".join(problems))
    return None
