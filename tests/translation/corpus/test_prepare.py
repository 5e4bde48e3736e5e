"""Prepared text: vocabularies, ids on disk, the cache's key, and builds that die half-way."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorpusError
from headrace.translation import EOS, Prepared, read_corpus
from headrace.translation.corpus import prepare as prepare_module
from headrace.translation.corpus.corpus import clean
from headrace.translation.corpus.corpus_report import SplitCounts
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.encoding import write_ids
from headrace.translation.corpus.prepare import prepared_for
from headrace.translation.corpus.prepared import load_prepared
from headrace.translation.corpus.toy.generator import builtin_corpus
from headrace.translation.corpus.vocabulary import BOS, Vocabulary
from headrace.translation.settings import TrainSettings

PAIRS = builtin_corpus(size=600).splits["train"]
TINY = [
    "你好。", "三本书", "再见", "我们走吧", "Guten Morgen", "Straße",
    "a", "b c", "Ça va ?", "🎉",
]  # fmt: skip


ARGUMENTS = ("vocabularies", "progress", "cached_only")


def put(folder: Path, pairs: list[tuple[str, str]] = PAIRS, *, name: str = "train.tsv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(f"{src}\t{trg}\n" for src, trg in pairs), encoding="utf-8")
    return path


def made(path: Path | None, cache: Path, **options: Any) -> Prepared:
    """With these settings, and these arguments of `prepared_for`."""
    named = {name: options.pop(name) for name in ARGUMENTS if name in options}
    data = () if path is None else (str(path),)
    return prepared_for(TrainSettings(data, **{"vocabulary": 800, **options}), cache, **named)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Read only: prepared once for the tests that look at it."""
    folder = tmp_path_factory.mktemp("built")
    return made(put(folder), folder / "cache")


# ── vocabularies ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [300, 1000, 32_000])
@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_vocabulary_of_very_little_text(count: int, size: int) -> None:
    vocabulary = Vocabulary.train(TINY[:count], size)
    assert 260 < len(vocabulary) <= size
    assert vocabulary.decode(vocabulary.encode(TINY)) == TINY


def test_rare_characters_are_spelled_in_bytes() -> None:
    text = ["".join(chr(0x4E00 + 40 * line + at) for at in range(40)) for line in range(50)]
    vocabulary = Vocabulary.train(text, 300)
    assert len(vocabulary) <= 300
    assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train([text for pair in PAIRS for text in pair], 800)


