"""Opens a prepared corpus: encoded splits, vocabularies, and the text to score against."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.errors import CorpusError
from headrace.schema import Invalid, read_json
from headrace.text_table import text_table
from headrace.translation.corpus.corpus_report import SplitCounts, counts_table, describe_novelty
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.encoding import encode_pairs
from headrace.translation.corpus.pair_files import Pair
from headrace.translation.corpus.vocabulary import Vocabulary

FORMAT = "headrace prepared text"
FORMAT_VERSION = 2
META_FILE = "prepared.json"
#: Splits that are scored, so their text is stored beside their ids.
SCORED_SPLITS = ("valid", "test")


@dataclass(frozen=True, slots=True)
class PreparedSettings:
    """What a corpus was prepared with. `builtin` is the version of the built-in corpus, if it is
    that one."""

    src: str
    trg: str
    vocabulary_size: int
    joint: bool
    max_length: int
    skip_bad: bool
    builtin: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedRecord:
    """`prepared.json`: the cache key, settings, counts, and the size of each file in the folder."""

    format: str
    version: int
    key: str
    settings: PreparedSettings
    counts: dict[str, SplitCounts]
    files: dict[str, int]

    def invalid(self) -> Invalid | None:
        if {"train", "valid"} <= self.counts.keys():
            return None
        return Invalid("counts", list(self.counts), "train and valid among its splits")


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
    settings: PreparedSettings

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

    @cached_property
    def digests(self) -> dict[str, str]:
        """Identifies the pairs of train, and of valid with their text: what a run is trained and
        validated on."""
        text = "\n".join(text for pair in self.texts("valid") for text in pair)
        of_text = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        valid = f"{self.splits['valid'].digest()}-{of_text}"
        return {"train": self.splits["train"].digest(), "valid": valid}

    def describe_novelty(self, split: str) -> str:
        """What "never seen in training" means for a scored split, in one sentence."""
        return describe_novelty(split, self.counts)

    def describe_scored(self, split: str) -> str:
        """`describe_novelty`, and whether the split had a part in the choice of the weights."""
        chosen = "; the best weights were chosen on it" if split == "valid" else ""
        return f"{self.describe_novelty(split)}{chosen}"

    def count_shared(self, pairs: Sequence[Pair]) -> int:
        """How many of these pairs have a source or a target sentence that train has, too."""
        both = encode_pairs(pairs, self.vocabularies)
        in_train = [self.splits["train"].contain(side, both[side]) for side in (0, 1)]
        return sum(src or trg for src, trg in zip(*in_train, strict=True))

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
                f" vocabulary: {pieces}; {self.settings.src} to {self.settings.trg}",
            )
        )


def load_prepared(folder: Path) -> Prepared:
    """Open a folder that `prepare` made. Raises if a file is missing or has another size."""
    folder = Path(folder)
    record = read_record(folder)
    for name, size in record.files.items():
        if name != Path(name).name:
            raise CorpusError(
                f"{folder / META_FILE}: names {name!r}; expected a file in its folder"
            )
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            there = "does not exist" if found is None else f"has {found:,} bytes"
            raise CorpusError(f"{path}: {there}; expected {size:,} bytes. Prepare it again")
    if record.settings.joint:
        both = Vocabulary.load(folder / "joint.model")
        vocabularies = both, both
    else:
        vocabularies = (
            Vocabulary.load(folder / "src.model"),
            Vocabulary.load(folder / "trg.model"),
        )
    splits = {split: IdPairs(folder, split) for split in record.counts}
    for ids in splits.values():
        ids.check_ids(len(vocabularies[0]), len(vocabularies[1]))
    return Prepared(folder, splits, vocabularies, record.counts, record.settings)


def read_record(folder: Path) -> PreparedRecord:
    """Read `prepared.json`."""
    path = folder / META_FILE
    if not path.exists():
        raise CorpusError(f"{path}: does not exist; expected a folder made by prepare()")
    fields = read_json(path, CorpusError)
    if fields.values.get("format") != FORMAT:
        raise CorpusError(f"{path}: is not Headrace's; expected a folder made by prepare()")
    if fields.values.get("version") != FORMAT_VERSION:
        raise CorpusError(
            f"{path}: has version {fields.values.get('version')}; expected {FORMAT_VERSION}. "
            "Prepare it again"
        )
    return fields.record(PreparedRecord)


def _longest(ids: IdPairs) -> tuple[int, int]:
    if not len(ids):
        return 0, 0
    src, trg = ids.lengths.max(axis=0)
    return int(src), int(trg)
