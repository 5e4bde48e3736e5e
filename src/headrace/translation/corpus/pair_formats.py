"""Reads sentence pairs: from JSON, JSON lines, CSV or TSV, or from two text files, line by line.

The name says which (`pair_files.FORMATS`). An error names the file and the line, or the number of
the record.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import Pair, PairFiles
from headrace.translation.corpus.text_files import head, line_problem, lines, whole_text

# Called with a message about each malformed record. It may raise, or return to skip the record.
OnMalformed = Callable[[str], None]
_Records = Iterator[Pair | None]

_SAMPLE_ROWS = 100
_MAYBE_CUT = 1 << 14  # characters; a longer beginning may end within a line
_DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon"}
# Columns beside the sentences: numbers and references such as 1:17 or s42, licences, links,
# languages.
_NO_SENTENCES = (
    re.compile(r"[!-~]*\d[!-~]*"),
    re.compile(r"CC[- ]BY.*|CC0.*|.*tatoeba\.org.*", re.IGNORECASE),
    re.compile(r"https?://\S+"),
    re.compile(r"[a-z]{2,3}([-_][A-Za-z]+)?"),
    re.compile(""),
)


@dataclass(frozen=True, slots=True)
class Recognized:
    """Files of pairs. `read` yields the pairs unchanged, and None for each malformed record. As
    text, what is read: "reading my.csv: CSV with a header, columns en and zh"."""

    files: PairFiles
    description: str
    read: Callable[[OnMalformed], _Records]

    def __str__(self) -> str:
        return f"reading {self.files}: {self.description}"


def recognize(files: PairFiles, sides: Sides) -> Recognized:
    """Look at the beginning of a file. Raises if it holds no pairs in its format."""
    return _FORMATS[files.format](files, sides)


def _sample(path: Path) -> list[str]:
    """The first lines that are not blank, without one that may be cut off."""
    text = head(path)
    found = text.split("\n")
    if len(text) >= _MAYBE_CUT and len(found) > 1:
        found.pop()
    return [line.rstrip("\r") for line in found if line.strip()][:_SAMPLE_ROWS]


# --- two text files -------------------------------------------------------------------------------


def _texts(files: PairFiles, sides: Sides) -> Recognized:
    samples = [_sample(path) for path in files.paths]
    if sides.are_swapped(list(zip(*samples, strict=False))):
        files = PairFiles(files.paths[::-1], files.format)
    described = f"two text files, the first is {sides.src}, the second {sides.trg}"
    return Recognized(files, described, partial(_text_records, files))


def _text_records(files: PairFiles, on_malformed: OnMalformed) -> _Records:
    src, trg = files.paths
    lengths = [0, 0]
    for number, both in enumerate(itertools.zip_longest(lines(src), lines(trg)), 1):
        lengths = [n + (line is not None) for n, line in zip(lengths, both, strict=True)]
        if lengths[0] == lengths[1]:
            found = zip(files.paths, map(line_problem, both), strict=True)
            problem = next((f"{path}:{number}: {why}" for path, why in found if why), None)
            if problem is not None:
                on_malformed(problem)
            yield both if problem is None else None
    if lengths[0] != lengths[1]:
        raise CorpusError(
            f"{src} has {lengths[0]:,} lines and {trg} has {lengths[1]:,}; expected as many, one "
            "sentence per line"
        )


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """Which columns are src and trg. `header` says whether the first line names them, `quoted`
    whether cells may be in quotes, as in CSV."""

    delimiter: str
    quoted: bool
    header: bool
    width: int
    src: int
    trg: int


def _table(files: PairFiles, sides: Sides) -> Recognized:
    (path,) = files.paths
    sample = _sample(path)
    delimiter = _find_delimiter(sample, sides) if files.format == "csv" else "\t"
    first = sample[0].split(delimiter) if sample else []
    rows = _split(sample, delimiter, quoted := files.format == "csv" or all(map(_in_quotes, first)))
    table = _find_columns(path, rows, sides, delimiter, quoted)
    if table.header:
        names = [rows[0][at].strip() for at in (table.src, table.trg)]
        described = f"with a header, columns {names[0]} and {names[1]}"
    else:
        described = (
            f"without a header, column {table.src + 1} is {sides.src}, "
            f"column {table.trg + 1} is {sides.trg}"
        )
    kind = {"\t": "TSV", ",": "CSV", ";": "CSV with semicolons"}[delimiter]
    return Recognized(files, f"{kind} {described}", partial(_table_records, path, table))


def _find_columns(
    path: Path, rows: list[list[str]], sides: Sides, delimiter: str, quoted: bool
) -> _Table:
    first, width = ([cell.strip() for cell in rows[0]], len(rows[0])) if rows else ([], 2)

    def is_name(at: int) -> bool:
        """Whether a first cell is a heading: a language code that is in each row is none."""
        return len(rows) < 2 or at >= len(rows[1]) or rows[1][at].strip() != first[at]

    named = sides.find_in(first)
    if named is not None and any(map(is_name, named)):
        return _Table(delimiter, quoted, True, width, *named)
    if any(sides.side_of(c) and len(c) < 4 and is_name(at) for at, c in enumerate(first)):
        raise CorpusError(
            f"{path}:1: has the columns {_listed(first)}; expected {sides}, as --src and --trg "
            "say. Give two of its columns there, or rename them"
        )
    full = [row for row in rows if len(row) == width]
    found = [at for at in range(width) if width == 2 or _has_sentences([row[at] for row in full])]
    if len(found) != 2:
        raise CorpusError(
            f"{path}:1: has {_count(width)} ({_listed(first)}); expected 2, "
            f"{_DELIMITERS[delimiter]}-separated, or a first line that names them: {sides}. "
            "If it has other names, give two of them as --src and --trg"
        )
    src, trg = found
    if sides.are_swapped([(row[src], row[trg]) for row in full]):
        src, trg = trg, src
    return _Table(delimiter, quoted, False, width, src, trg)


def _has_sentences(cells: list[str]) -> bool:
    return not any(all(map(known.fullmatch, map(str.strip, cells))) for known in _NO_SENTENCES)


def _find_delimiter(sample: list[str], sides: Sides) -> str:
    """Tab, comma or semicolon: with which the first line names the languages, else with which
    the rows have the same number of columns."""
    splits = {delimiter: _split(sample, delimiter, True) for delimiter in _DELIMITERS}
    for delimiter, rows in splits.items():
        if rows and sides.find_in([cell.strip() for cell in rows[0]]):
            return delimiter
    for delimiter, rows in splits.items():
        widths = {len(row) for row in rows[:-1] or rows}  # the last one may be cut off
        if len(widths) == 1 and widths != {1}:
            return delimiter
    return ","


def _split(sample: list[str], delimiter: str, quoted: bool) -> list[list[str]]:
    if not quoted:
        return [line.split(delimiter) for line in sample]
    return list(csv.reader((f"{line}\n" for line in sample), delimiter=delimiter))


def _table_records(path: Path, table: _Table, on_malformed: OnMalformed) -> _Records:
    rows = _csv_rows(path, table.delimiter) if table.quoted else _tsv_rows(path, table)
    for number, row in itertools.islice(rows, int(table.header), None):
        if isinstance(row, list) and len(row) == table.width:
            yield row[table.src], row[table.trg]
            continue
        problem = row
        if isinstance(row, list):
            problem = (
                f"has {_count(len(row))}; expected {table.width}, "
                f"{_DELIMITERS[table.delimiter]}-separated"
            )
            if not table.quoted and any(cell.startswith('"') for cell in row):
                problem += ". If cells are in quotes, name the file .csv"
        on_malformed(f"{path}:{number}: {problem}")
        yield None


# The number of the line in which a row begins, and its cells, or why it is malformed.
_Rows = Iterator[tuple[int, list[str] | str]]


def _tsv_rows(path: Path, table: _Table) -> _Rows:
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            problem = line_problem(line)
            cells = line.split(table.delimiter)
            if table.header and '"' in line:
                # Programs that write a header also double the quotes inside of a quoted cell.
                cells = [_unquoted(cell) if '""' in cell[1:-1] else cell for cell in cells]
            yield number, cells if problem is None else problem


def _in_quotes(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _unquoted(cell: str) -> str:
    """The text of a cell that is quoted because it has quotes; any other cell unchanged."""
    is_quoted = _in_quotes(cell) and '"' not in cell[1:-1].replace('""', "")
    return cell[1:-1].replace('""', '"') if is_quoted else cell


def _csv_rows(path: Path, delimiter: str) -> _Rows:
    reader = csv.reader((f"{line}\n" for line in lines(path)), delimiter=delimiter, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as problem:
            found = str(problem)
            if "field limit" in found or "unexpected end" in found:
                found = "a quote is not closed"
            yield begin, f"is not CSV ({found}); expected quotes in pairs"
            continue
        if row is None:
            return
        if any(map(str.strip, row)):
            yield begin, next(filter(None, map(line_problem, row)), None) or row


# --- JSON -----------------------------------------------------------------------------------------


def _json(files: PairFiles, sides: Sides) -> Recognized:
    (path,) = files.paths
    begin = head(path).lstrip()
    # Many programs write JSON lines and name them .json.
    if files.format == "json" and not begin.startswith("{"):
        return Recognized(files, "a JSON list", partial(_json_records, path, sides))
    return Recognized(files, "JSON lines", partial(_jsonl_records, path, sides))


def _json_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> _Records:
    text = whole_text(path)
    try:
        found = _DECODER.decode(text) if text.strip() else []
    except json.JSONDecodeError as problem:
        why = f"{problem.msg}, column {problem.colno}"
        raise CorpusError(f"{path}:{problem.lineno}: is not JSON ({why})") from None
    except (ValueError, RecursionError) as problem:
        raise CorpusError(f"{path}: cannot be read as JSON ({problem})") from None
    if not isinstance(found, list):
        raise CorpusError(f"{path}: is {_describe(found)}; expected a list of records")
    for number, record in enumerate(found, 1):
        yield _or_report(_pair(record, sides), f"{path}: record {number}", on_malformed)


def _jsonl_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> _Records:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        problem, record = line_problem(line), None
        try:
            record = None if problem else _DECODER.decode(line)
        except json.JSONDecodeError as error:
            problem = (
                f"is not JSON ({error.msg}, column {error.colno}); expected one record per line"
            )
        except (ValueError, RecursionError) as error:
            problem = f"cannot be read as JSON ({error}); expected one record per line"
        found = _pair(record, sides) if problem is None else problem
        yield _or_report(found, f"{path}:{number}", on_malformed)


def _or_report(found: Pair | str, where: str, on_malformed: OnMalformed) -> Pair | None:
    """The pair; None if it is a message about a malformed record."""
    if isinstance(found, tuple):
        return found
    on_malformed(f"{where}: {found}")
    return None


class _Repeating(dict[str, Any]):
    """A JSON object that has a key twice. Python's parser would take the last one silently."""


