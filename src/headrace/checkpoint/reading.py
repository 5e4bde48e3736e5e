"""Reads the state in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import states
from headrace.checkpoint.content import STATE_FILE, read_content, tensor_files, unreadable
from headrace.checkpoint.pieces import StoredTensors
from headrace.checkpoint.tensor_file import read_tensors
from headrace.device import Device, open_device
from headrace.errors import CheckpointError

# What decoding may raise if another program wrote the state, with a valid checksum.
_DECODING_ERRORS = (
    *(CheckpointError, LookupError, ValueError, TypeError, AttributeError, RuntimeError),
    *(OverflowError, MemoryError),
)


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
        content = read_content(path)
        files = tensor_files(path, content)
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
        raise unreadable(path, problem) from problem
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
        raise unreadable(path, problem) from problem
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
