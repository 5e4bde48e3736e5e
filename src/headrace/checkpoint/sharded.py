"""A checkpoint that several ranks write together: each one file, and rank 0 the index.

    rank 0   make a folder beside │ write a file │ gather what was written │ state.json, rename
    others                        │ write a file │                         │

Of a sharded tensor each rank writes its part; tensors that all ranks have are divided among them.
Nothing bears a checkpoint's name before every file of it is on the disk. If one rank cannot write,
all of them get its error, and the checkpoints before are as they were.
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
from headrace.checkpoint import folders, states, tensor_file
from headrace.checkpoint.tensor_file import FileDigest
from headrace.device import Ledger
from headrace.errors import CheckpointError
from headrace.parallel import Ranks, is_sharded, local_shard, shard_region

_REASON = "checkpoint_ranks"


@dataclass
class SharedState:
    """A state, encoded: what rank 0 writes of it, and the tensors that this rank writes."""

    document: Any
    own: list[Any]
    tensors: dict[str, torch.Tensor]
    shards: dict[str, Any] = field(default_factory=dict)


def encode(state: object, ranks: Ranks) -> SharedState:
    """What this rank has to write of a state that all of them have."""
    encoder = _SharedEncoder(ranks.rank)
    document = encoder.encode(state, ())
    replicated = {
        name: tensor
        for name, tensor in encoder.tensors.items()
        if name not in encoder.shards and name not in encoder.own_names
    }
    mine = _divided(replicated, ranks.size)[ranks.rank]
    kept = {
        name: tensor
        for name, tensor in encoder.tensors.items()
        if name not in replicated or name in mine
    }
    return SharedState(document, encoder.own, kept, encoder.shards)


def _divided(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[set[str]]:
    """Which rank writes which: the same on all of them, since all have the same tensors."""
    names: list[set[str]] = [set() for _ in range(ranks)]
    load = [0] * ranks
    for name, tensor in tensors.items():
        lightest = load.index(min(load))
        names[lightest].add(name)
        load[lightest] += tensor.numel() * tensor.element_size()
    return names


class _SharedEncoder(states.Encoder):
    """Also takes sharded tensors, and values that are each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.own: list[Any] = []
        self.own_names: set[str] = set()
        self.shards: dict[str, Any] = {}

    def encode(self, value: object, path: states.Path) -> Any:
        if not isinstance(value, states.PerRank):
            return super().encode(value, path)
        number, before = len(self.own), set(self.tensors)
        self.own.append(super().encode(value.own, (f"rank-{self._rank:05d}", number)))
        self.own_names |= set(self.tensors) - before
        return {"$ranks": number}

    def _tensor(self, tensor: torch.Tensor, path: states.Path) -> dict[str, Any]:
        if not is_sharded(tensor):
            return super()._tensor(tensor, path)
        if tensor.dtype not in tensor_file.DTYPE_NAMES:
            raise CheckpointError(
                f"{states.place(path)} is sharded and {tensor.dtype}, which safetensors does not "
                "know"
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
    """Write this rank's part of a checkpoint; `tensors` are the state's, on the host. Returns when
    all of it is in place, on every rank."""
    target = folder / f"step-{step:08d}"
    making: AbstractContextManager[Path | None] = nullcontext()
    if ranks.is_first:
        making = atomic_files.temporary_folder(target)
    told: dict[str, Any] = {}
    try:
        with making as made:
            told = {"folder": str(made)}
            return _write_together(target, state, tensors, step, keep, ranks, ledger, told)
    except OSError as problem:
        if not told:  # no folder: the others wait to be told of one
            ranks.broadcast({"error": f"{folder}: {problem.strerror or problem}"}, ledger, _REASON)
        raise CheckpointError(
            f"the checkpoint of step {step} was not written to {folder}: "
            f"{problem.strerror or problem}; {folders.still_there(folder)}"
        ) from problem


def _write_together(
    target: Path,
    state: SharedState,
    tensors: Mapping[str, torch.Tensor],
    step: int,
    keep: int,
    ranks: Ranks,
    ledger: Ledger,
    told: dict[str, Any],
) -> Path:
    told = ranks.broadcast(told, ledger, _REASON)
    _require_good([told], step, target)
    temporary = Path(told["folder"])
    name = f"tensors-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"
    try:
        with DurableFile(temporary / name) as file:
            digest = tensor_file.write_tensors(file, tensors)
        told = _written(name, digest, state)
    except OSError as problem:
        told = {"error": f"rank {ranks.rank}: {problem.strerror or problem}"}
    everyone = ranks.all_gather(told, ledger, _REASON)
    _require_good(everyone, step, target)
    told = {}
    if ranks.is_first:
        try:
            content = _content(state.document, everyone, step)
            folders.commit(temporary, target, content, keep=keep)
        except OSError as problem:
            told = {"error": f"rank 0: {problem.strerror or problem}"}
    _require_good([ranks.broadcast(told, ledger, _REASON)], step, target)
    return target


def _written(name: str, digest: FileDigest, state: SharedState) -> dict[str, Any]:
    whole = [tensor for tensor in state.tensors if tensor not in state.shards]
    return {
        "file": {"name": name, "bytes": digest.nbytes, "sha256": digest.sha256},
        "own": state.own,
        "whole": whole,
        "shards": state.shards,
    }


def _require_good(told: list[dict[str, Any]], step: int, target: Path) -> None:
    problems = [one["error"] for one in told if "error" in one]
    if problems:
        raise CheckpointError(
            f"the checkpoint of step {step} was not written to {target.parent}: "
            f"{'; '.join(problems)}; {folders.still_there(target.parent)}"
        )


def _content(document: Any, everyone: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """What state.json says of a checkpoint of several files."""
    whole: dict[str, int] = {}
    sharded: dict[str, Any] = {}
    for number, one in enumerate(everyone):
        whole |= dict.fromkeys(one["whole"], number)
        for name, shard in one["shards"].items():
            known = sharded.setdefault(name, {"shape": shard["shape"], "pieces": []})
            # Ranks that replicate each other have the same part.
            if all(shard["offset"] != offset for _, offset in known["pieces"]):
                known["pieces"].append([number, shard["offset"]])
    return {
        "step": step,
        "files": [one["file"] for one in everyone],
        "whole": whole,
        "sharded": sharded,
        "own": [one["own"] for one in everyone],
        "state": document,
    }


def agreed_checkpoint(folder: str | Path, ranks: Ranks, ledger: Ledger) -> Path | None:
    """The newest good checkpoint, for all ranks: each of them checks some of its files."""
    folder = Path(folder)
    if not ranks.several:
        return folders.latest_checkpoint(folder)
    names: list[str] = []
    if ranks.is_first:
        names = [path.name for path in folders.candidates(folder)]
    for name in ranks.broadcast(names, ledger, _REASON):
        path = folder / name
        problem = folders.problem_of(path, every_byte=True, share=(ranks.rank, ranks.size))
        found = ranks.all_gather(None if problem is None else str(problem), ledger, _REASON)
        problems = [f"rank {rank}: {one}" for rank, one in enumerate(found) if one is not None]
        if not problems:
            return path
        if ranks.is_first:
            folders.say_refused("; ".join(problems))
    return None
