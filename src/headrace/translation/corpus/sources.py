"""Files of parallel text: which of them make up which split, and the records in each.

A source is one JSON, JSON-lines or TSV file, or two files of plain text that run in step. Each may
be gzipped. What cannot be used is said with its file and line, or its record's number.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError

#: The same sentence in both languages: (src, trg).
Pair = tuple[str, str]
#: Called with what is being done, how much of it is done, and how much there is (0: not known).
OnProgress = Callable[[str, int, int], None]
# Called with each malformed record's description: raises it, or counts it.
Bad = Callable[[str], None]

FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv"}
# How the name of a split's files begins.
SPLITS = {"train": "train", "val": "valid", "dev": "valid", "test": "test"}
# One language, written both ways in the wild.
_SAME = ({"zh", "ch"},)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Sides:
    """What the two sides are called, in keys, headers and file extensions."""

    src: str
    trg: str

    def __post_init__(self) -> None:
        for name, side in (("src", self.src), ("trg", self.trg)):
            if not side or not side.isascii() or re.search(r"[\s/\\.]", side):
                raise CorpusError(f"{name} = {side!r}: expected a language's name, such as 'en'")
        if self.trg.lower() in _names(self.src):
            raise CorpusError(
                f"src = {self.src!r} and trg = {self.trg!r}: expected two different languages"
            )

    def of(self, name: str) -> str | None:
        """Which side a key, column or extension names: 'src', 'trg' or neither."""
        if name.lower() in _names(self.src):
            return "src"
        return "trg" if name.lower() in _names(self.trg) else None

    def __str__(self) -> str:
        return f"{self.src!r} and {self.trg!r}"


@dataclass(frozen=True, slots=True)
class Source:
    """One file of records, or two files of text (src, trg)."""

    files: tuple[Path, ...]
    format: str

    def __str__(self) -> str:
        return " and ".join(str(path) for path in self.files)


def find_sources(data: Path | Sequence[Path], sides: Sides) -> dict[str, list[Source]]:
    """The sources of each split. One file, or one pair of files, is all for training; a folder,
    or a longer list, is told apart by names that begin with train, val, dev or test."""
    folder = None
    if isinstance(data, str | Path):
        path = Path(data)
        if path.is_dir():
            folder = path
            files = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
        else:
            files = [path]
    else:
        files = sorted(Path(path) for path in data)
    for path in files:
        if not path.exists():
            raise CorpusError(f"{path}: is not there; expected a file or folder of parallel text")
        if path.is_dir() and folder is None:
            raise CorpusError(
                f"{path}: is one of {len(files)} that were given, and a folder; expected one "
                "folder alone, or files"
            )
    sources, unknown = _sources(files, sides)
    if unknown and folder is None:
        raise CorpusError(f"{unknown[0]}: has no known extension; expected {_expected(sides)}")
    if not sources:
        found = ", ".join(path.name for path in files[:8]) or "nothing"
        raise CorpusError(f"{folder or data}: has {found}; expected {_expected(sides)}")
    if folder is None and len(sources) == 1:
        return {"train": sources}
    splits = _split_by_name(sources)
    for path in unknown:
        # A third language beside the two is no mistake; a split that would be missed is one.
        split = _split_of(path)
        if split is not None and split not in splits:
            raise CorpusError(f"{path}: has no known extension; expected {_expected(sides)}")
    return splits


def records(source: Source, sides: Sides, bad: Bad) -> Iterator[Pair | None]:
    """The pairs of a source as they stand there; None for each one that `bad` was told of."""
    if source.format == "text":
        return _text_records(source, bad)
    read = {"json": _json_records, "jsonl": _jsonl_records, "tsv": _tsv_records}[source.format]
    return read(source.files[0], sides, bad)


def _names(side: str) -> set[str]:
    return next((same for same in _SAME if side.lower() in same), {side.lower()})


def _expected(sides: Sides) -> str:
    return f"{', '.join(FORMATS)}, or a .{sides.src} and a .{sides.trg} file (each also .gz)"


def _parts(path: Path) -> tuple[str, str]:
    """(stem, extension), without any `.gz`."""
    name = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
    stem, dot, extension = name.rpartition(".")
    return (stem, f".{extension.lower()}") if dot else (name, "")


def _sources(files: list[Path], sides: Sides) -> tuple[list[Source], list[Path]]:
    """Files put together to sources, and those of no known kind."""
    sources: list[Source] = []
    unknown: list[Path] = []
    texts: dict[Path, dict[str, Path]] = {}
    seen: dict[tuple[Path, str], Path] = {}
    for path in files:
        stem, extension = _parts(path)
        side = sides.of(extension[1:])
        if extension not in FORMATS and side is None:
            unknown.append(path)
            continue
        kind = extension if extension in FORMATS else str(side)
        twin = seen.setdefault((path.with_name(stem), kind), path)
        if twin is not path:
            raise CorpusError(f"{twin} and {path}: hold the same side; expected one of them")
        if extension in FORMATS:
            sources.append(Source((path,), FORMATS[extension]))
        else:
            texts.setdefault(path.with_name(stem), {})[kind] = path
    for stem_path, found in texts.items():
        if len(found) == 1:
            other = sides.trg if "src" in found else sides.src
            raise CorpusError(
                f"{next(iter(found.values()))}: is one side of parallel text; "
                f"expected {stem_path.name}.{other} with it"
            )
        sources.append(Source((found["src"], found["trg"]), "text"))
    return sources, unknown


def _split_of(path: Path) -> str | None:
    return next((s for begin, s in SPLITS.items() if path.name.lower().startswith(begin)), None)


def _split_by_name(sources: list[Source]) -> dict[str, list[Source]]:
    splits: dict[str, list[Source]] = {}
    nameless = []
    for source in sources:
        split = _split_of(source.files[0])
        if split is None:
            nameless.append(source)
        else:
            splits.setdefault(split, []).append(source)
    if len(nameless) == 1 and "train" not in splits:
        splits["train"] = nameless
    elif nameless:
        raise CorpusError(
            f"{nameless[0]}: belongs to no split; "
            f"expected names that begin with {', '.join(SPLITS)}"
        )
    if "train" not in splits:
        found = ", ".join(path.name for source in sources for path in source.files)
        raise CorpusError(f"nothing to train on: found {found}; expected a name like train.jsonl")
    return {split: splits[split] for split in ("train", "valid", "test") if split in splits}


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their ends. Only a newline ends one: a text may hold Unicode's other ends."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file):
                start = 3 if number == 0 and line.startswith(b"\xef\xbb\xbf") else 0
                yield line[start:].rstrip(b"\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise CorpusError(f"{path}: is not a whole gzip file ({problem})") from problem
    except OSError as problem:
        raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem


def _text(line: bytes, where: str, bad: Bad) -> str | None:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        found = f"byte {line[problem.start]:#04x} at column {problem.start + 1}"
        bad(f"{where}: is not UTF-8 ({found}); expected UTF-8 text")
        return None


def _text_records(source: Source, bad: Bad) -> Iterator[Pair | None]:
    lengths = [0, 0]
    for number, lines in enumerate(itertools.zip_longest(*map(_lines, source.files)), 1):
        lengths = [n + (line is not None) for n, line in zip(lengths, lines, strict=True)]
        if lengths[0] == lengths[1]:
            # One after the other: a line that is malformed on both sides is one bad record.
            texts: list[str] = []
            for path, line in zip(source.files, lines, strict=True):
                text = _text(line, f"{path}:{number}", bad)
                if text is None:
                    break
                texts.append(text)
            yield (texts[0], texts[1]) if len(texts) == 2 else None
    if lengths[0] != lengths[1]:
        (src, trg), (m, n) = source.files, lengths
        raise CorpusError(
            f"{src} has {m:,} lines and {trg} has {n:,}; expected a sentence a line, in step"
        )


def _tsv_records(path: Path, sides: Sides, bad: Bad) -> Iterator[Pair | None]:
    src, trg, width = 0, 1, 2
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _text(line, where, bad)
        if text is None:
            yield None
            continue
        columns = text.split("\t")
        if number == 1:
            named = [sides.of(column.strip()) for column in columns]
            if "src" in named and "trg" in named:
                src, trg, width = named.index("src"), named.index("trg"), len(columns)
                continue
            if any(named):
                found = ", ".join(repr(column) for column in columns)
                raise CorpusError(f"{where}: has the columns {found}; expected {sides}")
        if len(columns) != width:
            bad(f"{where}: has {_count(len(columns), 'column')}; expected {width}, a tab between")
            yield None
        else:
            yield columns[src], columns[trg]


def _json_records(path: Path, sides: Sides, bad: Bad) -> Iterator[Pair | None]:
    lines = list(_lines(path))
    if not any(line.strip() for line in lines):
        return
    for number, line in enumerate(lines, 1):
        _text(line, f"{path}:{number}", _fatal)
    try:
        content = json.loads(b"\n".join(lines))
    except json.JSONDecodeError as problem:
        hint = "; a record a line is a .jsonl file" if problem.msg == "Extra data" else ""
        found = f"{problem.msg}, column {problem.colno}"
        raise CorpusError(f"{path}:{problem.lineno}: is not JSON ({found}){hint}") from None
    except (ValueError, RecursionError) as problem:
        raise CorpusError(f"{path}: is not JSON that can be read ({problem})") from None
    if not isinstance(content, list):
        raise CorpusError(f"{path}: is {_kind(content)}; expected a list of records")
    for number, record in enumerate(content, 1):
        yield _pair(record, sides, f"{path}: record {number}", bad)


def _jsonl_records(path: Path, sides: Sides, bad: Bad) -> Iterator[Pair | None]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _text(line, where, bad)
        try:
            record = json.loads(text) if text is not None else None
        except json.JSONDecodeError as problem:
            bad(
                f"{where}: is not JSON ({problem.msg}, column {problem.colno}); "
                "expected a record a line"
            )
            yield None
        except (ValueError, RecursionError) as problem:
            bad(f"{where}: is not JSON that can be read ({problem}); expected a record a line")
            yield None
        else:
            yield _pair(record, sides, where, bad) if text is not None else None


def _pair(record: Any, sides: Sides, where: str, bad: Bad) -> Pair | None:
    if isinstance(record, dict):
        by_side = {sides.of(key): key for key in reversed(record)}
        if "src" not in by_side or "trg" not in by_side:
            found = ", ".join(repr(key) for key in list(record)[:8]) or "no keys"
            bad(f"{where}: has {found}; expected the keys {sides}")
            return None
        named = [(repr(by_side[side]), record[by_side[side]]) for side in ("src", "trg")]
    elif isinstance(record, list) and len(record) == 2:
        named = [("the first", record[0]), ("the second", record[1])]
    else:
        found = f"a list of {len(record)}" if isinstance(record, list) else _kind(record)
        bad(f"{where}: is {found}; expected an object with {sides}, or a list of two texts")
        return None
    for name, text in named:
        if not isinstance(text, str):
            bad(f"{where}: {name} is {_kind(text)}; expected text")
            return None
        broken = _SURROGATE.search(text)
        if broken:
            bad(f"{where}: {name} has half a character (\\u{ord(broken[0]):x}); expected text")
            return None
    return named[0][1], named[1][1]


def _fatal(message: str) -> None:
    raise CorpusError(message)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    return {int: "a number", float: "a number", str: "a text", list: "a list"}[type(value)]