def _object(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) == len(items):
        return found
    return _Repeating(Counter(name for name, _ in items).most_common(1))


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _pair(record: Any, sides: Sides) -> Pair | str:
    """The texts of a record, or what is wrong with it."""
    if isinstance(record, dict):
        # Hugging Face's datasets: {"id": "7", "translation": {"en": …, "zh": …}}
        inner = record.get("translation")
        texts = inner if isinstance(inner, dict) else record
        for one in (record, texts):
            if isinstance(one, _Repeating):
                ((key, count),) = one.items()
                return f"has the key {key[:80]!r} {count} times; expected each key once"
        keys = list(texts)
        found = _find_in(sides, tuple(keys))
        if found is None:
            named = ", ".join(map(repr, keys[:8])) or "no keys"
            return f"has {named}; expected the keys {sides}"
        pair = {repr(keys[at]): texts[keys[at]] for at in found}
    elif isinstance(record, list) and len(record) == 2:
        pair = {"the first": record[0], "the second": record[1]}
    else:
        kind = f"a list of {len(record)}" if isinstance(record, list) else _describe(record)
        return f"is {kind}; expected an object with {sides}, or a list of two strings"
    for name, text in pair.items():
        if not isinstance(text, str):
            return f"{name} is {_describe(text)}; expected a string"
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            lone = ord(text[problem.start])
            return f"{name} has a lone surrogate (\\u{lone:x}); expected valid text"
    src, trg = pair.values()
    return src, trg


@lru_cache(maxsize=64)  # records of one file have the same keys
def _find_in(sides: Sides, keys: tuple[str, ...]) -> tuple[int, int] | None:
    return sides.find_in(keys)


_FORMATS: dict[str, Callable[[PairFiles, Sides], Recognized]] = {
    "json": _json,
    "jsonl": _json,
    "tsv": _table,
    "csv": _table,
    "text": _texts,
}


def _count(columns: int) -> str:
    return f"{columns} column{'' if columns == 1 else 's'}"


def _listed(cells: Sequence[str]) -> str:
    short = [repr(cell if len(cell) <= 40 else f"{cell[:39]}…") for cell in cells[:8]]
    return ", ".join(short) + (", …" if len(cells) > 8 else "")


def _describe(value: object) -> str:
    """The type of a JSON value, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    return {int: "a number", float: "a number", str: "a string", list: "a list"}[type(value)]
