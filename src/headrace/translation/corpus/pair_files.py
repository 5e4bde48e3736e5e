"""Finds the files of a parallel corpus and reads sentence pairs from them.

Pairs are in one JSON, JSON lines or TSV file, or in two text files, line by line. Each file may be
gzipped. An error names the file and the line, or the number of the record.
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

from headrace.errors import CorpusError, usage_errors

#: A sentence in both languages: (src, trg).
Pair = tuple[str, str]
#: Called with the current task, how much of it is done, and the total (0 if unknown).
OnProgress = Callable[[str, int, int], None]
# Called with a message about each malformed record. It may raise, or return to skip the record.
OnMalformed = Callable[[str], None]

FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tsv": "tsv"}
# File names that begin so belong to this split.
SPLITS = {"train": "train", "val": "valid", "dev": "valid", "test": "test"}
# Corpora write Chinese both ways.
_LANGUAGE_ALIASES = ({"zh", "ch"},)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Sides:
    """The names of the two languages in keys, headers and file extensions."""

    src: str
    trg: str

    def __post_init__(self) -> None:
        for name, side in (("src", self.src), ("trg", self.trg)):
            if not side or not side.isascii() or re.search(r"[\s/\\.]", side):
                raise CorpusError(f"{name} = {side!r}: expected a language's name, such as 'en'")
        if self.trg.lower() in _names_of(self.src):
            raise CorpusError(
                f"src = {self.src!r} and trg = {self.trg!r}: expected two different languages"
            )

    def side_of(self, name: str) -> str | None:
        """'src' or 'trg' if `name` is that language, else None."""
        if name.lower() in _names_of(self.src):
            return "src"
        return "trg" if name.lower() in _names_of(self.trg) else None

    def __str__(self) -> str:
        return f"{self.src!r} and {self.trg!r}"


@dataclass(frozen=True, slots=True)
class PairFiles:
    """One file of pairs, or two text files (src, trg) whose lines correspond."""

    paths: tuple[Path, ...]
    format: str

    def __str__(self) -> str:
        return " and ".join(str(path) for path in self.paths)


@usage_errors()  # the files were named on the command line
def find_pair_files(data: Path | Sequence[Path], sides: Sides) -> dict[str, list[PairFiles]]:
    """The files of each split.

    One file, or two text files, are the train split. In a folder or a longer list, the beginning of
    each name says which split it is: train, val, dev or test.
    """
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
            raise CorpusError(f"{path}: does not exist; expected a file or folder of parallel text")
        if path.is_dir() and folder is None:
            raise CorpusError(
                f"{path}: is a folder among {len(files)} paths; expected either one folder or "
                "only files"
            )
    groups, unknown = _group_files(files, sides)
    if unknown and folder is None:
        raise CorpusError(f"{unknown[0]}: has no known extension; expected {_expected(sides)}")
    if not groups:
        found = ", ".join(path.name for path in files[:8]) or "nothing"
        raise CorpusError(f"{folder or data}: has {found}; expected {_expected(sides)}")
    if folder is None and len(groups) == 1:
        return {"train": groups}
    splits = _split_by_name(groups)
    for path in unknown:
        # Files of other languages are ignored, but not if a split has no other files.
        split = _split_of(path)
        if split is not None and split not in splits:
            raise CorpusError(f"{path}: has no known extension; expected {_expected(sides)}")
    return splits


def read_records(
    files: PairFiles, sides: Sides, on_malformed: OnMalformed
) -> Iterator[Pair | None]:
    """Yield the pairs unchanged, and None for each malformed record."""
    if files.format == "text":
        return _text_records(files, on_malformed)
    read = {"json": _json_records, "jsonl": _jsonl_records, "tsv": _tsv_records}[files.format]
    return read(files.paths[0], sides, on_malformed)


def _names_of(side: str) -> set[str]:
    return next((same for same in _LANGUAGE_ALIASES if side.lower() in same), {side.lower()})


def _expected(sides: Sides) -> str:
    return f"{', '.join(FORMATS)}, or a .{sides.src} and a .{sides.trg} file (each also .gz)"


def _stem_and_extension(path: Path) -> tuple[str, str]:
    """The stem and the extension of a file name, without `.gz`."""
    name = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
    stem, dot, extension = name.rpartition(".")
    return (stem, f".{extension.lower()}") if dot else (name, "")


def _group_files(files: list[Path], sides: Sides) -> tuple[list[PairFiles], list[Path]]:
    """Pair up text files. Returns all groups, and the files with an unknown extension."""
    groups: list[PairFiles] = []
    unknown: list[Path] = []
    texts: dict[Path, dict[str, Path]] = {}
    seen: dict[tuple[Path, str], Path] = {}
    for path in files:
        stem, extension = _stem_and_extension(path)
        side = sides.side_of(extension[1:])
        if extension not in FORMATS and side is None:
            unknown.append(path)
            continue
        kind = extension if extension in FORMATS else str(side)
        earlier = seen.setdefault((path.with_name(stem), kind), path)
        if earlier is not path:
            raise CorpusError(
                f"{earlier} and {path}: hold the same data; expected only one of them"
            )
        if extension in FORMATS:
            groups.append(PairFiles((path,), FORMATS[extension]))
        else:
            texts.setdefault(path.with_name(stem), {})[kind] = path
    for stem_path, found in texts.items():
        if len(found) == 1:
            other = sides.trg if "src" in found else sides.src
            raise CorpusError(
                f"{next(iter(found.values()))}: is one side of parallel text; "
                f"expected {stem_path.name}.{other} beside it"
            )
        groups.append(PairFiles((found["src"], found["trg"]), "text"))
    return groups, unknown


def _split_of(path: Path) -> str | None:
    return next((s for begin, s in SPLITS.items() if path.name.lower().startswith(begin)), None)


def _split_by_name(groups: list[PairFiles]) -> dict[str, list[PairFiles]]:
    splits: dict[str, list[PairFiles]] = {}
    without_split = []
    for files in groups:
        split = _split_of(files.paths[0])
        if split is None:
            without_split.append(files)
        else:
            splits.setdefault(split, []).append(files)
    if len(without_split) == 1 and "train" not in splits:
        splits["train"] = without_split
    elif without_split:
        raise CorpusError(
            f"{without_split[0]}: its name gives no split; "
            f"expected names that begin with {', '.join(SPLITS)}"
        )
    if "train" not in splits:
        found = ", ".join(path.name for files in groups for path in files.paths)
        raise CorpusError(f"no train split: found {found}; expected a name like train.jsonl")
    return {split: splits[split] for split in ("train", "valid", "test") if split in splits}


def _lines(path: Path) -> Iterator[bytes]:
    """Yield lines without their line ends. Only \\n ends a line: Unicode's other separators may
    occur inside a sentence."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file):
                start = 3 if number == 0 and line.startswith(b"\xef\xbb\xbf") else 0
                yield line[start:].rstrip(b"\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise CorpusError(f"{path}: is not a complete gzip file ({problem})") from problem
    except OSError as problem:
        raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem


def _decode(line: bytes, where: str, on_malformed: OnMalformed) -> str | None:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        found = f"byte {line[problem.start]:#04x} at column {problem.start + 1}"
        on_malformed(f"{where}: is not UTF-8 ({found}); expected UTF-8 text")
        return None


def _text_records(files: PairFiles, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    lengths = [0, 0]
    for number, lines in enumerate(itertools.zip_longest(*map(_lines, files.paths)), 1):
        lengths = [n + (line is not None) for n, line in zip(lengths, lines, strict=True)]
        if lengths[0] == lengths[1]:
            # Stop at the first malformed side, so that a pair is reported once.
            texts: list[str] = []
            for path, line in zip(files.paths, lines, strict=True):
                text = _decode(line, f"{path}:{number}", on_malformed)
                if text is None:
                    break
                texts.append(text)
            yield (texts[0], texts[1]) if len(texts) == 2 else None
    if lengths[0] != lengths[1]:
        (src, trg), (m, n) = files.paths, lengths
        raise CorpusError(
            f"{src} has {m:,} lines and {trg} has {n:,}; expected as many, one sentence per line"
        )


def _tsv_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    src, trg, width = 0, 1, 2
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _decode(line, where, on_malformed)
        if text is None:
            yield None
            continue
        columns = text.split("\t")
        if number == 1:
            named = [sides.side_of(column.strip()) for column in columns]
            if "src" in named and "trg" in named:
                src, trg, width = named.index("src"), named.index("trg"), len(columns)
                continue
            if any(named):
                found = ", ".join(repr(column) for column in columns)
                raise CorpusError(f"{where}: has the columns {found}; expected {sides}")
        if len(columns) != width:
            on_malformed(
                f"{where}: has {_count(len(columns), 'column')}; expected {width}, tab-separated"
            )
            yield None
        else:
            yield columns[src], columns[trg]


def _json_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    lines = list(_lines(path))
    if not any(line.strip() for line in lines):
        return
    for number, line in enumerate(lines, 1):
        _decode(line, f"{path}:{number}", _raise_error)
    try:
        content = json.loads(b"\n".join(lines))
    except json.JSONDecodeError as problem:
        hint = "; for one record per line, use .jsonl" if problem.msg == "Extra data" else ""
        found = f"{problem.msg}, column {problem.colno}"
        raise CorpusError(f"{path}:{problem.lineno}: is not JSON ({found}){hint}") from None
    except (ValueError, RecursionError) as problem:
        raise CorpusError(f"{path}: cannot be read as JSON ({problem})") from None
    if not isinstance(content, list):
        raise CorpusError(f"{path}: is {_describe(content)}; expected a list of records")
    for number, record in enumerate(content, 1):
        yield _pair(record, sides, f"{path}: record {number}", on_malformed)


def _jsonl_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _decode(line, where, on_malformed)
        try:
            record = json.loads(text) if text is not None else None
        except json.JSONDecodeError as problem:
            on_malformed(
                f"{where}: is not JSON ({problem.msg}, column {problem.colno}); "
                "expected one record per line"
            )
            yield None
        except (ValueError, RecursionError) as problem:
            on_malformed(
                f"{where}: cannot be read as JSON ({problem}); expected one record per line"
            )
            yield None
        else:
            yield _pair(record, sides, where, on_malformed) if text is not None else None


def _pair(record: Any, sides: Sides, where: str, on_malformed: OnMalformed) -> Pair | None:
    if isinstance(record, dict):
        by_side = {sides.side_of(key): key for key in reversed(record)}
        if "src" not in by_side or "trg" not in by_side:
            found = ", ".join(repr(key) for key in list(record)[:8]) or "no keys"
            on_malformed(f"{where}: has {found}; expected the keys {sides}")
            return None
        named = [(repr(by_side[side]), record[by_side[side]]) for side in ("src", "trg")]
    elif isinstance(record, list) and len(record) == 2:
        named = [("the first", record[0]), ("the second", record[1])]
    else:
        found = f"a list of {len(record)}" if isinstance(record, list) else _describe(record)
        on_malformed(
            f"{where}: is {found}; expected an object with {sides}, or a list of two strings"
        )
        return None
    for name, text in named:
        if not isinstance(text, str):
            on_malformed(f"{where}: {name} is {_describe(text)}; expected a string")
            return None
        broken = _SURROGATE.search(text)
        if broken:
            on_malformed(
                f"{where}: {name} has a lone surrogate (\\u{ord(broken[0]):x}); expected valid text"
            )
            return None
    return named[0][1], named[1][1]


def _raise_error(message: str) -> None:
    raise CorpusError(message)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe(value: object) -> str:
    """The type of a JSON value, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    return {int: "a number", float: "a number", str: "a string", list: "a list"}[type(value)]
