"""States to save, ways to damage a file, and exact comparison of loaded states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from headrace.device import Device


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, with the same types at every level. NaN equals NaN, and -0.0
    differs from 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.device == other.device
            and raw(one) == raw(other)
        )
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return keys and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())


def example(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "weight": torch.full((40,), float(number)),
        "moments": {0: torch.full((3,), number, dtype=torch.float64)},
        "rate": number / 7,
    }


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def on(device: Device, value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, device=device.torch_device)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool, torch.complex128),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


# The steps of the checkpoints that exist, and the step that is saved.
SAVES = {"one more": ([1, 2, 3], 4), "the same again": ([1, 2], 2)}
