"""Parallel text in three splits, cleaned, and an account of every pair that was left out.

Text is NFC-normalised and its white space collapsed. Exact duplicates leave the training split,
and so do training pairs that also stand in valid or test: a score is not to be had by heart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CorpusError
from headrace.text_table import text_table
from headrace.translation.corpus.sources import (
    OnProgress,
    Pair,
    Sides,
    Source,
    find_sources,
    records,
)

# Without a valid split this share of train is held out, up to so many pairs.
HELD_OUT_SHARE = 0.02
HELD_OUT_MOST = 1000
_REPORT_EVERY = 100_000


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """What became of the pairs of one split; `pairs` is what is left."""

    read: int = 0
    malformed: int = 0  # skipped with skip_bad; without it, the first one is an error
    empty: int = 0  # a side without text
    duplicates: int = 0  # train: the same pair once more
    overlap: int = 0  # train: the pair also stands in valid or test
    held_out: int = 0  # taken from train to make a valid split of
    too_long: int = 0  # in tokens; known once the text is encoded
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Pairs (src, trg) by split: `train`, `valid` and, where there is one, `test`."""

    splits: dict[str, list[Pair]]
    counts: dict[str, SplitCounts]

    def table(self) -> str:
        """The counts, as text."""
        return counts_table(self.counts)


def counts_table(counts: Mapping[str, SplitCounts]) -> str:
    """A row a split. A column that is 0 everywhere is left out."""
    names = [
        known.name
        for known in dataclasses.fields(SplitCounts)
        if known.name in ("read", "pairs") or any(getattr(c, known.name) for c in counts.values())
    ]
    rows = [(split, *[getattr(count, n) for n in names]) for split, count in counts.items()]
    return text_table(("split", *[name.replace("_", " ") for name in names]), rows)


def read_corpus(
    data: Path | Sequence[Path],
    *,
    src: str,
    trg: str,
    skip_bad: bool = False,
    progress: OnProgress | None = None,
) -> Corpus:
    """Read a file, a pair of files, or a folder of them; `sources.py` knows the formats."""
    sides = Sides(src, trg)
    return read_sources(find_sources(data, sides), sides, skip_bad=skip_bad, progress=progress)


def read_pairs(
    data: Path | Sequence[Path], *, src: str, trg: str, split: str, skip_bad: bool = False
) -> list[Pair]:
    """All pairs of a file as they stand there, or of a folder's `split`: to be scored."""
    sides = Sides(src, trg)
    sources = find_sources(data, sides)
    found = sources.get(split)
    if found is None:
        if len(sources) > 1:
            there = ", ".join(sources)
            raise CorpusError(f"no {split!r} in {data}; there is {there}")
        (found,) = sources.values()
    return _read_split(split, found, sides, skip_bad, None)[0]


def read_sources(
    sources: Mapping[str, Sequence[Source]],
    sides: Sides,
    *,
    skip_bad: bool = False,
    progress: OnProgress | None = None,
) -> Corpus:
    """Read what `find_sources` found, clean it, and see to it that the splits do not overlap."""
    splits: dict[str, list[Pair]] = {}
    counts: dict[str, SplitCounts] = {}
    for split, parts in sources.items():
        splits[split], counts[split] = _read_split(split, parts, sides, skip_bad, progress)
        if split != "train" and not splits[split]:
            raise CorpusError(f"{_list(parts)}: {_nothing_left(counts[split])}")
    return split_corpus(splits, counts, where=_list(sources["train"]))


def split_corpus(
    splits: dict[str, list[Pair]], counts: dict[str, SplitCounts], *, where: str
) -> Corpus:
    """Take duplicates and overlap out of train, and hold out a valid split if there is none."""
    unique = dict.fromkeys(splits["train"])
    elsewhere = {pair for split in ("valid", "test") for pair in splits.get(split, ())}
    train = [pair for pair in unique if pair not in elsewhere]
    duplicates = len(splits["train"]) - len(unique)
    overlap = len(unique) - len(train)
    held: list[Pair] = []
    if "valid" not in splits:
        held = _held_out(train)
        gone = set(held)
        train = [pair for pair in train if pair not in gone]
        splits = {**splits, "valid": held}
        counts = {**counts, "valid": SplitCounts(held_out=len(held))}
    counts["train"] = dataclasses.replace(
        counts["train"], duplicates=duplicates, overlap=overlap, held_out=len(held)
    )
    if not train or not splits["valid"]:
        raise CorpusError(f"{where}: {_nothing_left(counts['train'])}")
    splits = {**splits, "train": train}
    return Corpus(
        {split: splits[split] for split in ("train", "valid", "test") if split in splits},
        {
            split: dataclasses.replace(counts[split], pairs=len(splits[split]))
            for split in ("train", "valid", "test")
            if split in splits
        },
    )


def clean(text: str) -> str:
    """NFC, and single spaces; every kind of line end is white space, so a text is one line."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _read_split(
    split: str,
    parts: Sequence[Source],
    sides: Sides,
    skip_bad: bool,
    progress: OnProgress | None,
) -> tuple[list[Pair], SplitCounts]:
    pairs: list[Pair] = []
    read = malformed = empty = 0

    def bad(message: str) -> None:
        if not skip_bad:
            raise CorpusError(message)

    for part in parts:
        before = read
        for record in records(part, sides, bad):
            read += 1
            if progress is not None and read % _REPORT_EVERY == 0:
                progress(f"read {split}", read, 0)
            if record is None:
                malformed += 1
                continue
            pair = clean(record[0]), clean(record[1])
            if pair[0] and pair[1]:
                pairs.append(pair)
            else:
                empty += 1
        if read == before:
            raise CorpusError(f"{part}: is empty; expected pairs of {sides}")
    if progress is not None:
        progress(f"read {split}", read, read)
    return pairs, SplitCounts(read=read, malformed=malformed, empty=empty)


def _held_out(train: list[Pair]) -> list[Pair]:
    """A share of train, chosen by what the pairs say and not by where they stand."""
    if len(train) < 2:
        return []
    share = min(HELD_OUT_MOST, max(1, round(len(train) * HELD_OUT_SHARE)))
    return heapq.nsmallest(share, train, key=_digest)


def _digest(pair: Pair) -> bytes:
    return hashlib.blake2b("\n".join(pair).encode(), digest_size=16).digest()


def _nothing_left(counts: SplitCounts) -> str:
    gone = {
        known.name.replace("_", " "): getattr(counts, known.name)
        for known in dataclasses.fields(counts)
        if known.name not in ("read", "pairs", "held_out") and getattr(counts, known.name)
    }
    why = f" ({', '.join(f'{number:,} {name}' for name, number in gone.items())})" if gone else ""
    left = counts.read - sum(gone.values())
    return (
        f"leaves {left} of {counts.read:,} pairs to use{why}; expected at least 2 to train on, "
        "and 1 in every other split"
    )


def _list(parts: Sequence[Source]) -> str:
    return ", ".join(str(part) for part in parts)
