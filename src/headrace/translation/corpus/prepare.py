"""From text to arrays of ids, once: what is prepared is kept under a key of its contents.

The key is a hash of the files' bytes, every setting and the format's version: other text or other
settings are another folder, and the same text under another name is the same one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.text_table import text_table
from headrace.translation.corpus.atomic_folder import build_folder
from headrace.translation.corpus.corpus import (
    Corpus,
    Pair,
    Progress,
    SplitCounts,
    counts_table,
    read_sources,
)
from headrace.translation.corpus.encoded import IdPairs, write_ids
from headrace.translation.corpus.sources import Sides, Source, find_sources
from headrace.translation.corpus.toy.generator import GRAMMAR_VERSION, builtin_corpus
from headrace.translation.corpus.vocabulary import LEAST_SIZE, Vocabulary

FORMAT = "headrace prepared text"
FORMAT_VERSION = 1
# With more pieces whole phrases of so small a language become pieces, and nothing is learned.
BUILTIN_VOCABULARY = 1000
_META = "prepared.json"
_SCORED = ("valid", "test")


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, open: the encoded splits, the vocabularies (src, trg; one object if they
    are joint), the settings it was made with, and what became of every pair."""

    folder: Path
    splits: dict[str, IdPairs]
    vocabularies: tuple[Vocabulary, Vocabulary]
    counts: dict[str, SplitCounts]
    settings: dict[str, Any]

    @property
    def joint(self) -> bool:
        return self.vocabularies[0] is self.vocabularies[1]

    def texts(self, split: str) -> list[Pair]:
        """The text of `valid` or `test`, pairs that are too long to train on included."""
        if split not in _SCORED or split not in self.splits:
            there = " and ".join(repr(name) for name in _SCORED if name in self.splits)
            raise CorpusError(f"no text of {split!r} is kept in {self.folder}; there is {there}")
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

    def table(self) -> str:
        """What was prepared, as text."""
        rows = [
            (split, len(ids), *ids.tokens, *_longest(ids)) for split, ids in self.splits.items()
        ]
        columns = ("split", "pairs", "src tokens", "trg tokens", "longest src", "longest trg")
        src, trg = (f"{len(vocabulary):,}" for vocabulary in self.vocabularies)
        pieces = f"{src}, joint" if self.joint else f"{src} src, {trg} trg"
        return "\n".join(
            (
                counts_table(self.counts),
                text_table(columns, rows),
                f" vocabulary: {pieces}; {self.settings['src']} to {self.settings['trg']}",
            )
        )


