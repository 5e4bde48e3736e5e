"""Files in the .safetensors format: written in one pass with their checksum, read by the package.

The `safetensors` package reads them; it checks the header and every offset. It does not write them:
it reports a full disk without the system's error number, and its file would have to be read again
for the checksum.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.atomic_files import DurableFile
from headrace.errors import CheckpointError

METADATA = "__metadata__"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_CHUNK_BYTES = 16 << 20  # small enough to stay in the CPU's cache from the write to the checksum


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and checksum of a whole file."""

    nbytes: int
    sha256: str

    def require_size(self, path: Path, found: int) -> None:
        if found != self.nbytes:
            raise CheckpointError(
                f"{path} has {found} bytes: expected {self.nbytes}; the file is incomplete"
            )

    def require(self, path: Path) -> None:
        """Raise `CheckpointError` unless the file is the expected one, byte for byte."""
        self.require_size(path, path.stat().st_size)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise CheckpointError(
                f"{path} has the checksum {found[:12]}…: expected {self.sha256[:12]}…; "
                "the file was changed"
            )


def write_tensors(file: DurableFile, tensors: Mapping[str, torch.Tensor]) -> FileDigest:
    """Write contiguous host tensors; a dtype that the format lacks is written as its bytes.

    Eight bytes with the header's length, the header in JSON, then the elements. Tensors are sorted
    by element size, largest first, so that all are aligned, then by name: equal tensors make equal
    files.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        dtype, shape = DTYPE_NAMES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            dtype, shape = "U8", [end - begin]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = _LENGTH.pack(len(text)) + text
    checksum = hashlib.sha256(start)
    file.write(start)
    for name in order:
        for chunk in _chunks(tensors[name]):
            file.write(chunk)
            checksum.update(chunk)
    return FileDigest(len(start) + end, checksum.hexdigest())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, each in memory of its own on the host.

    Raises `CheckpointError` if it is not a whole .safetensors file.
    """
    with _explained(path):
        # Not mapped: a disk error under a mapping would kill the process.
        file: Any = safe_open(path, framework="pt", backend="pread")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class MappedFile:
    """A .safetensors file, opened to read parts of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _explained(path):
            # Mapped: without that, the package reads the whole tensor for each part.
            self._file: Any = safe_open(path, framework="pt", backend="mmap")

    def shape(self, name: str) -> tuple[int, ...]:
        with _explained(self.path):
            return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        with _explained(self.path):
            return DTYPES[self._file.get_slice(name).get_dtype()]

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A view of the file: copy it to keep it."""
        with _explained(self.path):
            part: torch.Tensor = self._file.get_slice(name)[slices or ...]
        return part


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    # RuntimeError and LookupError: an element type that this PyTorch lacks.
    except (SafetensorError, RuntimeError, LookupError) as problem:
        raise CheckpointError(
            f"{path} is incomplete, or not a safetensors file: {problem}"
        ) from problem


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    content = memoryview(array)
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]
