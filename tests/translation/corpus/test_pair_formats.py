"""Files as people have them: what is recognised, what is said, what is refused."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import logging
import lzma
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CorpusError
from headrace.translation import read_corpus, read_scored_pairs
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import find_pair_files
from headrace.translation.corpus.pair_formats import recognize

PAIRS = [
    ("Go.", "Va !"),
    ('She said "no, thanks".', "Elle a dit « non »."),
    ("Hello", "Salut"),
]
CREDIT = "CC-BY 2.0 (France) Attribution: tatoeba.org #2877272 (CM) & #1158250 (Wittydev)"


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pairs_in(*paths: Path, src: str = "en", trg: str = "fr") -> list[tuple[str, str]]:
    return read_scored_pairs(list(paths) if len(paths) > 1 else paths[0], src=src, trg=trg).pairs


def refused(*paths: Path, src: str = "en", trg: str = "fr") -> str:
    with pytest.raises(CorpusError) as caught:
        pairs_in(*paths, src=src, trg=trg)
    return str(caught.value)


def said(path: Path, src: str = "en", trg: str = "fr") -> str:
    sides = Sides(src, trg)
    (group,) = find_pair_files(path, sides)["train"]
    return str(recognize(group, sides)).removeprefix(f"reading {path}: ")


def csv_cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def rows(form: str, *, between: str = "\t") -> str:
    return "".join(
        form.format(en=en, fr=fr, n=1000 + n).replace("|", between) + "\n"
        for n, (en, fr) in enumerate(PAIRS)
    )


QUOTED = "".join(f"{csv_cell(en)},{csv_cell(fr)}\n" for en, fr in PAIRS)
TWO = "TSV without a header, column 1 is en, column 2 is fr"


@pytest.mark.parametrize(
    "lines",
    [
        ['"Go," he said.\t« Va », dit-il.', '"No," I said.\t"Non", dis-je.'],
        ['"Go\tVa', '"No\tNon'],
    ],
)
def test_sentences_that_all_begin_with_quotes(tmp_path: Path, lines: list[str]) -> None:
    path = put(tmp_path / "said.tsv", "\n".join(lines))
    assert pairs_in(path) == [tuple(line.split("\t")) for line in lines]
    # Where most lines are CSV, the others are errors.
    path = put(tmp_path / "quoted.tsv", '"a"\t"b"\n' * 3 + lines[0])
    assert "quoted.tsv:4: is not CSV" in refused(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("fra.txt", rows(f"{{en}}|{{fr}}|{CREDIT}"), TWO),
        ("fra.tsv", rows(f"{{en}}|{{fr}}|{CREDIT}"), TWO),
        ("pairs.tsv", rows("{n}|{en}|{n}|{fr}"), TWO.replace("2", "4").replace("1", "2")),
        ("scored.tsv", rows("0.{n}|{en}|{fr}"), TWO.replace("2", "3").replace("1", "2")),
        ("verses.tsv", rows("1:{n}|{en}|{fr}"), TWO.replace("2", "3").replace("1", "2")),
        ("codes.tsv", rows("en|{en}|fr|{fr}"), TWO.replace("2", "4").replace("1", "2")),
        ("none", rows("{en}|{fr}"), TWO),
        ("my.csv", "id,en,fr\n" + "".join(f"7,{line}\n" for line in QUOTED.splitlines()),
         "CSV with a header, columns en and fr"),
        ("my.csv", "\ufefffr;en\n" + "".join(f"{csv_cell(f)};{csv_cell(e)}\r\n" for e, f in PAIRS),
         "CSV with semicolons with a header, columns en and fr"),
        ("my.csv", QUOTED, "CSV without a header, column 1 is en, column 2 is fr"),
        ("my.csv", rows("{en}|{fr}"), TWO),
        ("my.csv", "source,target\n" + QUOTED, "CSV with a header, columns source and target"),
        ("my.csv", "English,French\n" + QUOTED, "CSV with a header, columns English and French"),
        ("h.tsv", "fr\ten\n" + rows("{fr}|{en}"), "TSV with a header, columns en and fr"),
        ("h.tsv", "French sentence\tEnglish sentence\n" + rows("{fr}|{en}"),
         "TSV with a header, columns English sentence and French sentence"),
        ("h.tsv", "tgt_text\tsrc_text\n" + rows("{fr}|{en}"),
         "TSV with a header, columns src_text and tgt_text"),
        ("h.tsv", "Target text\tSource text\n" + rows("{fr}|{en}"),
         "TSV with a header, columns Source text and Target text"),
        ("q.tsv", '"en"\t"fr"\n' + QUOTED.replace(",\"", "\t\""),
         "TSV with a header, columns en and fr"),
        ("hf.jsonl", "\n".join(json.dumps({"id": "1", "translation": {"en": e, "fr": f}})
                               for e, f in PAIRS), "JSON lines"),
        ("hf.json", "\n".join(json.dumps({"translation": {"fr": f, "en": e}})
                              for e, f in PAIRS), "JSON lines"),
        ("flat.ndjson", "\n".join(json.dumps({"eng": e, "fra": f}) for e, f in PAIRS),
         "JSON lines"),
        ("list.json", json.dumps([{"en_GB": e, "fr-CA": f} for e, f in PAIRS]), "a JSON list"),
    ],
)  # fmt: skip
def test_what_a_file_is_and_what_is_said(
    tmp_path: Path, name: str, content: str, expected: str
) -> None:
    path = put(tmp_path / name, content)
    assert pairs_in(path) == PAIRS
    assert said(path) == expected


def test_a_line_that_the_beginning_cuts_off_is_not_looked_at(tmp_path: Path) -> None:
    """The first 64 KiB end within a licence."""
    line = f"{'a' * 1000}\t{'b' * 1000}\t{CREDIT}\n"
    rest = f"\td\t{CREDIT}\n"
    first = "c" * (((1 << 16) - 2003 - len(rest)) % len(line)) + rest
    content = first + line * 60
    assert content[: 1 << 16].endswith("b\tC")
    path = put(tmp_path / "long.tsv", content)
    assert len(pairs_in(path)) == 61


def test_a_csv_cell_may_have_lines_and_bad_rows_can_be_skipped(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", b'en,fr\n"two\nlines",deux\na,b,c\n"x"y,z\n\xff,b\nGo.,Va !\n')
    assert f"{path}:4: has 3 columns; expected 2, comma-separated" == refused(path)
    found = read_scored_pairs(path, src="en", trg="fr", skip_bad=True).pairs
    assert found == [("two lines", "deux"), ("Go.", "Va !")]
    put(path, 'en,fr\na,b\n"c,d\n' + "e,f\n" * 50_000)
    assert (
        refused(path) == f"{path}:3: is not CSV (a quote is not closed); expected quotes in pairs"
    )


def test_quotes_in_a_tsv(tmp_path: Path) -> None:
    path, text = tmp_path / "a.tsv", io.StringIO()
    writer = csv.writer(text, delimiter="\t")  # as spreadsheets do
    writer.writerows([("en", "fr"), *PAIRS])
    assert '""no, thanks"".' in text.getvalue()
    assert pairs_in(put(path, text.getvalue())) == PAIRS
    # Quotes that open a line of plain text are text.
    put(path, 'en\tfr\n"Go", he said.\t"Va !"\n"Hello\tSalut"\n')
    assert pairs_in(path) == [('"Go", he said.', '"Va !"'), ('"Hello', 'Salut"')]
    # A cell with line breaks needs the other ending.
    writer.writerow(("two\nlines", "deux\nlignes"))
    assert refused(put(path, text.getvalue())) == (
        f"{path}:5: has 1 column; expected 2, tab-separated. If cells are in quotes, name the "
        "file .csv"
    )
    assert pairs_in(path.rename(tmp_path / "a.csv")) == [*PAIRS, ("two lines", "deux lignes")]


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        bz2.compress,
        lzma.compress,
        lambda raw: codecs.BOM_UTF16_LE + raw.decode().encode("utf-16-le"),
        lambda raw: codecs.BOM_UTF16_BE + raw.decode().encode("utf-16-be"),
        lambda raw: gzip.compress(raw.decode().encode("utf-16")),
        lambda raw: raw.decode().encode("utf-32"),
    ],
)
@pytest.mark.parametrize("name", ["a.tsv", "a.json"])
def test_compression_and_encoding_are_recognised_by_content(
    tmp_path: Path, pack: Any, name: str
) -> None:
    content = rows("{en}|{fr}") if name == "a.tsv" else json.dumps(PAIRS)
    path = put(tmp_path / name, pack(content.encode()))
    assert pairs_in(path) == PAIRS
    for cut in (path.read_bytes()[:-5], path.read_bytes()[:15]):
        put(path, cut)
        assert str(path) in refused(path)


def test_a_name_does_not_make_a_file_compressed(tmp_path: Path) -> None:
    """Browsers unpack what they download, and keep its name."""
    assert pairs_in(put(tmp_path / "a.tsv.gz", rows("{en}|{fr}"))) == PAIRS
    assert pairs_in(put(tmp_path / "a.tsv.xz", lzma.compress(rows("{en}|{fr}").encode()))) == PAIRS


def test_zstd_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.tsv.zst", b"\x28\xb5\x2f\xfd" + b"?" * 20)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert refused(path) == (
        f"{path}: is compressed with zstd; run pip install 'headrace[translate]', or decompress it"
    )


def test_zstd_files_are_read_to_their_end_or_refused(tmp_path: Path) -> None:
    zstd = pytest.importorskip("zstandard", reason="zstandard is not installed")
    # Over 128 kB a frame has several blocks: a cut file still begins with whole ones.
    pairs = [(f"line {n}", f"ligne {n}") for n in range(20_000)]
    lines = "".join(f"{src}\t{trg}\n" for src, trg in pairs).encode()
    frames = [zstd.compress(lines), zstd.compress(b"last\tfin\n")]
    path = put(tmp_path / "a.tsv", b"".join(frames))
    assert pairs_in(path) == [*pairs, ("last", "fin")]
    for cut in (len(frames[0]) // 2, len(frames[0]) - 1, len(frames[0]) + 5):
        put(path, b"".join(frames)[:cut])
        assert f"{path}: is not a complete compressed file (" in refused(path)
    put(path, frames[0] + b"no zstd frame")
    assert f"{path}: is not a complete compressed file (" in refused(path)


@pytest.mark.parametrize(
    ("names", "swapped"),
    [
        (("a.txt", "b.txt"), False),
        (("left", "right"), False),
        (("train.en.txt", "train.fr.txt"), False),
        (("z.fr.txt", "a.en.txt"), True),
        (("corpus.fra", "corpus.eng"), True),
        (("x.txt", "x.en"), True),
        (("train.src", "train.trg"), False),
    ],
)
def test_two_text_files_by_name(tmp_path: Path, names: tuple[str, str], swapped: bool) -> None:
    sides = [[pair[int(swapped)] for pair in PAIRS], [pair[1 - int(swapped)] for pair in PAIRS]]
    files = [put(tmp_path / name, "\n".join(side)) for name, side in zip(names, sides, strict=True)]
    assert pairs_in(*files) == PAIRS


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.en", "a.de"), "a.de: its ending names the language 'de'; expected 'en' and 'fr'"),
        (("x.en", "y.eng"), "x.en and {}/y.eng: their names say the same language"),
        (("a.txt", "a.txt"), "a.txt: is given twice; expected different files"),
        (("a.json", "b.txt"), "a.json: its name gives no split"),
    ],
)
def test_two_files_that_are_no_pair(tmp_path: Path, names: tuple[str, str], message: str) -> None:
    files = [put(tmp_path / name, "a\n") for name in names]
    assert refused(*files).startswith(f"{tmp_path}/{message.format(tmp_path)}")


@pytest.mark.parametrize("name", ["zh", "zh-CN", "zh_CN", "zh-Hans", "zho", "cmn", "ch", "ZH"])
def test_names_of_a_language(tmp_path: Path, name: str) -> None:
    record = json.dumps({name: "你好", "en": "Hello"})
    assert pairs_in(put(tmp_path / "a.jsonl", record), src="zh", trg="en") == [("你好", "Hello")]
    assert pairs_in(put(tmp_path / "a.jsonl", record), src="en", trg="zh") == [("Hello", "你好")]
    other = json.dumps({"zh": "你好", "en": "Hello"})
    assert pairs_in(put(tmp_path / "b.jsonl", other), src=name, trg="en") == [("你好", "Hello")]
    with pytest.raises(CorpusError, match="expected two different languages"):
        Sides(name, "zh" if "-" not in name and "_" not in name else name)


def test_variants_of_one_language_are_told_apart(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", json.dumps({"pt-BR": "ônibus", "pt-PT": "autocarro"}))
    assert pairs_in(path, src="pt-PT", trg="pt-BR") == [("autocarro", "ônibus")]
    both = put(tmp_path / "b.csv", "zh-TW,zh-CN,en\n臺,台,stage\n")
    assert pairs_in(both, src="zh-CN", trg="en") == [("台", "stage")]


def test_columns_are_told_apart_by_their_script(tmp_path: Path) -> None:
    """cmn.txt from Tatoeba is English first, and --src is zh unless it is given."""
    path = put(tmp_path / "cmn.txt", f"Hi.\t嗨。\t{CREDIT}\nRun.\t你跑。\t{CREDIT}\n")
    assert pairs_in(path, src="zh", trg="en") == [("嗨。", "Hi."), ("你跑。", "Run.")]
    assert said(path, "zh", "en") == "TSV without a header, column 2 is zh, column 1 is en"
    assert pairs_in(path, src="en", trg="zh") == [("Hi.", "嗨。"), ("Run.", "你跑。")]
    texts = put(tmp_path / "a.txt", "Hi.\nRun.\n"), put(tmp_path / "b.txt", "嗨。\n你跑。\n")
    assert pairs_in(*texts, src="zh", trg="en") == [("嗨。", "Hi."), ("你跑。", "Run.")]


def test_what_is_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    path = put(tmp_path / "my.csv", "en,fr\na,b\nc,d\n")
    read_corpus(path, src="en", trg="fr")
    assert caplog.messages == [f"reading {path}: CSV with a header, columns en and fr"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "id\tsentence\ttranslation\n1\ta\tb\n2\tc\td\n",
         ":1: has 3 columns ('id', 'sentence', 'translation'); expected 2, tab-separated, or"),
        ("a.csv", "id,en,de\n1,a,b\n", ":1: has the columns 'id', 'en', 'de'; expected"),
        ("a.tsv", "1\tcmn\t我們\n2\tcmn\t我\n",
         ":1: has 3 columns ('1', 'cmn', '我們'); expected 2, tab-separated, or"),
        ("a.csv", "a,b,c\nd,e,f\n",
         ":1: has 3 columns ('a', 'b', 'c'); expected 2, comma-separated, or a first"),
        ("a.jsonl", '{"en": "a", "fr": "b"}\n{"en": "a", "fr": "b", "en": "c"}\n',
         ":2: has the key 'en' 2 times; expected each key once"),
        ("a.json", '[\n {"en": "a", "fr": "b"},\n {"en": "a", "en": "c", "fr": "d"}]',
         ": record 2: has the key 'en' 2 times; expected each key once"),
        ("a.zip", b"PK\x03\x04rest", ": is a zip archive or an office document; unpack it, or"),
        ("a.tsv", b"PAR1rest", ": is a Parquet file; save it as JSON lines or CSV"),
        ("a.txt", "<!DOCTYPE html>", ": is a web page; download the file itself"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\n", ": is a Git LFS pointer; run"),
        ("a.tsv.gz", gzip.compress(b"\0" * 257 + b"ustar\0", mtime=0),
         ": has zero bytes; expected UTF-8, or UTF-16"),
        ("a.tsv", "a\tb\n".encode("utf-16-le") * 5, ": has zero bytes; expected UTF-8, or"),
        ("a.tsv", codecs.BOM_UTF16_LE + b"a\0\t\0b\0\n\0\0\xd8", ": is not complete UTF-16"),
        ("a.tsv", "a\tb\n" + "x" * (1 << 20) + "yz\tb\n", ":2: is longer than 1,048,576 char"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith(":") else "",
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = put(tmp_path / name, content)
    assert refused(path).startswith(f"{path}{message}")


def test_content_made_to_be_slow_takes_seconds(tmp_path: Path) -> None:
    keys = ", ".join(f'"{n}": 0' for n in range(60_000))
    quotes = '"' * ((1 << 19) + 1)
    for name, content in (
        ("a.jsonl", f'{{{keys}, "59999": 0}}'),
        ("a.tsv", f"en\tfr\n{quotes}\ta\n"),
        ("a.csv", f"en,fr\n{quotes},a\n"),
    ):
        begun = time.monotonic()
        with contextlib.suppress(CorpusError):
            pairs_in(put(tmp_path / name, content))
        assert time.monotonic() - begun < 5


def test_what_could_block_forever_is_refused_by_name(tmp_path: Path) -> None:
    fifo = tmp_path / "train.tsv"
    os.mkfifo(fifo)
    assert refused(fifo) == f"{fifo}: is a FIFO (a pipe); expected a plain file"
    assert refused(Path("/dev/zero")) == "/dev/zero: is a device; expected a plain file"
    assert refused(tmp_path).startswith(f"{tmp_path}: has train.tsv; expected .json")
    with socket.socket(socket.AF_UNIX) as there:
        path = Path("/tmp") / f"headrace-{os.getpid()}.sock"
        there.bind(str(path))
        try:
            assert refused(path) == f"{path}: is a socket; expected a plain file"
        finally:
            path.unlink()


def test_folders(tmp_path: Path) -> None:
    only_test = tmp_path / "only"
    only_test.mkdir()
    put(only_test / "test.csv", "en,fr\n" + QUOTED)
    assert pairs_in(only_test) == PAIRS
    with pytest.raises(CorpusError, match=r"no train split: found test\.csv"):
        read_corpus(only_test, src="en", trg="fr")
    outer = tmp_path / "outer"
    for name in ("news", "subtitles"):
        (outer / name).mkdir(parents=True)
    assert refused(outer).startswith(f"{outer}: has news/, subtitles/; expected .json")
    put(outer / "LICENSE", "")
    assert "has LICENSE, news/, subtitles/; expected .json" in refused(outer)
    texts = tmp_path / "texts"
    texts.mkdir()
    put(texts / "train.txt", rows("{en}|{fr}"))
    put(texts / "valid.txt", "Yes\tOui\n")
    put(texts / "_about.txt", "about")
    corpus = read_corpus(texts, src="en", trg="fr")
    assert corpus.splits == {"train": PAIRS, "valid": [("Yes", "Oui")]}


def test_the_split_to_score(tmp_path: Path) -> None:
    file, folder = put(tmp_path / "test.tsv", rows("{en}|{fr}")), tmp_path / "folder"
    folder.mkdir()
    put(folder / "valid.tsv", "Yes\tOui\n")

    def scored(data: Path | list[Path], split: str | None) -> object:
        return read_scored_pairs(data, src="en", trg="fr", split=split).pairs

    def missing(data: Path | list[Path], split: str) -> str:
        with pytest.raises(CorpusError) as caught:
            scored(data, split)
        return str(caught.value)

    assert scored(file, None) == PAIRS
    assert missing(file, "test") == (
        f"split test: {file} has no splits; leave the split out, or give a folder with a file for "
        "each"
    )
    assert scored(folder, None) == scored(folder, "valid") == [("Yes", "Oui")]
    assert missing(folder, "test") == f"{folder}: has no split 'test'; found valid"
    put(folder / "train.tsv", "No\tNon\n")
    assert scored(folder, None) == [("Yes", "Oui")]
    both = [file, folder / "train.tsv"]
    assert scored(both, "test") == PAIRS
    assert (
        missing(both, "valid") == f"{both[0]}, {both[1]}: has no split 'valid'; found train, test"
    )


@pytest.mark.parametrize("path", ["-", "a" * 5000, "\0", "missing/"])
def test_paths_that_are_none(path: str) -> None:
    message = refused(Path(path))
    assert message.startswith((path[:20].rstrip("/"), repr(path)))
