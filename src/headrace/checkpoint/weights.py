"""Weights alone, in one .safetensors file that other tools can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from headrace.atomic_files import atomic_file
from headrace.checkpoint import states
from headrace.checkpoint.snapshot import on_host
from headrace.checkpoint.tensor_file import DTYPE_NAMES, METADATA, read_tensors, write_tensors
from headrace.checkpoint.tensor_names import is_unicode
from headrace.device import Device
from headrace.errors import CheckpointError


def weights_to_file(
    path: str | Path, tensors: Mapping[str, torch.Tensor], *, device: Device | None = None
) -> None:
    """Write named tensors to `path`, and replace an existing file. After an error that file is
    unchanged.

    Equal names and weights make equal files. Tied tensors are written once for each name. The host
    waits for tensors on a device, in the ledger of `device` if given.
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
            f"{'the old file is unchanged' if path.exists() else 'no such file is there'}"
        ) from problem


def weights_from_file(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file by name, sorted, on the host."""
    try:
        tensors = read_tensors(Path(path))
    except OSError as problem:
        raise CheckpointError(f"weights were not read from {path}: {problem}") from problem
    return {name: tensors[name] for name in sorted(tensors)}


def _require_writable(name: object, tensor: object) -> None:
    if not isinstance(name, str) or name == METADATA or not is_unicode(name):
        raise CheckpointError(f"{name!r} cannot be a tensor's name in a safetensors file")
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"weight {name!r} is a {type(tensor).__name__}: expected a tensor")
    states.require_plain(tensor, f"weight {name!r}")
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"weight {name!r} is {tensor.dtype}, which safetensors does not support"
        )
