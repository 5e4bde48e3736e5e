"""Opens a prepared corpus: encoded splits, vocabularies, and the text to score against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.text_table import text_table
from headrace.translation.corpus.corpus import SplitCounts, counts_table, describe_novelty
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.pair_files import Pair
from headrace.translation.corpus.vocabulary import Vocabulary

FORMAT = "headrace prepared text"
FORMAT_VERSION = 2
META_FILE = "prepared.json"
#: Splits that are scored, so their text is stored beside their ids.
SCORED_SPLITS = ("valid", "test")


@dataclass(frozen=True)
class Prepared:
    """An open prepared folder.

    `vocabularies` are (src, trg), and one object if they are joint. `settings` are those it was
    prepared with.
    """

    folder: Path
    splits: dict[str, IdPairs]
    vocabularies: tuple[Vocabulary, Vocabulary]
    counts: dict[str, SplitCounts]
    settings: dict[str, Any]

    @property
    def joint(self) -> bool:
        return self.vocabularies[0] is self.vocabularies[1]

    def texts(self, split: str) -> list[Pair]:
        """The text of `valid` or `test`, including pairs that are too long to encode."""
        if split not in SCORED_SPLITS or split not in self.splits:
            there = " and ".join(repr(name) for name in SCORED_SPLITS if name in self.splits)
            raise CorpusError(f"{self.folder}: has no text of {split!r}; found {there}")
        sides = []
        for side in ("src", "trg"):
            path = self.folder / f"{split}.{side}.txt"
            try:
                sides.append(path.read_bytes().decode("utf-8").split("\n")[:-1])
            except (OSError, UnicodeDecodeError) as problem:
                raise CorpusError(f"{path}: cannot be read ({problem})") from problem
        if len(sides[0]) != len(sides[1]):
            raise CorpusError(f"{self.folder}: the text of {split} has sides of different lengths")
        return list(zip(*sides, strict=True))

    def describe_novelty(self, split: str) -> str:
        """What "never seen in training" means for a scored split, in one sentence."""
        return describe_novelty(split, self.counts)

    def table(self) -> str:
        """Counts, tokens, lengths and vocabulary sizes as text tables."""
        rows = [
            (split, len(ids), *ids.tokens, *_longest(ids)) for split, ids in self.splits.items()
        ]
        columns = ("split", "pairs", "src tokens", "trg tokens", "longest src", "longest trg")
        src, trg = (f"{len(vocabulary):,}" for vocabulary in self.vocabularies)
        pieces = f"{src}, joint" if self.joint else f"{src} src, {trg} trg"
        scored = [split for split in SCORED_SPLITS if split in self.counts]
        return "\n".join(
            (
                counts_table(self.counts),
                text_table(columns, rows),
                *(f" {self.describe_novelty(split)}" for split in scored),
                f" vocabulary: {pieces}; {self.settings['src']} to {self.settings['trg']}",
            )
        )


def load_prepared(folder: Path) -> Prepared:
    """Open a folder that `prepare` made. Raises if a file is missing or has another size."""
    folder = Path(folder)
    meta = read_meta(folder)
    try:
        return _open(folder, meta)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as problem:
        if isinstance(problem, CorpusError):
            raise
        raise CorpusError(
            f"{folder / META_FILE}: is damaged ({problem!r}); prepare it again"
        ) from None


def _open(folder: Path, meta: Mapping[str, Any]) -> Prepared:
    for name, size in meta["files"].items():
        if name != Path(name).name:
            raise CorpusError(
                f"{folder / META_FILE}: names {name!r}; expected a file in its folder"
            )
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            there = "does not exist" if found is None else f"has {found:,} bytes"
            raise CorpusError(f"{path}: {there}; expected {size:,} bytes. Prepare it again")
    settings = meta["settings"]
    if settings["joint"]:
        both = Vocabulary.load(folder / "joint.model")
        vocabularies = both, both
    else:
        vocabularies = (
            Vocabulary.load(folder / "src.model"),
            Vocabulary.load(folder / "trg.model"),
        )
    counts = {split: SplitCounts(**count) for split, count in meta["counts"].items()}
    splits = {split: IdPairs(folder, split) for split in counts}
    for ids in splits.values():
        ids.check_ids(len(vocabularies[0]), len(vocabularies[1]))
    return Prepared(folder, splits, vocabularies, counts, settings)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read `prepared.json`: settings, counts, files, and the cache key."""
    path = folder / META_FILE
    try:
        meta = json.loads(path.read_bytes())
    except OSError as problem:
        raise CorpusError(
            f"{path}: cannot be read ({problem.strerror}); expected a folder made by prepare()"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise CorpusError(f"{path}: is not JSON ({problem}); prepare it again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CorpusError(f"{path}: is not Headrace's; expected a folder made by prepare()")
    if meta.get("version") != FORMAT_VERSION:
        raise CorpusError(
            f"{path}: has version {meta.get('version')}; expected {FORMAT_VERSION}. "
            "Prepare it again"
        )
    settings = meta.get("settings")
    whole = isinstance(settings, dict) and {"src", "trg", "joint"} <= set(settings)
    if not whole or not {"key", "counts", "files"} <= set(meta):
        raise CorpusError(f"{path}: is damaged; prepare it again")
    return meta


def _longest(ids: IdPairs) -> tuple[int, int]:
    if not len(ids):
        return 0, 0
    src, trg = ids.lengths.max(axis=0)
    return int(src), int(trg)
