"""From text to arrays of ids, once: what is prepared is kept under a key of its contents.

The key is a hash of the files' bytes, every setting and the format's version: other text or other
settings are another folder, and the same text under another name is the same one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.atomic_files import build_folder
from headrace.errors import CorpusError
from headrace.translation.corpus.corpus import Corpus, read_sources
from headrace.translation.corpus.encoded import write_ids
from headrace.translation.corpus.prepared import (
    FORMAT,
    FORMAT_VERSION,
    META_FILE,
    SCORED,
    Prepared,
    load_prepared,
    read_meta,
)
from headrace.translation.corpus.sources import OnProgress, Pair, Sides, Source, find_sources
from headrace.translation.corpus.toy.generator import (
    GRAMMAR_VERSION,
    builtin_corpus,
    builtin_sides,
)
from headrace.translation.corpus.vocabulary import LEAST_SIZE, Vocabulary
from headrace.translation.settings import TrainSettings
from headrace.user_cache import user_cache

# With more pieces whole phrases of so small a language become pieces, and nothing is learned.
BUILTIN_VOCABULARY = 1000


def check_data(settings: TrainSettings) -> None:
    """Raise unless the files of a run's corpus are there. They are not read."""
    sides = Sides(settings.src, settings.trg)
    if settings.data:
        find_sources(_paths(settings), sides)
    else:
        builtin_sides(settings.src, settings.trg)


def prepared_for(
    settings: TrainSettings, cache: Path | None = None, progress: OnProgress | None = None
) -> Prepared:
    """The corpus of a run's settings, encoded; made now if it is not in the cache."""
    return prepare(
        _paths(settings) if settings.data else None,
        src=settings.src,
        trg=settings.trg,
        vocabulary_size=settings.vocabulary,
        joint=settings.joint,
        max_length=settings.max_length,
        skip_bad=settings.skip_bad,
        cache=cache if cache is not None else user_cache() / "text",
        progress=progress,
    )


def _paths(settings: TrainSettings) -> Path | list[Path]:
    paths = [Path(path) for path in settings.data]
    return paths[0] if len(paths) == 1 else paths


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
    progress: OnProgress | None = None,
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


def _build(
    folder: Path,
    corpus: Corpus,
    settings: Mapping[str, Any],
    key: str,
    workers: int | None,
    progress: OnProgress | None,
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
        if split in SCORED:
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
    (folder / META_FILE).write_text(text, encoding="utf-8")


def _train_vocabularies(
    train: list[Pair], settings: Mapping[str, Any], progress: OnProgress | None
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


def _usable(folder: Path, key: str) -> bool:
    try:
        return read_meta(folder)["key"] == key and bool(load_prepared(folder))
    except CorpusError:
        return False
