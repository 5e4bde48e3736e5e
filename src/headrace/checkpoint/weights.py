"""Weights alone, in one .safetensors file that any tool can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from headrace.atomic_files import atomic_file
from headrace.checkpoint import states
from headrace.checkpoint.snapshot import on_host
from headrace.checkpoint.tensor_file import DTYPE_NAMES, METADATA, read_tensors, write_tensors
from headrace.device import Device
from headrace.errors import CheckpointError


def weights_to_file(
    path: str | Path, tensors: Mapping[str, torch.Tensor], *, device: Device | None = None
) -> None:
    """Write named tensors to `path`, whole or not at all; a file that is there is replaced.

    The bytes depend on names and weights alone. Tied tensors are written under each of their
    names. Waits for tensors that lie on a device, in `device`'s ledger if it is given.
    """
    path = Path(path)
    for name, tensor in tensors.items():
        _require_writable(name, tensor)
    try:
        with on_host(tensors, device) as arrived, atomic_file(path) as file:
            write_tensors(file, arrived)
    except OSError as problem:
        raise CheckpointError(
            f"weights were not written to {path}: {problem}; "
            f"{'what was there still is' if path.exists() else 'no such file is there'}"
        ) from problem


def weights_from_file(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file by name, sorted, on the host."""
    try:
        tensors = read_tensors(Path(path))
    except OSError as problem:
        raise CheckpointError(f"weights were not read from {path}: {problem}") from problem
    return {name: tensors[name] for name in sorted(tensors)}


def _require_writable(name: object, tensor: object) -> None:
    if not isinstance(name, str) or name == METADATA or not states.is_unicode(name):
        raise CheckpointError(f"{name!r} cannot be a tensor's name in a safetensors file")
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"weight {name!r} is a {type(tensor).__name__}: expected a tensor")
    states.require_plain(tensor, f"weight {name!r}")
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"weight {name!r} is {tensor.dtype}, which safetensors does not know")
