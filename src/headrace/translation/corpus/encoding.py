"""Encodes pairs into the arrays that `IdPairs` maps."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from headrace.translation.corpus.encoded import CHUNK, SIDES, Ints, Longs
from headrace.translation.corpus.pair_files import OnProgress, Pair
from headrace.translation.corpus.vocabulary import BOS, EOS, Vocabulary

# With fewer pairs, threads cost more than they save.
_THREADS_FROM_PAIRS = 20_000


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
    """Encode `pairs` into files for `IdPairs`. Returns how many were too long and left out.

    Threads are enough, because SentencePiece releases the GIL while it encodes.
    """
    if workers is None:
        workers = 1 if len(pairs) < _THREADS_FROM_PAIRS else _usable_cores()
    parts: list[list[Ints]] = [[], []]
    lengths: list[list[Longs]] = [[], []]
    done = kept = 0
    for count, encoded in _encode_in_order(pairs, vocabularies, max_length, max(1, workers)):
        for side in (0, 1):
            parts[side].append(encoded[side][0])
            lengths[side].append(encoded[side][1])
        done += count
        kept += len(encoded[0][1])
        if progress is not None:
            progress(f"encode {split}", done, len(pairs))
    for side, name in enumerate(SIDES):
        ids = np.concatenate([np.empty(0, np.int32), *parts[side]])
        offsets = np.zeros(kept + 1, np.int64)
        np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths[side]]), out=offsets[1:])
        np.save(folder / f"{split}.{name}.ids.npy", ids)
        np.save(folder / f"{split}.{name}.offsets.npy", offsets)
    return len(pairs) - kept


# The ids of many sentences in one array, and the length of each sentence.
_FlatIds = tuple[Ints, Longs]


def _usable_cores() -> int:
    """The cores that this process may use, if the system can tell."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _encode_in_order(
    pairs: Sequence[Pair],
    vocabularies: tuple[Vocabulary, Vocabulary],
    max_length: int,
    workers: int,
) -> Iterator[tuple[int, tuple[_FlatIds, _FlatIds]]]:
    """Yield the number of pairs in each chunk, and its encoded pairs that are not too long. With
    several workers, threads encode a few chunks ahead."""
    chunks = (pairs[at : at + CHUNK] for at in range(0, len(pairs), CHUNK))
    if workers == 1:
        for chunk in chunks:
            yield len(chunk), _encode_chunk(chunk, vocabularies, max_length)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[tuple[int, Future[tuple[_FlatIds, _FlatIds]]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(
                    (len(chunk), pool.submit(_encode_chunk, chunk, vocabularies, max_length))
                )
                if len(waiting) > 2 * workers:
                    count, future = waiting.popleft()
                    yield count, future.result()
            for count, future in waiting:
                yield count, future.result()
        finally:  # after Ctrl-C, encode no further chunk
            pool.shutdown(wait=False, cancel_futures=True)


def encode_pairs(
    pairs: Sequence[Pair], vocabularies: tuple[Vocabulary, Vocabulary]
) -> tuple[list[list[int]], list[list[int]]]:
    """The sources and the targets, as `IdPairs` has them."""
    src = [[*ids, EOS] for ids in vocabularies[0].encode([pair[0] for pair in pairs])]
    trg = [[BOS, *ids, EOS] for ids in vocabularies[1].encode([pair[1] for pair in pairs])]
    return src, trg


def _encode_chunk(
    pairs: Sequence[Pair], vocabularies: tuple[Vocabulary, Vocabulary], max_length: int
) -> tuple[_FlatIds, _FlatIds]:
    src, trg = encode_pairs(pairs, vocabularies)
    fits = [max(len(s), len(t)) <= max_length for s, t in zip(src, trg, strict=True)]
    src, trg = (list(itertools.compress(side, fits)) for side in (src, trg))
    return _flatten(src), _flatten(trg)


def _flatten(sequences: list[list[int]]) -> _FlatIds:
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ids = np.fromiter(itertools.chain.from_iterable(sequences), np.int32, int(lengths.sum()))
    return ids, lengths
