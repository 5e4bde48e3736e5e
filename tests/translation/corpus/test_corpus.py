"""Corpora: every format, every way to get it wrong and in which words, and what is left out."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorpusError, HeadraceError
from headrace.translation import Corpus, read_corpus
from headrace.translation.corpus.corpus import clean
from headrace.translation.corpus.corpus_report import SplitCounts

PAIRS = [("你好。", "Hello."), ("三本书", "three books"), ("再见", "Goodbye")]
OBJECTS = [{"en": en, "ch": zh} for zh, en in PAIRS]


def put(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def read(data: Any, **options: Any) -> Corpus:
    return read_corpus(data, **{"src": "zh", "trg": "en", **options})


def everything(corpus: Corpus) -> set[tuple[str, str]]:
    return {pair for pairs in corpus.splits.values() for pair in pairs}


def refused(data: Any, **options: Any) -> str:
    with pytest.raises(CorpusError) as caught:
        read(data, **options)
    return str(caught.value)


FORMATS = {
    "data.json": json.dumps(OBJECTS),
    "pairs.json": json.dumps(PAIRS, ensure_ascii=False, indent=2),
    "data.jsonl": "\n".join(json.dumps(record) for record in OBJECTS),
    "pairs.jsonl": "\n\n".join(json.dumps(pair) for pair in PAIRS) + "\n",
    "data.tsv": "".join(f"{zh}\t{en}\n" for zh, en in PAIRS),
    "header.tsv": "en\tid\tzh\r\n" + "".join(f"{en}\t7\t{zh}\r\n" for zh, en in PAIRS),
    "bom.tsv": "\ufeffzh\ten\n" + "".join(f"{zh}\t{en}\n" for zh, en in PAIRS),
}


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format(tmp_path: Path, name: str, packed: str) -> None:
    corpus = read(put(tmp_path / f"{name}{packed}", FORMATS[name]))
    assert everything(corpus) == set(PAIRS)
    assert corpus.counts == {
        "train": SplitCounts(read=3, held_out=1, pairs=2),
        "valid": SplitCounts(held_out=1, pairs=1),
    }


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("reverse", [False, True])
def test_parallel_text(tmp_path: Path, packed: str, reverse: bool) -> None:
    zh = put(tmp_path / f"news.zh{packed}", "".join(f"{zh}\n" for zh, _ in PAIRS))
    en = put(tmp_path / "news.en", "\n".join(en for _, en in PAIRS))
    assert everything(read([en, zh] if reverse else [zh, en])) == set(PAIRS)
    assert everything(read(tmp_path)) == set(PAIRS)
    swapped = read([zh, en], src="en", trg="zh")
    assert everything(swapped) == {(en, zh) for zh, en in PAIRS}


def test_ch_and_zh_mean_the_same_language(tmp_path: Path) -> None:
    path = put(tmp_path / "data.json", json.dumps(OBJECTS))
    assert everything(read(path, src="ch")) == everything(read(path, src="zh")) == set(PAIRS)
    assert "expected two different languages" in refused(path, src="zh", trg="ch")


def test_a_folder_is_split_by_name(tmp_path: Path) -> None:
    put(tmp_path / "train-1.tsv", "一\tone\n二\ttwo\n二\ttwo\n")
    put(tmp_path / "train-2.json.gz", json.dumps([["三", "three"], ["四", "four"], ["五", "five"]]))
    put(tmp_path / "dev.zh", "三\n")
    put(tmp_path / "dev.en", "three\n")
    put(tmp_path / "dev.fr", "trois\n")
    put(tmp_path / "test2019.jsonl", '{"zh": "五", "en": "five"}\n')
    put(tmp_path / "README.md", "about")
    corpus = read(tmp_path)
    assert corpus.splits == {
        "train": [("一", "one"), ("二", "two"), ("四", "four")],
        "valid": [("三", "three")],
        "test": [("五", "five")],
    }
    assert corpus.counts["train"] == SplitCounts(read=6, duplicates=1, overlap=2, pairs=3)
    assert corpus.counts["valid"] == SplitCounts(read=1, pairs=1)
    assert corpus.table().splitlines()[0].split() == [
        *("split", "read", "duplicates", "overlap", "pairs"),
    ]


def test_a_list_of_files_is_split_by_name_too(tmp_path: Path) -> None:
    train = put(tmp_path / "train.tsv", "一\tone\n二\ttwo\n")
    valid = put(tmp_path / "valid.tsv", "三\tthree\n")
    assert list(read([valid, train]).splits) == ["train", "valid"]


def test_text_is_cleaned(tmp_path: Path) -> None:
    assert clean("  e\u0301 \u3000a\u2028b\x85c\r\n") == "é a b c"
    path = put(tmp_path / "d.tsv", " 一\u3000 二 \tone  two\n \tempty\n三\t \n四\tfour\n")
    corpus = read(path)
    assert everything(corpus) == {("一 二", "one two"), ("四", "four")}
    assert corpus.counts["train"] == SplitCounts(read=4, empty=2, held_out=1, pairs=1)


def test_held_out_pairs_depend_only_on_their_text(tmp_path: Path) -> None:
    lines = [f"{number}\tnumber {number}\n" for number in range(500)]
    first = read(put(tmp_path / "a.tsv", "".join(lines)))
    random.Random(3).shuffle(lines)
    second = read(put(tmp_path / "b.tsv", "".join(lines)))
    assert first.splits["valid"] == second.splits["valid"]
    assert len(first.splits["valid"]) == 10
    assert not set(first.splits["valid"]) & set(first.splits["train"])
    assert first.counts["train"].held_out == first.counts["valid"].held_out == 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.tsv", "一\tone\n二 two\n", ":2: has 1 column; expected 2, tab-separated"),
        ("d.tsv", "a\tb\tc\n", ":1: has 3 columns ('a', 'b', 'c'); expected 2, "
         "tab-separated, or a first line that names them: 'zh' and 'en'. If it has other names, "
         "give two of them as --src and --trg"),
        ("d.tsv", "en\tde\n", ":1: has the columns 'en', 'de'; expected 'zh' and 'en', as --src "
         "and --trg say. Give two of its columns there, or rename them"),
        ("d.tsv", b"a\tb\n\n\xff\tb\n", ":3: is not UTF-8 (byte 0xff at column 1); "
         "expected UTF-8 text. Convert it from its encoding, such as iconv -f GBK -t UTF-8"),
        ("d.jsonl", '["a", "b"]\n{"zh": \n', ":2: is not JSON (Expecting value, column 8); "
         "expected one record per line"),
        ("d.jsonl", '{"de": "x", "en": "y"}', ":1: has 'de', 'en'; expected the keys "
         "'zh' and 'en'"),
        ("d.jsonl", "{}", ":1: has no keys; expected the keys 'zh' and 'en'"),
        ("d.jsonl", '["a", "b", "c"]', ":1: is a list of 3; expected an object with "
         "'zh' and 'en', or a list of two strings"),
        ("d.jsonl", '"a"', ":1: is a string; expected an object with 'zh' and 'en', "
         "or a list of two strings"),
        ("d.jsonl", '["a", null]', ":1: the second is null; expected a string"),
        ("d.jsonl", '["a", "\\ud83d"]', ":1: the second has a lone surrogate (\\ud83d); "
         "expected valid text"),
        ("d.json", '[["a", "b"], {"ch": 3, "en": "x"}]', ": record 2: 'ch' is a number; "
         "expected a string"),
        ("d.json", '[["a", "b"],\n ["c" "d"]]', ":2: is not JSON (Expecting ',' delimiter, "
         "column 7)"),
        ("d.json", '[["a", "b"]]\n["c", "d"]', ":2: is not JSON (Extra data, column 1)"),
        ("d.json", '{"train": []}', ":1: has 'train'; expected the keys 'zh' and 'en'"),
        ("d.json", b'[["a",\n"\xe4"]]', ":2: is not UTF-8 (byte 0xe4 at column 2); "
         "expected UTF-8 text. Convert it from its encoding, such as iconv -f GBK -t UTF-8"),
        ("d.json", "[]", ": is empty; expected pairs of 'zh' and 'en'"),
        ("d.json", "", ": is empty; expected pairs of 'zh' and 'en'"),
        ("d.tsv", "\n", ": is empty; expected pairs of 'zh' and 'en'"),
        ("d.txt", "Hello.\n", ":1: has 1 column ('Hello.'); expected 2, tab-separated, or a "
         "first line that names them: 'zh' and 'en'. If it has other names, give two of them as "
         "--src and --trg"),
        ("d.en", "a", ": is one side of parallel text; expected d.zh beside it"),
        ("d.tsv", "一\tone\n", ": leaves 1 of 1 pairs to use; expected at least 1 in each "
         "split, and 2 in train if there is no valid split"),
    ],
)  # fmt: skip
def test_errors_name_the_place_what_was_found_and_what_was_expected(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = put(tmp_path / name, content)
    assert refused(path) == f"{path}{message}"


def test_json_too_deep_to_parse_is_refused(tmp_path: Path) -> None:
    for content in ("[" * 200_000, f"[[1{'0' * 5000}, 2]]"):
        for name in ("d.json", "d.jsonl"):
            assert "cannot be read as JSON" in refused(put(tmp_path / name, content))


def test_missing_and_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.tsv"
    assert refused(path) == (f"{path}: does not exist; expected a file or folder of parallel text")
    whole = gzip.compress(b"a\tb\n" * 100)
    cut = tmp_path / "cut.tsv.gz"
    cut.write_bytes(whole[:-9])
    assert refused(cut).startswith(f"{cut}: is not a complete compressed file (")


def test_text_files_of_different_lengths_are_refused(tmp_path: Path) -> None:
    zh, en = put(tmp_path / "a.zh", "一\n二\n三\n"), put(tmp_path / "a.en", "one\ntwo\n")
    message = f"{zh} has 3 lines and {en} has 2; expected as many, one sentence per line"
    assert refused([zh, en]) == refused([zh, en], skip_bad=True) == message
    put(en, b"one\n\xfftwo\nthree\n")
    assert refused([zh, en]) == (
        f"{en}:2: is not UTF-8 (byte 0xff at column 1); expected UTF-8 text. Convert it from its "
        "encoding, such as iconv -f GBK -t UTF-8"
    )
    put(zh, b"\xfe\n\xfe\n\xe4\xb8\x80\n\xe4\xb8\x89\n")
    put(en, b"one\n\xff\nthree\nfour\n")
    assert read([zh, en], skip_bad=True).counts["train"] == SplitCounts(
        read=4, malformed=2, held_out=1, pairs=1
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["notes.md"], "{}: has notes.md; expected .json"),
        ([], "{}: has nothing; expected .json"),
        (["train.tsv", "valid.doc"], "{}/valid.doc: has no known ending; expected .json"),
        (["train.tsv", "more.tsv"], "{}/more.tsv: its name gives no split; expected names that"),
        (["test.tsv"], "no train split: found test.tsv; expected a name like train.jsonl"),
        (["a.tsv", "b.tsv"], "{}/a.tsv: its name gives no split; expected names that begin with"),
        (["train.tsv", "train.tsv.gz"], "{0}/train.tsv and {0}/train.tsv.gz: hold the same data"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        put(tmp_path / name, "一\tone\n二\ttwo\n")
    assert refused(tmp_path).startswith(message.format(tmp_path))


def test_two_folders_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "train.tsv", "一\tone\n二\ttwo\n")
    assert refused([tmp_path / "a", tmp_path / "b"]) == (
        f"{tmp_path}/a: is a folder among 2 paths; expected either one folder or only files"
    )


def test_bad_records_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    lines = ['["一", "one"]', "{", '["二"]', '["二", 2]', "\\", '["二", "two"]', '["", "x"]']
    corpus = read(put(tmp_path / "d.jsonl", "\n".join(lines)), skip_bad=True)
    assert everything(corpus) == {("一", "one"), ("二", "two")}
    assert corpus.counts["train"] == SplitCounts(read=7, malformed=4, empty=1, held_out=1, pairs=1)
    message = refused(put(tmp_path / "e.jsonl", "{\n{\n"), skip_bad=True)
    assert message.endswith("leaves 0 of 2 pairs to use (2 malformed); expected at least 1 in "
                            "each split, and 2 in train if there is no valid split")  # fmt: skip


@pytest.mark.parametrize("side", ["", "e n", "a/b", "汉"])
def test_invalid_language_names_are_refused(tmp_path: Path, side: str) -> None:
    assert re.match("src = .* expected a language's name", refused(tmp_path, src=side))
    assert issubclass(CorpusError, HeadraceError)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=30), data=st.data())
def test_every_pair_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], data: Any
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    train = put(folder / "train.jsonl", "\n".join(json.dumps(pair) for pair in pairs))
    if data.draw(st.booleans()):
        put(folder / "test.json", json.dumps([*pairs[:3], ["一", "one"]]))
    try:
        corpus = read(folder)
    except CorpusError as problem:
        assert re.search("pairs to use|share sentences with each", str(problem))  # noqa: PT017
        return
    counts = corpus.counts["train"]
    gone = counts.empty + counts.duplicates + counts.overlap + counts.held_out
    assert counts.read == len(pairs) == gone + counts.pairs, train
    splits = [set(found) for found in corpus.splits.values()]
    assert len(set.union(*splits)) == sum(map(len, splits)) or "test" in corpus.splits
    for side in (0, 1):
        held_out = {pair[side] for pair in corpus.splits["valid"]}
        assert not held_out & {pair[side] for pair in corpus.splits["train"]}
    assert not set(corpus.splits["train"]) & set(corpus.splits.get("test", ()))
    for pair in everything(corpus):
        assert pair == (clean(pair[0]), clean(pair[1]))
        assert all(pair)
