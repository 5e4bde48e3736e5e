"""Encodes a corpus into arrays of ids, and keeps the result in a cache.

The cache key is a hash of the files' bytes, of all settings and of the format's version. File names
and dates do not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.atomic_files import build_folder, user_cache
from headrace.errors import CorpusError
from headrace.schema import require_regular_file
from headrace.translation.corpus.corpus import Corpus, read_pair_files
from headrace.translation.corpus.corpus_report import corpus_warnings
from headrace.translation.corpus.encoding import write_ids
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import OnProgress, Pair, PairFiles, find_pair_files
from headrace.translation.corpus.pair_formats import recognize
from headrace.translation.corpus.prepared import (
    FORMAT,
    FORMAT_VERSION,
    META_FILE,
    SCORED_SPLITS,
    Prepared,
    PreparedRecord,
    PreparedSettings,
    load_prepared,
    read_record,
)
from headrace.translation.corpus.toy.generator import GRAMMAR_VERSION, builtin_corpus, builtin_sides
from headrace.translation.corpus.vocabulary import MAX_PIECE_LENGTH, Vocabulary
from headrace.translation.settings import TrainSettings

log = logging.getLogger("headrace")
_HASH_BYTES = 1 << 22
# With a larger vocabulary whole phrases of this small language become one token each.
BUILTIN_VOCABULARY = 1000


def check_data(settings: TrainSettings) -> None:
    """Raise if files of a run's corpus are missing or have no known format. Only the beginning of
    each is read."""
    sides = Sides(settings.src, settings.trg)
    if settings.data:
        for groups in find_pair_files(list(map(Path, settings.data)), sides).values():
            for group in groups:
                recognize(group, sides)
    else:
        builtin_sides(settings.src, settings.trg)


def prepared_for(
    settings: TrainSettings,
    cache: Path | None = None,
    progress: OnProgress | None = None,
    *,
    vocabularies: tuple[Vocabulary, Vocabulary] | None = None,
    cached_only: bool = False,
) -> Prepared:
    """The encoded corpus of a run, from the cache if it was prepared before. With `cached_only`
    it is an error if it was not.

    Pairs with more than `max_length` tokens on one side are not encoded; in valid and test their
    text is still kept for scoring. `vocabularies` are those of a run that starts from weights:
    others would not fit them. Without them, they are trained on the corpus.
    """
    sides = Sides(settings.src, settings.trg)
    files = find_pair_files(list(map(Path, settings.data)), sides) if settings.data else None
    size = settings.vocabulary if files else min(settings.vocabulary, BUILTIN_VOCABULARY)
    given = PreparedSettings(
        src=settings.src,
        trg=settings.trg,
        vocabulary_size=size,
        joint=settings.joint,
        max_length=settings.max_length,
        skip_bad=settings.skip_bad,
        builtin=GRAMMAR_VERSION if files is None else None,
    )
    cache = user_cache() / "text" if cache is None else Path(cache)
    key = _key(files, given, vocabularies, progress)
    folder = cache / f"{given.src}-{given.trg}-{key[:16]}"

    def build(temporary: Path) -> None:
        if files is None:
            corpus = builtin_corpus(src=given.src, trg=given.trg)
        else:
            corpus = read_pair_files(files, sides, skip_bad=given.skip_bad, progress=progress)
        used = vocabularies or _train_vocabularies(corpus.splits["train"], given, progress)
        _encode_into(temporary, corpus, given, used, key, progress)

    if not _is_usable(folder, key):
        if cached_only:
            raise CorpusError(f"{cache}: has no prepared corpus of these files and settings")
        try:
            build_folder(folder, build, usable=lambda there: _is_usable(there, key))
        except OSError as problem:
            # numpy's own error has no number; it only says that fewer items were written.
            reason = problem.strerror or f"{problem}; the disk may be full"
            raise CorpusError(f"{folder}: cannot be written ({reason})") from problem
    prepared = load_prepared(folder)
    for warning in () if cached_only else corpus_warnings(prepared.counts):
        log.warning("%s", warning)
    return prepared


def _encode_into(
    folder: Path,
    corpus: Corpus,
    settings: PreparedSettings,
    vocabularies: tuple[Vocabulary, Vocabulary],
    key: str,
    progress: OnProgress | None,
) -> None:
    """Encode all splits, and write them and the vocabularies into `folder`."""
    names = ("joint",) if settings.joint else ("src", "trg")
    for name, vocabulary in zip(names, vocabularies, strict=False):
        vocabulary.save(folder / f"{name}.model")
    counts = {}
    for split, pairs in corpus.splits.items():
        too_long = write_ids(
            folder,
            split,
            pairs,
            vocabularies,
            max_length=settings.max_length,
            progress=progress,
        )
        counts[split] = dataclasses.replace(
            corpus.counts[split], too_long=too_long, pairs=len(pairs) - too_long
        )
        if too_long == len(pairs) and split != "test":
            raise CorpusError(
                f"max_length = {settings.max_length}: all {len(pairs):,} pairs of {split} are "
                "longer, in tokens; expected at least one that is not"
            )
        if split in SCORED_SPLITS:
            for side, name in enumerate(("src", "trg")):
                text = "".join(f"{pair[side]}\n" for pair in pairs)
                (folder / f"{split}.{name}.txt").write_bytes(text.encode("utf-8"))
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record = PreparedRecord(FORMAT, FORMAT_VERSION, key, settings, counts, files)
    text = json.dumps(dataclasses.asdict(record), indent=1, ensure_ascii=False)
    (folder / META_FILE).write_text(text, encoding="utf-8")


def _train_vocabularies(
    train: list[Pair], settings: PreparedSettings, progress: OnProgress | None
) -> tuple[Vocabulary, Vocabulary]:
    size = settings.vocabulary_size
    # Pairs that are surely too long are left out: they will not be trained on.
    longest = MAX_PIECE_LENGTH * settings.max_length
    fitting = [pair for pair in train if len(pair[0]) <= longest and len(pair[1]) <= longest]
    pairs = fitting or train
    steps = 1 if settings.joint else 2
    if progress is not None:
        progress("vocabulary", 0, steps)
    if settings.joint:
        both = Vocabulary.train([text for pair in pairs for text in pair], size)
        vocabularies = both, both
    else:
        src = Vocabulary.train([pair[0] for pair in pairs], size)
        if progress is not None:
            progress("vocabulary", 1, steps)
        vocabularies = src, Vocabulary.train([pair[1] for pair in pairs], size)
    if progress is not None:
        progress("vocabulary", steps, steps)
    return vocabularies


def _key(
    files: Mapping[str, Sequence[PairFiles]] | None,
    settings: PreparedSettings,
    vocabularies: tuple[Vocabulary, Vocabulary] | None,
    progress: OnProgress | None,
) -> str:
    """The cache key: a hash of all that the prepared folder depends on."""
    import sentencepiece

    parts: list[Any] = [FORMAT, FORMAT_VERSION, sentencepiece.__version__]
    parts.append(dataclasses.asdict(settings))
    if vocabularies is not None:
        parts.append([hashlib.sha256(one.model).hexdigest() for one in vocabularies])
    for split, groups in (files or {}).items():
        for group in groups:
            hashes = [_file_hash(path, progress) for path in group.paths]
            parts.append([split, group.format, *hashes])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path, progress: OnProgress | None) -> str:
    total_mb = require_regular_file(path, CorpusError) >> 20
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while part := file.read(_HASH_BYTES):
                digest.update(part)
                done += len(part)
                if progress is not None and total_mb > 100:
                    progress(f"hash {path.name} (MB)", done >> 20, total_mb)
    except OSError as problem:
        raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem
    return digest.hexdigest()


def _is_usable(folder: Path, key: str) -> bool:
    try:
        return read_record(folder).key == key and bool(load_prepared(folder))
    except CorpusError:
        return False
