"""Hundreds of bad inputs, through the command line: one line says what is wrong and where.

Each input has a cause. It must end with exit code 2 (typed wrong) or 1 (a file's content is wrong),
without a traceback, within 10 s, and its message must name the file, the line or the field.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import itertools
import json
import lzma
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import HeadraceError

GOOD = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier")]
SIDES = ("--src", "en", "--trg", "de")
MAX_SECONDS = 10.0


@dataclass(frozen=True)
class BadInput:
    """What is typed, what is wrong with it, and what the message must contain."""

    cause: str
    argv: tuple[str, ...]
    named: str


class Folder:
    """Makes files with names of their own."""

    def __init__(self, root: Path) -> None:
        self.root, self._numbers = root, itertools.count()

    def new(self) -> Path:
        path = self.root / str(next(self._numbers))
        path.mkdir()
        return path

    def file(self, name: str, content: bytes | str) -> Path:
        path = self.new() / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def folder(self, **files: bytes | str) -> Path:
        path = self.new()
        for name, content in files.items():
            raw = content.encode() if isinstance(content, str) else content
            (path / name.replace("_", ".")).write_bytes(raw)
        return path


def prepare(cause: str, *paths: Path | str, named: str, options: tuple[str, ...] = ()) -> BadInput:
    argv = ("prepare", *map(str, paths), *SIDES, *options)
    return BadInput(cause, argv, named)


# --- records --------------------------------------------------------------------------------------

PACKINGS: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "bom": lambda text: codecs.BOM_UTF8 + text.encode(),
    "gzip": lambda text: gzip.compress(text.encode(), 1),
    "bzip2": lambda text: bz2.compress(text.encode(), 1),
    "xz": lambda text: lzma.compress(text.encode(), preset=0),
    "utf-16": lambda text: text.encode("utf-16"),
}
BAD_RECORDS = {
    "a key is missing": '{"en": "five"}',
    "a record without keys": "{}",
    "another language": '{"en": "five", "fr": "cinq"}',
    "a number as text": '{"en": "five", "de": 5}',
    "null as text": '{"en": null, "de": "fünf"}',
    "a list as text": '["five", ["fünf"]]',
    "an object as text": '{"translation": {"en": {"text": "five"}, "de": "fünf"}}',
    "a list of three": '["five", "fünf", "cinq"]',
    "a list of one": '["five"]',
    "a string as record": '"five"',
    "a number as record": "5",
    "true as record": "true",
    "half a character": r'{"en": "five \ud83d", "de": "fünf"}',
    "a key twice": '{"en": "five", "de": "fünf", "en": "six"}',
    "a nested key twice": '{"translation": {"en": "a", "de": "b", "de": "c"}}',
    "no JSON": '{"en": "five" "de"}',
    "single quotes in JSON": "{'en': 'five', 'de': 'fünf'}",
    "JSON nested too deeply": "[" * 5000,
    "a number of thousands of digits": f"[{'9' * 5000}, 1]",
}
BAD_ROWS = {
    ("tsv", "one column"): "five fünf",
    ("tsv", "spaces in place of a tab"): "five    fünf",
    ("csv", "one column"): "five fünf",
    ("csv", "too many columns"): "five,fünf,cinq",
    ("csv", "text after a quote"): '"five"x,fünf',
    ("csv", "a quote that is not closed"): '"five,fünf',
}


def bad_records(files: Folder) -> Iterator[BadInput]:
    """Each malformed record in each format, packing and position."""
    good = [json.dumps(dict(zip(("en", "de"), pair, strict=True))) for pair in GOOD]
    for (cause, record), at in itertools.product(BAD_RECORDS.items(), (1, 3)):
        lines = [*good[:at], record, *good[at:]]
        for packing in ("plain", "gzip", "utf-16"):
            content = PACKINGS[packing]("\n".join(lines))
            path = files.file("a.jsonl", content)
            yield prepare(f"{cause} (JSON lines)", path, named=f"{path}:{at + 1}: ")
        for packing in ("plain", "xz"):
            path = files.file("a.json", PACKINGS[packing](f"[{','.join(lines)}]"))
            yield prepare(f"{cause} (JSON)", path, named=f"{path}:")
    for ((ending, cause), row), at in itertools.product(BAD_ROWS.items(), (0, 2, 4)):
        between = "\t" if ending == "tsv" else ","
        rows = ["en" + between + "de", *(between.join(pair) for pair in GOOD)]
        rows.insert(at + 1, row)
        for packing, pack in PACKINGS.items():
            path = files.file(f"a.{ending}", pack("\n".join(rows) + "\n"))
            yield prepare(f"{cause} ({ending}, {packing})", path, named=f"{path}:{at + 2}: ")


# --- files ----------------------------------------------------------------------------------------

FOREIGN = {
    "a zip archive": b"PK\x03\x04",
    "a Parquet file": b"PAR1",
    "a 7z archive": b"7z\xbc\xaf\x27\x1c\0\x04",
    "a rar archive": b"Rar!\x1a\x07\x01\0",
    "a PDF": b"%PDF-1.7",
    "a database": b"SQLite format 3\0",
    "an Arrow file": b"ARROW1\0\0",
    "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "a web page": b"<!DOCTYPE html><html>",
    "XML": b'<?xml version="1.0"?><tmx version="1.4">',
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a tar archive": b"a.tsv".ljust(257, b"\0") + b"ustar\x0000",
}
PAIRS = "".join(f"{en}\t{de}\n" for en, de in GOOD)
# What the file is to hold, its content, and what the message must name besides the file.
CONTENTS: dict[str, tuple[str, bytes | str, str]] = {
    "an empty TSV file": ("a.tsv", "", ": is empty"),
    "blank lines": ("a.tsv", "\n\n \n", ": is empty"),
    "an empty JSON file": ("a.json", "", ": is empty"),
    "an empty list": ("a.json", "[]", ": is empty"),
    "an empty text": ("a.txt", "", ": is empty"),
    "a header alone": ("a.csv", "en,de\n", ": is empty"),
    "an object in place of a list": (
        "a.json",
        '{"train": []}',
        ":1: has 'train'; expected",
    ),
    "a string in place of a list": ("a.json", '"text"', ": "),
    "text after the list": ("a.json", '[["a", "b"]]\nmore', ":2: is not JSON (Extra data"),
    "a list that does not end": ("a.json", '[["a", "b"],', ":1: is not JSON"),
    "a byte that is not UTF-8": ("a.tsv", b"one\teins\n\xff\tzwei\n", ":2: is not UTF-8"),
    "Latin-1": ("a.csv", "en,de\nfive,fünf\n".encode("latin-1"), ":2: is not UTF-8"),
    "Latin-1 JSON": ("a.json", '[["five",\n"fünf"]]'.encode("latin-1"), ":2: is not UTF-8"),
    "UTF-16 without its mark": ("a.tsv", PAIRS.encode("utf-16-le"), ": has zero bytes"),
    "half of UTF-16": ("a.tsv", PAIRS.encode("utf-16")[:-1], ": is not complete UTF-16"),
    "zstd": ("a.tsv.zst", b"\x28\xb5\x2f\xfd" + bytes(9), ": is "),
    "one text file": ("a.txt", "one\ntwo\n", ":1: has 1 column"),
    "one side alone": ("a.en", "one\n", ": is one side of parallel text; expected a.de"),
    "three columns of text": ("a.tsv", "one\teins\tuno\ntwo\tzwei\tdue\n", ":1: has 3 columns"),
    "a header of other languages": ("a.csv", "en,fr\na,b\n", ":1: has the columns 'en', 'fr'"),
    "a header without languages": ("a.tsv", "id\tx\ty\n1\ta\tb\n2\tc\td\n", ":1: has 3 columns"),
    "sentences of one language": ("a.tsv", "1\teng\tone\n2\teng\ttwo\n", ":1: has 3 columns"),
    "one pair": ("a.tsv", "one\teins\n", ": leaves 1 of 1 pairs"),
    "one pair, many times": ("a.tsv", "one\teins\n" * 9, ": leaves 1 of 9 pairs"),
    "empty sides": ("a.tsv", "one\t\n\teins\n \t \n", ": leaves 0 of 2 pairs"),
    "one source for all": ("a.tsv", "".join(f"one\t{n}\n" for n in range(30)), ": almost all of"),
    "a line of a megabyte": ("a.tsv", PAIRS + "x" * (1 << 20) + "yz\tb\n", ":5: is longer than"),
}


def bad_files(files: Folder) -> Iterator[BadInput]:
    """What is no readable file of pairs."""
    for (cause, content), name in itertools.product(
        FOREIGN.items(), ("a.tsv", "a.csv", "a.json", "a.jsonl", "a.txt", "a.gz")
    ):
        packed = gzip.compress(content) if name == "a.gz" else content
        path = files.file(name, packed)
        is_known = b"\0" not in content or cause.endswith("zip archive")
        yield prepare(cause, path, named=f"{path}: {'is ' if is_known else 'has zero bytes'}")
    for cause, (name, content, named) in CONTENTS.items():
        path = files.file(name, content)
        yield prepare(cause, path, named=f"{path}{named}")
        if "of a megabyte" not in cause:
            raw = content.encode() if isinstance(content, str) else content
            if raw and "zstd" not in cause and "one side" not in cause:
                path = files.file(name, gzip.compress(raw))
                yield prepare(f"{cause}, compressed", path, named=f"{path}{named}")
    whole = PAIRS * 200
    for packing in ("gzip", "bzip2", "xz"):
        packed = PACKINGS[packing](whole)
        for left in (12, len(packed) // 2, len(packed) - 3):
            path = files.file("a.tsv", packed[:left])
            yield prepare(f"{packing} cut off", path, named=f"{path}: ")
        middle = len(packed) // 2
        path = files.file("a.tsv", packed[:middle] + b"\xff\0\xff\0" + packed[middle + 4 :])
        yield prepare(f"{packing} damaged", path, named=str(path))


# --- paths and folders ----------------------------------------------------------------------------


def bad_paths(files: Folder) -> Iterator[BadInput]:
    """Paths that lead nowhere, and folders without usable files."""
    there, folder = files.file("train.tsv", PAIRS), files.new()
    os.mkfifo(folder / "fifo.tsv")
    (folder / "loop.tsv").symlink_to("loop.tsv")
    (folder / "dangling.tsv").symlink_to("gone.tsv")
    with socket.socket(socket.AF_UNIX) as unix:
        before = Path.cwd()
        os.chdir(folder)  # a socket's path may have 100 bytes
        unix.bind("socket.tsv")
        os.chdir(before)
    one_pair = {"tsv": "a\tb\n", "json": '[["a", "b"]]'}
    wrong = {
        "a FIFO": (folder / "fifo.tsv", "fifo.tsv: is a FIFO"),
        "a socket": (folder / "socket.tsv", "socket.tsv: is a socket"),
        "a device": (Path("/dev/zero"), "/dev/zero: is a device"),
        "a device that is empty": (Path("/dev/null"), "/dev/null: is a device"),
        "a link to itself": (folder / "loop.tsv", "loop.tsv: cannot be read"),
        "a link to nothing": (folder / "dangling.tsv", "dangling.tsv: does not exist"),
        "a missing file": (folder / "gone.tsv", "gone.tsv: does not exist"),
        "a missing folder": (folder / "gone" / "a.tsv", "gone/a.tsv: does not exist"),
        "a file as a folder": (there / "a.tsv", "a.tsv: "),
        "a path that is too long": (Path("x" * 300), ": cannot be read (File name too long"),
        "stdin": (Path("-"), "-: does not exist"),
        "an empty folder": (files.new(), ": has nothing; expected .json"),
        "a folder of other files": (files.folder(README_md="", a_doc=""), ": has README.md, a.doc"),
        "a split in another format": (
            files.folder(train_tsv=PAIRS, valid_doc="x"),
            "valid.doc: has no known ending",
        ),
        "no train split": (files.folder(test_tsv=PAIRS), "no train split: found test.tsv"),
        "two files without a split": (
            files.folder(a_tsv=PAIRS, b_tsv=PAIRS),
            "a.tsv: its name gives no split",
        ),
        "the same data twice": (
            files.folder(train_tsv=PAIRS, train_tsv_gz=PAIRS),
            "train.tsv.gz: hold the same data",
        ),
        "one side of a folder": (files.folder(train_en="a\n"), "train.en: is one side of"),
        "sides of different lengths": (
            files.folder(train_en="a\nb\n", train_de="a\n"),
            "train.en has 2 lines and",
        ),
        "an empty valid split": (
            files.folder(train_tsv=PAIRS, valid_tsv="\n"),
            "valid.tsv: is empty",
        ),
        "a valid split of empty pairs": (
            files.folder(train_tsv=PAIRS, valid_tsv="\t\n a\t\n"),
            "valid.tsv: ",
        ),
        "train is all in test": (
            files.folder(train_tsv=PAIRS, test_tsv=PAIRS, valid_tsv=one_pair["tsv"]),
            "train.tsv: leaves 0 of 4 pairs to use (4 overlap)",
        ),
        "a bad test split": (
            files.folder(train_tsv=PAIRS, test_json='[["a"]]'),
            "test.json: record 1: is a list of 1",
        ),
    }
    for name in ("one", "two"):
        (folder / "sub" / name).mkdir(parents=True)
    wrong["folders in a folder"] = (folder / "sub", "sub: has one/, two/")
    for cause, (path, named) in wrong.items():
        yield prepare(cause, path, named=named)
        yield BadInput(f"{cause} (train)", ("train", str(path), *SIDES, *NO_RUNS), named)
    other = files.file("other.tsv", PAIRS)
    yield prepare("two folders", folder, files.new(), named=f"{folder}: is a folder among 2 paths")
    yield prepare("a folder among files", there, folder, named=f"{folder}: is a folder among 2")
    yield prepare("the same file twice", there, there, named=f"{there}: is given twice")
    yield prepare("two files, one split", other, files.file("b.tsv", PAIRS), named="gives no split")
    texts = [files.file(name, "a\nb\n") for name in ("a.en", "a.fr", "b.eng")]
    yield prepare("another language's file", *texts[:2], named="a.fr: its ending names")
    yield prepare("one language twice", texts[0], texts[2], named="b.eng: their names say the same")
    short = files.file("s.de", "a\n")
    yield prepare("two texts of different lengths", texts[0], short, named="a.en has 2 lines and")
    yield prepare(
        "a cache that is a file", there, named=str(other), options=("--cache", str(other))
    )


# --- settings and options -------------------------------------------------------------------------

NO_RUNS = ("--project", "runs")
OUT_OF_RANGE = {
    "vocabulary": (0, 299, -1, 1 << 21),
    "max_length": (0, 3, 1 << 17),
    "sentences": (0, -5, 1 << 21),
    "tokens": (0, -1),
    "epochs": (0, -1),
    "max_steps": (0, -3),
    "lr": (-1, 1e9, "nan"),
    "warmup": (0,),
    "dropout": (-0.1, 1.5),
    "smoothing": (-1, 1),
    "clip_norm": (-1,),
    "accumulate": (0,),
    "ema": (-1, 1),
    "workers": (-1, 2000),
    "heads": (0,),
    "layers": (0, 5000),
    "width": (1,),
    "inner": (0,),
    "beam": (0, 5000),
    "keep": (0,),
    "save_every": (-1,),
    "seed": (-1,),
    "valid_sentences": (-1,),
    "grace": (-1,),
    "hang_after": (-1,),
}
NO_CHOICE = {
    "preset": "tiniest",
    "norm": "both",
    "schedule": "cosine",
    "precision": "fp8",
    "parallel": "tp",
    "on_oom": "ignore",
    "stop_code": "two",
    "plan": "pipelin",
    "on_nonfinite": "panic",
}
BAD_YAML: dict[str, tuple[bytes | str, str]] = {
    "no YAML": ("epochs: [1", ":1: is not YAML"),
    "a tab in YAML": ("epochs: 3\n\tlr: 1\n", ":2: is not YAML"),
    "a list of settings": ("- epochs: 3\n", ": expected a mapping, found a list"),
    "a text as settings": ("epochs", ": expected a mapping, found"),
    "empty settings of a text": ("--- |\n text\n", ": expected a mapping"),
    "an unknown key": ("epoch: 3\n", ": unknown key 'epoch' (did you mean 'epochs'?)"),
    "an unknown key that is a number": ("3: 3\n", ": unknown key 3"),
    "a key twice": ("lr: 1e-3\nepochs: 3\nlr: 1e-4\n", ":3: has the key 'lr' a second time"),
    "a nested key twice": ("data: {a: 1, a: 2}\n", ":1: has the key 'a' a second time"),
    "data that is a number": ("data: 3\n", ": data = 3: expected a path"),
    "data that is a list of numbers": ("data: [3]\n", ": data = [3]: expected a path"),
    "data that is a mapping": ("data: {train: a}\n", ": data = {'train': 'a'}: expected a path"),
    "text as a number": ("epochs: many\n", ": epochs = 'many': expected a whole number"),
    "a fraction as a whole number": ("epochs: 1.5\n", ": epochs = 1.5: expected a whole number"),
    "a number as true or false": ("joint: 3\n", ": joint = 3: expected true or false"),
    "a date that is none": ("epochs: 2024-13-45\n", ": has a value that cannot be read"),
    "a Python object": ("epochs: !!python/object:os.system {}\n", ":1: is not YAML"),
    "bytes that are not UTF-8": (b"lr: 1\n# \xff\n", ":2: is not UTF-8 text"),
    "a NUL": ("lr: \0", ": is not YAML"),
    "YAML nested too deeply": ("a: " + "[" * 3000, ": is nested too deeply"),
    "too much YAML": ("#" * ((1 << 18) + 1), ": has 262,145 bytes; expected at most"),
    "a number of thousands of digits": (f"epochs: {'9' * 5000}", ": has a value that cannot be"),
}


def bad_settings(files: Folder) -> Iterator[BadInput]:
    """Values of settings, as options and in a file, and files that hold no settings."""
    for name, values in OUT_OF_RANGE.items():
        flag = f"--{name.replace('_', '-')}"
        for value in values:
            yield BadInput("an option out of range", ("train", flag, str(value), *NO_RUNS), name)
            path = files.file("my.yaml", f"{name}: {value}\n")
            argv = ("train", "--config", str(path), *NO_RUNS)
            yield BadInput("a setting out of range in a file", argv, f"{path}: {name} = ")
        yield BadInput("text for a number", ("train", flag, "x", *NO_RUNS), flag)
    for name, value in NO_CHOICE.items():
        flag = f"--{name.replace('_', '-')}"
        yield BadInput("no such choice", ("train", flag, value, *NO_RUNS), value)
        path = files.file("my.yaml", f"{name}: {value}\n")
        yield BadInput(
            "no such choice in a file", ("train", "--config", str(path), *NO_RUNS), value
        )
    for cause, (content, named) in BAD_YAML.items():
        path = files.file("my.yaml", content)
        argv = ("train", "--config", str(path), *NO_RUNS)
        yield BadInput(f"settings: {cause}", argv, f"{path}{named}")
    fifo = files.new() / "my.yaml"
    os.mkfifo(fifo)
    for cause, path, named in (
        ("a FIFO of settings", fifo, ": is a FIFO"),
        ("a device of settings", Path("/dev/zero"), ": is a device"),
        ("a folder of settings", fifo.parent, ": cannot be read (Is a directory"),
        ("missing settings", fifo.parent / "none.yaml", ": cannot be read (No such file"),
    ):
        for argv in (("train", "--config", str(path), *NO_RUNS), ("plan", f"{path}")):
            if argv[0] == "train" or path.suffix == ".yaml":
                yield BadInput(f"{cause} ({argv[0]})", argv, f"{path}{named}")


def bad_options(files: Folder) -> Iterator[BadInput]:
    """Options and arguments that a command does not have, or that contradict each other."""
    commands = ("doctor", "plan", "train", "evaluate", "translate", "prepare", "bench", "report")
    for command in commands:
        yield BadInput("no such option", (command, "--no-such-option"), "--no-such-option")
    for command in ("trian", "", "--train", "prepare2"):
        yield BadInput("no such command", (command,), command)
    for command, flag in (("train", "--epochs"), ("prepare", "--src"), ("evaluate", "--beam")):
        yield BadInput("an option without its value", (command, flag), flag)
    for command in ("evaluate", "translate"):
        yield BadInput("no run is given", (command,), "Missing argument")
    for src, trg, named in (
        ("en", "en", "expected two different languages"),
        ("zh", "cmn", "expected two different languages"),
        ("zh-CN", "zh_CN", "expected two different languages"),
        ("", "en", "src = ''"),
        ("a b", "en", "src = 'a b'"),
        ("en", "d/e", "trg = 'd/e'"),
        ("汉", "en", "src = '汉'"),
        ("de", "en", "the built-in corpus is Chinese and English"),
        ("zh", "fr", "the built-in corpus is Chinese and English"),
    ):
        for command in ("prepare", "train"):
            argv = (command, "--src", src, "--trg", trg)
            yield BadInput(f"languages ({command}): {named}", argv, named)
    both = ("train", "--tokens", "10", "--sentences", "10")
    yield BadInput("two sizes of a batch", both, "--tokens 10 and --sentences 10")
    for name in ("vocabulary", "max-length"):
        yield BadInput("text for a number", ("prepare", f"--{name}", "x"), name)
        yield BadInput(
            "an option out of range", ("prepare", f"--{name}", "1"), name.replace("-", "_")
        )
    empty, there = files.new(), files.file("config.yaml", "epochs: [")
    for command, cause, run, named in itertools.chain.from_iterable(
        (
            (command, "a run that is missing", empty / "gone", "gone"),
            (command, "a run without settings", empty, str(empty)),
            (command, "a run that is a file", there, str(there)),
            (command, "a run with broken settings", there.parent, "config.yaml"),
        )
        for command in ("evaluate", "translate", "resume")
    ):
        argv = ("train", "--resume", str(run)) if command == "resume" else (command, str(run), "a")
        yield BadInput(f"{cause} ({command})", argv, named)
    for cause, content, named in (
        ("no plan", "plan: {streams: lots}\n", "streams = 'lots'"),
        ("a key twice in a plan", "plan: {pin: true, pin: false}\n", ":1: has the key 'pin'"),
        ("an unknown key in a plan", "plan: {stream: 2}\n", "unknown key 'stream'"),
        ("a plan that is a list", "[]", "expected a mapping"),
    ):
        path = files.file("p.yaml", content)
        yield BadInput(cause, ("plan", str(path)), named)
        yield BadInput(f"{cause} (train)", ("train", "--plan", str(path), *NO_RUNS), named)
    for cause, content, named in (
        ("no result", "{", ":1: is not JSON"),
        ("a result that is a list", "[]", ": expected a mapping"),
        ("a result of nothing", "{}", ""),
    ):
        path = files.file("r.json", content)
        yield BadInput(f"report: {cause}", ("report", str(path)), str(path) + named)


# --- running them ---------------------------------------------------------------------------------

GROUPS = (bad_records, bad_files, bad_paths, bad_settings, bad_options)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[BadInput]]:
    return {
        make.__name__: list(make(Folder(tmp_path_factory.mktemp(make.__name__)))) for make in GROUPS
    }


def outcome(argv: tuple[str, ...]) -> tuple[int, str, BaseException | None]:
    """Exit code, message, and an exception that would have been a traceback."""
    done = CliRunner().invoke(app, argv)
    found = done.exception
    if isinstance(found, HeadraceError):  # `main` prints it and exits with its code
        return found.exit_code, str(found), None
    said = " ".join(done.stderr.replace("│", " ").split())
    return done.exit_code, said, None if isinstance(found, SystemExit) else found


@pytest.mark.parametrize("group", [make.__name__ for make in GROUPS])
def test_bad_inputs_are_named(
    group: str,
    inputs: dict[str, list[BadInput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    command = typer.main.get_command(app)  # once, since it takes 40 ms
    monkeypatch.setattr("typer.testing._get_command", lambda app: command)
    monkeypatch.chdir(tmp_path)
    codes = (2,) if group in ("bad_settings", "bad_options") else (1, 2)
    wrong = []
    for bad in inputs[group]:
        begun = time.monotonic()
        code, message, crash = outcome(bad.argv)
        took_s = time.monotonic() - begun
        if crash is not None or code not in codes or bad.named not in message:
            wrong.append((bad, code, message[:300], repr(crash)))
        elif took_s > MAX_SECONDS or "\n" in message:
            wrong.append((bad, took_s, message[:300], None))
    assert not wrong, f"{len(wrong)} of {len(inputs[group])}: {wrong[:3]}"
    assert not list(tmp_path.rglob(".writing-*"))


def test_there_are_500_inputs_of_60_causes(inputs: dict[str, list[BadInput]]) -> None:
    everything = [bad for group in inputs.values() for bad in group]
    assert len(everything) >= 500
    assert len({bad.cause.partition(" (")[0] for bad in everything}) >= 60
