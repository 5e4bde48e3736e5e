"""The .safetensors format, written and read piece by piece.

Eight bytes with the header's length, the header in JSON, then the elements. Tensors with larger
elements come first, so that all are aligned, and among those they are sorted by name: the bytes
depend on names and tensors alone. Written here, not by the `safetensors` package, because that
one wants all bytes in memory at once and hides the operating system's errors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

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
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000  # what the safetensors package takes
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What tells a whole file from a torn one."""

    nbytes: int
    sha256: str

    def require_size(self, path: Path, found: int) -> None:
        if found != self.nbytes:
            raise CheckpointError(f"{path} has {found} bytes: expected {self.nbytes}; it is torn")

    def require(self, path: Path, found: FileDigest) -> None:
        self.require_size(path, found.nbytes)
        if found.sha256 != self.sha256:
            raise CheckpointError(
                f"{path} has the checksum {found.sha256[:12]}…: expected {self.sha256[:12]}…; "
                "its bytes have changed"
            )


def write_tensors(file: DurableFile, tensors: Mapping[str, torch.Tensor]) -> FileDigest:
    """Write contiguous host tensors to a new file. Types that the format does not know are
    written as their bytes."""
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
    first = _LENGTH.pack(len(text)) + text
    checksum = hashlib.sha256(first)
    file.write(first)
    for name in order:
        for piece in _pieces(tensors[name]):
            file.write(piece)
            checksum.update(piece)
    return FileDigest(len(first) + end, checksum.hexdigest())


def read_tensors(path: Path, expected: FileDigest | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, each in memory of its own on the host.

    Raises `CheckpointError` if it is no such file or, as far as given, not the expected one.
    """
    tensors: dict[str, torch.Tensor] = {}
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None:
            expected.require_size(path, size)
        first, entries = _read_header(path, file, size)
        checksum = hashlib.sha256(first)
        for entry in entries:
            raw = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
            for piece in _pieces(raw):
                if file.readinto(piece) != len(piece):
                    raise CheckpointError(f"{path} became shorter while it was read")
                if expected is not None:
                    checksum.update(piece)
            tensors[entry.name] = raw.view(entry.dtype).view(entry.shape)
    if expected is not None:
        expected.require(path, FileDigest(size, checksum.hexdigest()))
    return tensors


def check_file(path: Path, expected: FileDigest) -> None:
    """Raise `CheckpointError` unless the file is the expected one, byte for byte."""
    expected.require_size(path, path.stat().st_size)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    expected.require(path, FileDigest(expected.nbytes, checksum))


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Where a tensor lies in its file, in bytes from the file's start."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_entries(path: Path) -> dict[str, StoredEntry]:
    """What a file holds, by name; no tensor is read."""
    with path.open("rb") as file:
        first, entries = _read_header(path, file, os.fstat(file.fileno()).st_size)
    return {
        entry.name: StoredEntry(len(first) + entry.begin, entry.dtype, entry.shape)
        for entry in entries
    }


def read_span(path: Path, entry: StoredEntry, first: int, last: int) -> torch.Tensor:
    """The elements `first` to `last` of a tensor, as they lie one behind the other."""
    raw = torch.empty((last - first) * entry.dtype.itemsize, dtype=torch.uint8, device="cpu")
    with path.open("rb") as file:
        file.seek(entry.begin + first * entry.dtype.itemsize)
        for piece in _pieces(raw):
            if file.readinto(piece) != len(piece):
                raise CheckpointError(f"{path} became shorter while it was read")
    return raw.view(entry.dtype)


@dataclass(frozen=True, slots=True)
class _Entry:
    begin: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, fields: Any) -> _Entry:
        begin, end = fields["data_offsets"]
        entry = cls(begin, name, _DTYPES[fields["dtype"]], tuple(fields["shape"]))
        if not all(type(size) is int and size >= 0 for size in (begin, end, *entry.shape)):
            raise ValueError(f"negative or broken numbers at {name!r}")
        if begin + entry.nbytes != end:
            raise ValueError(f"{name!r} does not fill its place")
        return entry


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[bytes, list[_Entry]]:
    """The bytes before the elements, and what they say, in the order of the elements."""
    first = file.read(_LENGTH.size)
    try:
        (length,) = _LENGTH.unpack(first)
        if length > min(size - _LENGTH.size, _LARGEST_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
        header = json.loads(text)
        header.pop(METADATA, None)
        entries = sorted(
            (_Entry.of(name, fields) for name, fields in header.items()),
            key=lambda entry: (entry.begin, entry.nbytes),
        )
        end = 0
        for entry in entries:
            if entry.begin != end:
                raise ValueError(f"a hole or overlap before {entry.name!r}")
            end += entry.nbytes
        if _LENGTH.size + length + end != size:
            raise ValueError(f"{size} bytes; the header speaks of {_LENGTH.size + length + end}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as bad:
        raise CheckpointError(f"{path} is torn, or no safetensors file: {bad}") from bad
    return first + text, entries


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _pieces(raw: torch.Tensor) -> Iterator[memoryview]:
    """Not too long ones: a signal is seen between two, and a checksum finds them in the cache."""
    whole = _bytes_of(raw)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]
