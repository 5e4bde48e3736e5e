"""Encoded pairs on disk: per side, one flat array of ids and one of offsets, memory-mapped."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import CorpusError

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
SIDES = ("src", "trg")
CHUNK = 4096
# What numpy raises for files that it did not write.
_UNREADABLE = (
    *(OSError, ValueError, EOFError, SyntaxError, TokenError, TypeError, LookupError),
    *(MemoryError, OverflowError, RecursionError),
)


class IdPairs:
    """The encoded pairs of one split: src is ids + [eos], trg is [bos] + ids + [eos].

    Pickling stores only the path and the split: each DataLoader worker maps the same files.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self._ids = [
            _open_array(self.folder, f"{split}.{side}.ids.npy", np.int32) for side in SIDES
        ]
        self._offsets = [
            _open_array(self.folder, f"{split}.{side}.offsets.npy", np.int64) for side in SIDES
        ]
        for side, ids, offsets in zip(SIDES, self._ids, self._offsets, strict=True):
            if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(ids):
                raise CorpusError(
                    f"{self.folder}: the offsets of {split}.{side} do not match its {len(ids):,} "
                    "ids. Prepare it again"
                )
        if len(self._offsets[0]) != len(self._offsets[1]):
            raise CorpusError(f"{self.folder}: {split} has sides of different lengths")

    def check_ids(self, *sizes: int) -> None:
        """Raise if an id is outside the vocabularies of these sizes, or offsets do not ascend: on
        a GPU such an id would end the run with an error that does not name it."""
        for side, ids, offsets, size in zip(SIDES, self._ids, self._offsets, sizes, strict=True):
            bad = len(ids) and not 0 <= ids.min() <= ids.max() < size
            if bad or (len(offsets) > 1 and np.diff(offsets).min() < 0):
                raise CorpusError(
                    f"{self.folder}: {self.split}.{side} has ids outside its vocabulary of "
                    f"{size:,}; the file has changed. Prepare it again"
                )

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1

    def __getitem__(self, index: int) -> tuple[Ints, Ints]:
        """Both sides of a pair, as int32 copies."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        at = index % len(self)
        src, trg = (
            np.array(ids[offsets[at] : offsets[at + 1]])
            for ids, offsets in zip(self._ids, self._offsets, strict=True)
        )
        return src, trg

    def end_to_end(self, indices: Longs) -> tuple[tuple[Ints, Longs], tuple[Ints, Longs]]:
        """Of each side: the ids of these pairs, end to end, and the length of each sentence."""
        src, trg = (
            _gathered(ids, offsets, indices)
            for ids, offsets in zip(self._ids, self._offsets, strict=True)
        )
        return src, trg

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> Longs:
        """Tokens per side of each pair, including `bos` and `eos`: (pairs, 2)."""
        return np.stack([np.diff(offsets) for offsets in self._offsets], axis=1)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens per side, summed over all pairs."""
        return len(self._ids[0]), len(self._ids[1])

    def digest(self) -> str:
        """Identifies these pairs, in their order."""
        found = hashlib.blake2b(digest_size=8)
        for array in (*self._offsets, *self._ids):
            found.update(len(array).to_bytes(8, "little"))
            found.update(array.data)
        return found.hexdigest()

    def contain(self, side: int, sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each of these sequences of ids is a source (`side` 0) or a target (1) here."""
        wanted: dict[int, set[bytes]] = defaultdict(set)
        keys = [np.array(sequence, np.int32).tobytes() for sequence in sequences]
        for sequence, key in zip(sequences, keys, strict=True):
            wanted[len(sequence)].add(key)
        ids, starts = self._ids[side], self._offsets[side][:-1]
        lengths = np.diff(self._offsets[side])
        found: set[bytes] = set()
        for length, keys_of_length in wanted.items():
            positions = starts[lengths == length]
            for at in range(0, len(positions), CHUNK):
                rows = ids[positions[at : at + CHUNK, None] + np.arange(length)]
                found |= keys_of_length.intersection(row.tobytes() for row in rows)
        return [key in found for key in keys]

    def __repr__(self) -> str:
        return f"IdPairs({self.split}: {len(self):,} pairs)"

    def __reduce__(self) -> tuple[Any, ...]:
        return IdPairs, (self.folder, self.split)


def _gathered(ids: Ints, offsets: Longs, indices: Longs) -> tuple[Ints, Longs]:
    lengths = offsets[indices + 1] - offsets[indices]
    starts_here = np.cumsum(lengths) - lengths
    at = np.repeat(offsets[indices] - starts_here, lengths) + np.arange(lengths.sum())
    return ids[at], lengths


def _open_array(folder: Path, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    path = folder / name
    try:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:  # an empty array cannot be mapped
            array = np.load(path, allow_pickle=False)
    except _UNREADABLE as problem:
        raise CorpusError(f"{path}: cannot be opened ({problem})") from problem
    if array.ndim != 1 or array.dtype != dtype:
        raise CorpusError(
            f"{path}: is {array.ndim}-dimensional {array.dtype}; expected 1-dimensional "
            f"{np.dtype(dtype)}"
        )
    plain: npt.NDArray[Any] = array.view(np.ndarray)
    return plain