@pytest.mark.parametrize(
    "text",
    [
        "他昨天买了三本书。",
        "Größere Straßenbahnen überqueren die Fußgängerzone.",
        "ﬁ ２ Ⅷ ½ ™",
        "👩\u200d👩\u200d👧 🇩🇪 e\u0323\u0302",
        "a\x00b \x07 \u200b \ufffd \U0010ffff",
        "<s> </s> <unk> <pad> <0x41>",
        "नमस्ते مرحبا שלום",
    ],
)
def test_decoding_restores_the_text(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode([text])
    assert vocabulary.decode(ids) == [text]
    assert not {0, 1, 2, 3} & set(ids[0])


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_decoding_restores_any_clean_text(text: str) -> None:
    tiny = _tiny()
    assert tiny.decode(tiny.encode([clean(text)])) == [clean(text)]


_kept: list[Vocabulary] = []


def _tiny() -> Vocabulary:
    if not _kept:
        _kept.append(Vocabulary.train(TINY, 300))
    return _kept[0]


def test_decoding_ends_at_the_first_eos(vocabulary: Vocabulary) -> None:
    (ids,) = vocabulary.encode(["three books"])
    assert vocabulary.decode([[BOS, *ids, EOS, 0, 0, *ids], [EOS], []]) == ["three books", "", ""]
    assert vocabulary.decode([np.array(ids)]) == ["three books"]  # type: ignore[list-item]
    assert vocabulary.decode([]) == vocabulary.encode([]) == []


def test_training_is_deterministic_and_models_are_files(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    again = Vocabulary.train([text for pair in PAIRS for text in pair], 800)
    assert again == vocabulary
    vocabulary.save(tmp_path / "v.model")
    loaded = Vocabulary.load(tmp_path / "v.model")
    assert loaded == vocabulary == pickle.loads(pickle.dumps(vocabulary))
    assert loaded.encode(["一本书"]) == vocabulary.encode(["一本书"])


def test_vocabularies_that_cannot_be_trained_or_read(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no text to train a vocabulary on"):
        Vocabulary.train(["", " "], 1000)
    path = tmp_path / "v.model"
    with pytest.raises(CorpusError, match=r"v\.model: cannot be read \(No such file"):
        Vocabulary.load(path)
    for damaged in (b"", b"not a model", _tiny().model[:-20]):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=r"v\.model: is not a SentencePiece model"):
            Vocabulary.load(path)


# ── what is prepared ─────────────────────────────────────────────────────────────────────────


def test_ids_encode_the_text(built: Prepared) -> None:
    src, trg = built.vocabularies
    valid = built.splits["valid"]
    assert len(valid) == built.counts["valid"].pairs == len(built.texts("valid")) == 10
    for (src_ids, trg_ids), (src_text, trg_text) in zip(valid, built.texts("valid"), strict=True):
        assert src_ids.dtype == trg_ids.dtype == np.int32
        assert [int(token) for token in src_ids] == [*src.encode([src_text])[0], EOS]
        assert [int(token) for token in trg_ids] == [BOS, *trg.encode([trg_text])[0], EOS]
    train = built.splits["train"]
    decoded = {
        (src.decode([src_ids])[0], trg.decode([trg_ids])[0])  # type: ignore[list-item]
        for src_ids, trg_ids in train
    }
    assert decoded == set(PAIRS) - set(built.texts("valid"))
    assert train.lengths.shape == (len(train), 2)
    assert train.lengths.dtype == np.int64
    assert [tuple(map(len, train[i])) for i in range(5)] == [tuple(n) for n in train.lengths[:5]]
    assert tuple(train.lengths.sum(axis=0)) == train.tokens


def test_pairs_are_found_by_number_and_may_be_written_to(built: Prepared) -> None:
    train = built.splits["train"]
    first = train[-1][0]
    first[0] = 7
    assert (train[-1][0] == train[len(train) - 1][0]).all()
    for index in (len(train), -len(train) - 1):
        with pytest.raises(IndexError):
            train[index]


def test_pickling_stores_only_the_path(built: Prepared) -> None:
    pickled = pickle.dumps(built.splits["train"])
    assert len(pickled) < 600
    other: IdPairs = pickle.loads(pickled)
    assert len(other) == len(built.splits["train"])
    assert (other[3][1] == built.splits["train"][3][1]).all()


def test_only_scored_splits_have_text(built: Prepared) -> None:
    for split in ("train", "test", "nonsense"):
        with pytest.raises(CorpusError, match=f"has no text of '{split}'; found 'valid'"):
            built.texts(split)


def test_the_table(built: Prepared) -> None:
    table = built.table()
    assert "held out" in table
    assert table.splitlines()[-1].startswith(" vocabulary: ")
    assert "zh to en" in table


def test_one_vocabulary_for_both_sides(tmp_path: Path) -> None:
    prepared = made(put(tmp_path), tmp_path / "cache", joint=True)
    assert prepared.joint
    assert prepared.vocabularies[0] is prepared.vocabularies[1]
    assert "joint" in prepared.table()


def test_pairs_too_long_leave_train_but_are_still_scored(tmp_path: Path) -> None:
    long = (" ".join(zh for zh, _ in PAIRS[:15]), " ".join(en for _, en in PAIRS[:15]))
    put(tmp_path, [*PAIRS, long])
    put(tmp_path, [("一", "one"), (long[0], "other")], name="valid.tsv")
    put(tmp_path, [(long[0], "none fits")], name="test.tsv")
    prepared = made(tmp_path, tmp_path / "cache", max_length=40)
    assert prepared.counts["train"].too_long == 1
    assert prepared.counts["valid"] == SplitCounts(read=2, too_long=1, shared=1, pairs=1)
    assert {split: len(ids) for split, ids in prepared.splits.items()} == {
        "train": len(PAIRS),
        "valid": 1,
        "test": 0,
    }
    assert prepared.texts("valid") == [("一", "one"), (long[0], "other")]
    assert prepared.texts("test") == [(long[0], "none fits")]
    assert prepared.splits["test"].lengths.shape == (0, 2)
    assert all(ids.lengths.max(initial=0) <= 40 for ids in prepared.splits.values())
    with pytest.raises(CorpusError, match=r"max_length = 4: all .* pairs of train are longer"):
        made(put(tmp_path / "other", [(f"{n}长" * 9, str(n) * 9) for n in range(9)]),
             tmp_path / "cache", max_length=4)  # fmt: skip


def test_a_pair_of_exactly_max_length_is_kept(vocabulary: Vocabulary, tmp_path: Path) -> None:
    pair = ("一本书", "a book")
    src, trg = (len(ids) for ids in vocabulary.encode(pair))
    both = (vocabulary, vocabulary)
    longest = max(src + 1, trg + 2)
    assert write_ids(tmp_path, "train", [pair], both, max_length=longest) == 0
    assert write_ids(tmp_path, "train", [pair], both, max_length=longest - 1) == 1


@settings(max_examples=8, deadline=None)
@given(repeats=st.integers(0, 25), workers=st.integers(1, 4))
def test_threads_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, repeats: int, workers: int
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    pairs = TINY_PAIRS * repeats
    seen: list[tuple[str, int, int]] = []
    both = (_tiny(), _tiny())
    for split, number in (("one", 1), ("many", workers)):
        write_ids(folder, split, pairs, both, max_length=60, workers=number,
                  progress=lambda *told: seen.append(told))  # fmt: skip
    one, many = IdPairs(folder, "one"), IdPairs(folder, "many")
    assert len(one) == len(many) == len(pairs)
    assert one.tokens == many.tokens
    assert all((a[0] == b[0]).all() for a, b in zip(one, many, strict=True))
    assert not pairs or ("encode many", len(pairs), len(pairs)) in seen


TINY_PAIRS = [(text, text) for text in TINY] * 40


def test_the_built_in_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = builtin_corpus(size=500)
    monkeypatch.setattr(prepare_module, "builtin_corpus", lambda **_: small)
    told: list[str] = []
    prepared = made(None, tmp_path, progress=lambda stage, *_: told.append(stage))
    assert prepared.texts("test") == small.splits["test"]
    assert max(map(len, prepared.vocabularies)) <= 1000
    assert list(dict.fromkeys(told)) == [
        "vocabulary",
        "encode train",
        "encode valid",
        "encode test",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"src": "de"}, "the built-in corpus is Chinese and English"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        made(None, tmp_path, **options)
    assert folders(tmp_path) == []


# ── the cache ────────────────────────────────────────────────────────────────────────────────


def test_the_same_content_has_the_same_key_and_bytes(built: Prepared, tmp_path: Path) -> None:
    again = made(put(tmp_path / "elsewhere", name="other.tsv"), tmp_path / "cache")
    assert again.folder.name == built.folder.name
    assert contents(again.folder) == contents(built.folder)
    assert dataclasses.replace(again, folder=built.folder, splits=built.splits) == built


def test_other_content_or_settings_have_another_key(built: Prepared, tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", put(tmp_path)
    names = {
        built.folder.name,
        made(path, cache, max_length=50).folder.name,
        made(path, cache, vocabulary=700).folder.name,
        made(path, cache, skip_bad=True).folder.name,
        made(put(tmp_path, PAIRS[1:]), cache).folder.name,
    }
    assert len(names) == 5


def test_the_cache_is_used(built: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_encode_into", None)
    cache = built.folder.parent
    assert made(cache.parent / "train.tsv", cache).folder == built.folder
    assert load_prepared(built.folder).counts == built.counts
    assert folders(cache) == [built.folder.name]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("一\tone\nbroken\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"train\.tsv:2: has 1 column"):
        made(path, tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


DYING = """
import os, sys
from pathlib import Path
from headrace.translation.corpus.prepare import prepared_for
from headrace.translation.settings import TrainSettings

def die(stage, done, total):
    if stage == sys.argv[3]:
        os._exit(9)

prepared_for(TrainSettings((sys.argv[1],), vocabulary=800), Path(sys.argv[2]), progress=die)
"""


@pytest.mark.parametrize("stage", ["vocabulary", "encode valid"])
def test_a_killed_build_leaves_no_finished_folder(
    built: Prepared, tmp_path: Path, stage: str
) -> None:
    path, cache = put(tmp_path), tmp_path / "cache"
    died = subprocess.run([sys.executable, "-c", DYING, path, cache, stage], timeout=60)
    assert died.returncode == 9
    left = folders(cache)
    assert len(left) == 1
    assert all(name.startswith(".") for name in left)
    prepared = made(path, cache)
    assert folders(cache) == [prepared.folder.name]
    assert contents(prepared.folder) == contents(built.folder)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CorpusError, match="cannot be written"):
        made(put(tmp_path), tmp_path / "cache")

    def full(*_: Any) -> None:
        raise OSError("1824 requested and 992 written")

    monkeypatch.setattr("numpy.save", full)
    with pytest.raises(CorpusError, match=r"992 written; the disk may be full\)"):
        made(put(tmp_path), tmp_path / "other")


# ── folders that are damaged or foreign ──────────────────────────────────────────────────────


@pytest.fixture
def copy(built: Prepared, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built.folder, tmp_path / "cache" / built.folder.name))


def test_a_missing_or_short_file_is_named(copy: Path) -> None:
    path = copy / "train.src.ids.npy"
    whole = path.stat().st_size
    os.truncate(path, whole - 4)
    with pytest.raises(CorpusError) as caught:
        load_prepared(copy)
    assert str(caught.value) == (
        f"{path}: has {whole - 4:,} bytes; expected {whole:,} bytes. Prepare it again"
    )
    path.unlink()
    with pytest.raises(CorpusError, match=r"train\.src\.ids\.npy: does not exist; expected"):
        load_prepared(copy)


def test_damaged_ids_and_offsets_of_the_same_size_are_found(copy: Path) -> None:
    offsets = np.load(copy / "train.trg.offsets.npy")
    np.save(copy / "train.trg.offsets.npy", offsets + 1)
    with pytest.raises(CorpusError, match=r"the offsets of train\.trg do not match its .* ids"):
        load_prepared(copy)
    np.save(copy / "train.trg.offsets.npy", offsets.astype(np.float64))
    with pytest.raises(CorpusError, match="is 1-dimensional float64; expected 1-dimensional int64"):
        load_prepared(copy)


def test_folders_that_prepare_did_not_make_are_refused(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(CorpusError, match=r"expected a folder made by prepare\(\)"):
        load_prepared(tmp_path)
    meta = copy / "prepared.json"
    content = json.loads(meta.read_text(encoding="utf-8"))
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "expected a mapping, found"),
        ('{"format": "x"}', "is not Headrace's"),
        (json.dumps({**content, "version": 99}), "has version 99; expected 2. Prepare it again"),
        (json.dumps({**content, "files": 3}), "files = 3: expected a mapping"),
        (json.dumps({**content, "files": {"a": "b"}}), "files.a = 'b': expected a whole number"),
        (json.dumps({**content, "counts": {"train": {"no": 1}}}), "expected train and valid"),
        (json.dumps({key: content[key] for key in ("format", "version")}), "key is missing"),
    ):
        meta.write_text(text, encoding="utf-8")
        with pytest.raises(CorpusError, match=message):
            load_prepared(copy)


def test_a_damaged_cache_is_prepared_again(built: Prepared, copy: Path) -> None:
    (copy / "src.model").write_bytes(b"?")
    again = made(built.folder.parent.parent / "train.tsv", copy.parent)
    assert again.folder == copy
    assert contents(copy) == contents(built.folder)
    assert folders(copy.parent) == [copy.name]


def test_reading_and_preparing_see_the_same_pairs(built: Prepared) -> None:
    corpus = read_corpus(built.folder.parent.parent / "train.tsv", src="zh", trg="en")
    assert corpus.splits["valid"] == built.texts("valid")
    assert corpus.counts == built.counts
