"""Encoded pairs without a corpus: the files of `IdPairs`, from ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.vocabulary import BOS, EOS


def write_pairs(folder: Path, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> IdPairs:
    """`pairs` are ids without bos and eos."""
    sides = {
        "src": [[*src, EOS] for src, _ in pairs],
        "trg": [[BOS, *trg, EOS] for _, trg in pairs],
    }
    for side, rows in sides.items():
        offsets = np.cumsum([0, *map(len, rows)])
        np.save(folder / f"train.{side}.ids.npy", np.concatenate(rows).astype(np.int32))
        np.save(folder / f"train.{side}.offsets.npy", offsets.astype(np.int64))
    return IdPairs(folder, "train")


def random_pairs(folder: Path, count: int, vocabulary: int, longest: int, seed: int = 0) -> IdPairs:
    """Pairs of up to `longest` ids per side."""
    random = np.random.default_rng(seed)

    def ids() -> list[int]:
        found: list[int] = random.integers(
            EOS + 1, vocabulary, random.integers(1, longest)
        ).tolist()
        return found

    return write_pairs(folder, [(ids(), ids()) for _ in range(count)])
