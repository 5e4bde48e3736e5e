"""Cleans parallel text, divides it into splits, and counts every pair that is left out.

Text is NFC-normalized, with single spaces. Duplicates are removed from the train split, and so are
pairs that are also in valid or test: a model must not learn by heart what it is scored on. A valid
split that is held out shares no sentence with train. Splits that were given may: those pairs are
kept, counted and warned about, since the splits are the user's.
"""

from __future__ import annotations

import dataclasses
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CorpusError, usage_errors
from headrace.translation.corpus.corpus_report import SplitCounts, counts_table
from headrace.translation.corpus.held_out import choose_held_out, count_shared
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import OnProgress, Pair, PairFiles, find_pair_files
from headrace.translation.corpus.pair_formats import recognize

log = logging.getLogger("headrace")
_REPORT_EVERY = 5_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Pairs by split: `train`, `valid` and, if the data has one, `test`."""

    splits: dict[str, list[Pair]]
    counts: dict[str, SplitCounts]

    def table(self) -> str:
        """The counts as a text table."""
        return counts_table(self.counts)


def read_corpus(
    data: Path | Sequence[Path],
    *,
    src: str,
    trg: str,
    skip_bad: bool = False,
    progress: OnProgress | None = None,
) -> Corpus:
    """Read a corpus from a file, two text files, or a folder (formats: `pair_formats.py`)."""
    sides = Sides(src, trg)
    files = find_pair_files(data, sides)
    return read_pair_files(files, sides, skip_bad=skip_bad, progress=progress)


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs to score. `name` is their split or, if the files have no splits, their files' names.
    `counts` has what was left out."""

    name: str
    pairs: list[Pair]
    counts: SplitCounts


def read_scored_pairs(
    data: Path | Sequence[Path],
    *,
    src: str,
    trg: str,
    split: str | None = None,
    skip_bad: bool = False,
) -> ScoredPairs:
    """Read all pairs of a file, or of one split of a folder, for scoring: nothing is left out but
    empty pairs. Without `split`: test, or valid if there is no test, or the only one there is."""
    sides = Sides(src, trg)
    splits = find_pair_files(data, sides, require_train=False)
    name = split or next((one for one in ("test", "valid") if one in splits), None)
    found = None if name is None else splits.get(name)
    if found is None:
        if split is not None or len(splits) > 1:
            with usage_errors():
                raise CorpusError(_without_split(data, split or "test", splits))
        (found,) = splits.values()
        name = " and ".join(path.name for files in found for path in files.paths)
    assert name is not None
    pairs, counts = _read_split(name, found, sides, skip_bad, None)
    if not pairs:
        raise CorpusError(f"{_joined(found)}: has no pair to score{_dropped(counts)}")
    return ScoredPairs(name, pairs, counts)


def _without_split(
    data: Path | Sequence[Path], split: str, splits: Mapping[str, Sequence[PairFiles]]
) -> str:
    paths = [data] if isinstance(data, Path) else data
    parts = [files for group in splits.values() for files in group]
    if len(parts) == 1 and not any(path.is_dir() for path in paths):
        return (
            f"split {split}: {parts[0]} has no splits; leave the split out, or give a folder with "
            "a file for each"
        )
    named = ", ".join(map(str, paths))
    return f"{named}: has no split {split!r}; found {', '.join(splits)}"


def read_pair_files(
    files: Mapping[str, Sequence[PairFiles]],
    sides: Sides,
    *,
    skip_bad: bool = False,
    progress: OnProgress | None = None,
) -> Corpus:
    """Read and clean the files that `find_pair_files` found, and make the splits disjoint."""
    splits: dict[str, list[Pair]] = {}
    counts: dict[str, SplitCounts] = {}
    for split, parts in files.items():
        splits[split], counts[split] = _read_split(split, parts, sides, skip_bad, progress)
        if split != "train" and not splits[split]:
            raise CorpusError(f"{_joined(parts)}: {_explain_empty(counts[split])}")
    return split_corpus(splits, counts, where=_joined(files["train"]))


def split_corpus(
    splits: dict[str, list[Pair]], counts: dict[str, SplitCounts], *, where: str
) -> Corpus:
    """Remove duplicates and overlap from train, and hold out a valid split if there is none."""
    unique = dict.fromkeys(splits["train"])
    given = {split: pairs for split, pairs in splits.items() if split != "train"}
    elsewhere = {pair for pairs in given.values() for pair in pairs}
    train = [pair for pair in unique if pair not in elsewhere]
    duplicates = len(splits["train"]) - len(unique)
    overlap = len(unique) - len(train)
    held: list[Pair] = []
    if "valid" not in splits:
        held, relatives = choose_held_out(train)
        if len(train) > 1 and not held:
            raise CorpusError(
                f"{where}: almost all of its {len(train):,} pairs share sentences with each other, "
                "so no valid split can be held out; expected a valid split of your own"
            )
        gone = relatives.union(held)
        train = [pair for pair in train if pair not in gone]
        overlap += len(relatives)
        splits = {**splits, "valid": held}
        counts = {**counts, "valid": SplitCounts(held_out=len(held))}
    counts["train"] = dataclasses.replace(
        counts["train"], duplicates=duplicates, overlap=overlap, held_out=len(held)
    )
    if not train or not splits["valid"]:
        raise CorpusError(f"{where}: {_explain_empty(counts['train'])}")
    splits = {**splits, "train": train}
    in_train, shared = count_shared(train, given)
    shared["train"] = in_train
    ordered = [split for split in ("train", "valid", "test") if split in splits]
    return Corpus(
        {split: splits[split] for split in ordered},
        {
            split: dataclasses.replace(
                counts[split],
                identical=sum(src == trg for src, trg in splits[split]),
                shared=shared.get(split, 0),  # a valid split that was held out shares nothing
                pairs=len(splits[split]),
            )
            for split in ordered
        },
    )


def clean(text: str) -> str:
    """Normalize to NFC, on one line, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _read_split(
    split: str,
    parts: Sequence[PairFiles],
    sides: Sides,
    skip_bad: bool,
    progress: OnProgress | None,
) -> tuple[list[Pair], SplitCounts]:
    pairs: list[Pair] = []
    read = malformed = empty = 0

    def on_malformed(message: str) -> None:
        if not skip_bad:
            raise CorpusError(message)

    for part in parts:
        before = read
        recognized = recognize(part, sides)
        log.info("%s", recognized)
        for record in recognized.read(on_malformed):
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


_REASONS = ("malformed", "empty", "duplicates", "overlap", "too_long")


def _explain_empty(counts: SplitCounts) -> str:
    left = counts.read - sum(getattr(counts, name) for name in _REASONS)
    return (
        f"leaves {left} of {counts.read:,} pairs to use{_dropped(counts)}; expected at least 1 in "
        "each split, and 2 in train if there is no valid split"
    )


def _dropped(counts: SplitCounts) -> str:
    """What was left out, in brackets: " (3 malformed, 1 empty)"."""
    dropped = [
        f"{getattr(counts, name):,} {name.replace('_', ' ')}"
        for name in _REASONS
        if getattr(counts, name)
    ]
    return f" ({', '.join(dropped)})" if dropped else ""


def _joined(parts: Sequence[PairFiles]) -> str:
    return ", ".join(str(part) for part in parts)