def prepare(
    data: Path | Sequence[Path] | None,
    *,
    src: str = "zh",
    trg: str = "en",
    vocabulary_size: int = 8000,
    joint: bool = False,
    max_length: int = 60,
    skip_bad: bool = False,
    cache: Path,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """The ids of `data` (None: the built-in corpus), from the cache if they were made before.

    Training pairs with a side of more than `max_length` tokens are left out; those of valid and
    test are not encoded, but their text is kept to be scored. `workers` is a number of threads.
    """
    sides = Sides(src, trg)
    for name, value, least in (
        ("vocabulary_size", vocabulary_size, LEAST_SIZE),
        ("max_length", max_length, 4),
        ("workers", 1 if workers is None else workers, 1),
    ):
        if value < least:
            raise CorpusError(f"{name} = {value}: expected at least {least}")
    sources = None if data is None else find_sources(data, sides)
    if sources is None:
        vocabulary_size = min(vocabulary_size, BUILTIN_VOCABULARY)
    settings: dict[str, Any] = {
        "src": src,
        "trg": trg,
        "vocabulary_size": vocabulary_size,
        "joint": joint,
        "max_length": max_length,
        "skip_bad": skip_bad,
        "builtin": GRAMMAR_VERSION if sources is None else None,
    }
    key = _key(sources, settings)
    folder = Path(cache) / f"{src}-{trg}-{key[:16]}"

    def build(temporary: Path) -> None:
        if sources is None:
            corpus = builtin_corpus(src=src, trg=trg)
        else:
            corpus = read_sources(sources, sides, skip_bad=skip_bad, progress=progress)
        _build(temporary, corpus, settings, key, workers, progress)

    if not _usable(folder, key):
        try:
            build_folder(folder, build, usable=lambda there: _usable(there, key))
        except OSError as problem:
            raise CorpusError(
                f"{folder}: cannot be written ({problem.strerror or problem})"
            ) from problem
    return load_prepared(folder)


def load_prepared(folder: Path) -> Prepared:
    """Open a folder that `prepare` made. Every file must be there, in its full size."""
    folder = Path(folder)
    meta = _read_meta(folder)
    try:
        return _opened(folder, meta)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as problem:
        if isinstance(problem, CorpusError):
            raise
        raise CorpusError(f"{folder / _META}: is damaged ({problem!r}); prepare it again") from None


def _opened(folder: Path, meta: Mapping[str, Any]) -> Prepared:
    for name, size in meta["files"].items():
        if name != Path(name).name:
            raise CorpusError(f"{folder / _META}: names {name!r}; expected files of its folder")
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            there = "is not there" if found is None else f"has {found:,} bytes"
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
        ids.require_ids_below(len(vocabularies[0]), len(vocabularies[1]))
    return Prepared(folder, splits, vocabularies, counts, settings)


def _build(
    folder: Path,
    corpus: Corpus,
    settings: Mapping[str, Any],
    key: str,
    workers: int | None,
    progress: Progress | None,
) -> None:
    vocabularies = _train_vocabularies(corpus.splits["train"], settings, progress)
    names = ("joint",) if settings["joint"] else ("src", "trg")
    for name, vocabulary in zip(names, vocabularies, strict=False):
        vocabulary.save(folder / f"{name}.model")
    counts = {}
    for split, pairs in corpus.splits.items():
        too_long = write_ids(
            folder,
            split,
            pairs,
            vocabularies,
            max_length=settings["max_length"],
            workers=workers,
            progress=progress,
        )
        counts[split] = dataclasses.replace(
            corpus.counts[split], too_long=too_long, pairs=len(pairs) - too_long
        )
        if too_long == len(pairs) and split != "test":
            raise CorpusError(
                f"max_length = {settings['max_length']}: leaves none of {len(pairs):,} pairs of "
                f"{split}; expected some to be no longer, in tokens"
            )
        if split in _SCORED:
            for side, name in enumerate(("src", "trg")):
                text = "".join(f"{pair[side]}\n" for pair in pairs)
                (folder / f"{split}.{name}.txt").write_bytes(text.encode("utf-8"))
    meta = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "key": key,
        "settings": dict(settings),
        "counts": {split: dataclasses.asdict(count) for split, count in counts.items()},
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    text = json.dumps(meta, indent=1, ensure_ascii=False)
    (folder / _META).write_text(text, encoding="utf-8")


def _train_vocabularies(
    train: list[Pair], settings: Mapping[str, Any], progress: Progress | None
) -> tuple[Vocabulary, Vocabulary]:
    size = settings["vocabulary_size"]
    steps = 1 if settings["joint"] else 2
    if progress is not None:
        progress("vocabulary", 0, steps)
    if settings["joint"]:
        both = Vocabulary.train([text for pair in train for text in pair], size)
        vocabularies = both, both
    else:
        src = Vocabulary.train([pair[0] for pair in train], size)
        if progress is not None:
            progress("vocabulary", 1, steps)
        vocabularies = src, Vocabulary.train([pair[1] for pair in train], size)
    if progress is not None:
        progress("vocabulary", steps, steps)
    return vocabularies


def _key(sources: Mapping[str, Sequence[Source]] | None, settings: Mapping[str, Any]) -> str:
    """What the prepared folder depends on. Names and dates of files are no part of it."""
    import sentencepiece

    parts: list[Any] = [FORMAT, FORMAT_VERSION, sentencepiece.__version__, dict(settings)]
    for split, found in (sources or {}).items():
        for source in found:
            parts.append([split, source.format, *(_file_hash(path) for path in source.files)])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / _META
    try:
        meta = json.loads(path.read_bytes())
    except OSError as problem:
        raise CorpusError(
            f"{path}: cannot be read ({problem.strerror}); expected a folder made by prepare()"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise CorpusError(f"{path}: is not JSON ({problem}); prepare it again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CorpusError(f"{path}: is not of Headrace; expected a folder made by prepare()")
    if meta.get("version") != FORMAT_VERSION:
        raise CorpusError(
            f"{path}: is of version {meta.get('version')}; expected {FORMAT_VERSION}. "
            "Prepare it again"
        )
    settings = meta.get("settings")
    whole = isinstance(settings, dict) and {"src", "trg", "joint"} <= set(settings)
    if not whole or not {"key", "counts", "files"} <= set(meta):
        raise CorpusError(f"{path}: is damaged; prepare it again")
    return meta


def _usable(folder: Path, key: str) -> bool:
    try:
        return _read_meta(folder)["key"] == key and bool(load_prepared(folder))
    except CorpusError:
        return False


def _longest(ids: IdPairs) -> tuple[int, int]:
    if not len(ids):
        return 0, 0
    src, trg = ids.lengths.max(axis=0)
    return int(src), int(trg)
