"""Encoded pairs on disk: flat arrays of ids with offsets, memory-mapped."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import CorpusError
from headrace.translation.corpus.sources import OnProgress, Pair
from headrace.translation.corpus.vocabulary import BOS, EOS, Vocabulary

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
_SIDES = ("src", "trg")
_CHUNK = 4096
# Below this many pairs, threads cost more than they save.
_FEW = 20_000
# What numpy raises for a file whose header is not one of its own.
_UNREADABLE = (
    *(OSError, ValueError, EOFError, SyntaxError, TokenError, TypeError, LookupError),
    *(MemoryError, OverflowError, RecursionError),
)


class IdPairs:
    """The encoded pairs of one split: src is ids + [eos], trg is [bos] + ids + [eos].

    Pickled, it is a path and a name: a DataLoader's workers map the same files.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self._ids = [_mapped(self.folder, f"{split}.{side}.ids.npy", np.int32) for side in _SIDES]
        self._offsets = [
            _mapped(self.folder, f"{split}.{side}.offsets.npy", np.int64) for side in _SIDES
        ]
        for side, ids, offsets in zip(_SIDES, self._ids, self._offsets, strict=True):
            if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(ids):
                raise CorpusError(
                    f"{self.folder}: {split}.{side} has {len(ids):,} ids and other offsets; "
                    "expected those of one build"
                )
        if len(self._offsets[0]) != len(self._offsets[1]):
            raise CorpusError(f"{self.folder}: {split} has sides of different lengths")

    def require_ids_below(self, *sizes: int) -> None:
        """Raise unless all ids are of vocabularies of these sizes, and offsets go up: a wrong id
        ends a run on a GPU in a way that nobody can read."""
        for side, ids, offsets, size in zip(_SIDES, self._ids, self._offsets, sizes, strict=True):
            bad = len(ids) and not 0 <= ids.min() <= ids.max() < size
            if bad or (len(offsets) > 1 and np.diff(offsets).min() < 0):
                raise CorpusError(
                    f"{self.folder}: {self.split}.{side} has ids that its vocabulary of {size:,} "
                    "has not; its bytes have changed. Prepare it again"
                )

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1

    def __getitem__(self, index: int) -> tuple[Ints, Ints]:
        """Both sides of a pair: int32, copies that the caller may write to."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        at = index % len(self)
        src, trg = (
            np.array(ids[offsets[at] : offsets[at + 1]])
            for ids, offsets in zip(self._ids, self._offsets, strict=True)
        )
        return src, trg

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> Longs:
        """Tokens of each side of each pair, `bos` and `eos` included: (n, 2)."""
        return np.stack([np.diff(offsets) for offsets in self._offsets], axis=1)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of each side, all pairs together."""
        return len(self._ids[0]), len(self._ids[1])

    def __repr__(self) -> str:
        return f"IdPairs({self.split}: {len(self):,} pairs)"

    def __reduce__(self) -> tuple[Any, ...]:
        return IdPairs, (self.folder, self.split)


def write_ids(
    folder: Path,
    split: str,
    pairs: Sequence[Pair],
    vocabularies: tuple[Vocabulary, Vocabulary],
    *,
    max_length: int,
    workers: int | None = None,
    progress: OnProgress | None = None,
) -> int:
    """Encode `pairs` into files that `IdPairs` opens; returns how many were too long and left out.

    SentencePiece lets go of the interpreter while it encodes, so threads are enough: nothing is
    pickled, and a script needs no `if __name__ == "__main__"`.
    """
    if workers is None:
        workers = 1 if len(pairs) < _FEW else _cores()
    parts: list[list[Ints]] = [[], []]
    lengths: list[list[Longs]] = [[], []]
    done = kept = 0
    for count, encoded in _encoded(pairs, vocabularies, max_length, max(1, workers)):
        for side in (0, 1):
            parts[side].append(encoded[side][0])
            lengths[side].append(encoded[side][1])
        done += count
        kept += len(encoded[0][1])
        if progress is not None:
            progress(f"encode {split}", done, len(pairs))
    for side, name in enumerate(_SIDES):
        ids = np.concatenate([np.empty(0, np.int32), *parts[side]])
        offsets = np.zeros(kept + 1, np.int64)
        np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths[side]]), out=offsets[1:])
        np.save(folder / f"{split}.{name}.ids.npy", ids)
        np.save(folder / f"{split}.{name}.offsets.npy", offsets)
    return len(pairs) - kept


_Side = tuple[Ints, Longs]


def _cores() -> int:
    """Those this process may use, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _encoded(
    pairs: Sequence[Pair],
    vocabularies: tuple[Vocabulary, Vocabulary],
    max_length: int,
    workers: int,
) -> Iterator[tuple[int, tuple[_Side, _Side]]]:
    """Chunks in order, with how many pairs each was made of; a few of them ahead in threads."""
    chunks = (pairs[at : at + _CHUNK] for at in range(0, len(pairs), _CHUNK))
    if workers == 1:
        for chunk in chunks:
            yield len(chunk), _encode_chunk(chunk, vocabularies, max_length)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[int, Future[tuple[_Side, _Side]]]] = deque()
        for chunk in chunks:
            waiting.append(
                (len(chunk), pool.submit(_encode_chunk, chunk, vocabularies, max_length))
            )
            if len(waiting) > 2 * workers:
                count, future = waiting.popleft()
                yield count, future.result()
        for count, future in waiting:
            yield count, future.result()


def _encode_chunk(
    pairs: Sequence[Pair], vocabularies: tuple[Vocabulary, Vocabulary], max_length: int
) -> tuple[_Side, _Side]:
    src = [[*ids, EOS] for ids in vocabularies[0].encode([pair[0] for pair in pairs])]
    trg = [[BOS, *ids, EOS] for ids in vocabularies[1].encode([pair[1] for pair in pairs])]
    fits = [max(len(s), len(t)) <= max_length for s, t in zip(src, trg, strict=True)]
    return _flat(list(itertools.compress(src, fits))), _flat(list(itertools.compress(trg, fits)))


def _flat(sequences: list[list[int]]) -> _Side:
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ids = np.fromiter(itertools.chain.from_iterable(sequences), np.int32, int(lengths.sum()))
    return ids, lengths


def _mapped(folder: Path, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    path = folder / name
    try:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:  # nothing to map: an empty array
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
