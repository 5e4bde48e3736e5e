"""Recognises the format of files with sentence pairs, and reads the pairs.

Pairs are in one JSON, JSON lines, TSV or CSV file, or in two text files, line by line. An error
names the file and the line, or the number of the record.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import Pair, PairFiles
from headrace.translation.corpus.text_files import (
    MAX_LINE_BYTES,
    head,
    lines,
    packing,
    whole_text,
)

# Called with a message about each malformed record. It may raise, or return to skip the record.
OnMalformed = Callable[[str], None]

_SURROGATE = re.compile("[\ud800-\udfff]")
_SAMPLE_ROWS = 100
_MAYBE_CUT_BYTES = 1 << 15  # a longer beginning may be cut within a line
_EXPECTED_UTF8 = "expected UTF-8 text. Convert it from its encoding, such as iconv -f GBK -t UTF-8"
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
class Columns:
    """Which columns of a table are src and trg. `header` says whether its first line names them."""

    delimiter: str
    src: int
    trg: int
    width: int
    header: bool
    quoted: bool
    names: tuple[str, str]

    def __str__(self) -> str:
        name = "TSV" if self.delimiter == "\t" else "CSV"
        header = "with a header" if self.header else "without a header"
        if self.delimiter == ";":
            name += " with semicolons"
            header = "and a header" if self.header else "and without a header"
        src, trg = self.names
        if self.header:
            return f"{name} {header}, columns {src} and {trg}"
        return f"{name} {header}, column {self.src + 1} is {src}, column {self.trg + 1} is {trg}"


@dataclass(frozen=True, slots=True)
class Recognized:
    """A file's format as its content shows: json, jsonl, table or text. Tables have columns."""

    files: PairFiles
    format: str
    columns: Columns | None = None
    names: tuple[str, str] = ("src", "trg")

    def __str__(self) -> str:
        """What is read, in words: "reading my.csv: CSV with a header, columns en and zh"."""
        packed = sorted({packing(path) for path in self.files.paths} - {""})
        kind = {
            "json": "a JSON list",
            "jsonl": "JSON lines",
            "text": f"two text files, the first is {self.names[0]}, the second {self.names[1]}",
            "table": str(self.columns),
        }[self.format]
        return f"reading {self.files}: {kind}" + (f" ({', '.join(packed)})" if packed else "")


def recognize(files: PairFiles, sides: Sides) -> Recognized:
    """Look at the beginning of a file. Raises if it holds no pairs in a known format."""
    begins = [head(path) for path in files.paths]
    for path, begin in zip(files.paths, begins, strict=True):
        _require_line_feeds(path, begin)
    if files.format == "text":
        samples = [_sample(begin) for begin in begins]
        if sides.are_swapped(list(zip(*samples, strict=False))):
            files = PairFiles(files.paths[::-1], "text")
        return Recognized(files, "text", names=(sides.src, sides.trg))
    path, begin, format_ = files.paths[0], begins[0], files.format
    if format_ == "unknown":
        format_ = _guess(path, begin, sides)
    if format_ in ("json", "jsonl"):
        return Recognized(files, _json_kind(begin, format_))
    return Recognized(files, "table", _find_columns(path, begin, sides, format_))


def read_records(
    recognized: Recognized, sides: Sides, on_malformed: OnMalformed
) -> Iterator[Pair | None]:
    """Yield the pairs unchanged, and None for each malformed record."""
    files = recognized.files
    if recognized.format == "text":
        return _text_records(files, on_malformed)
    if recognized.columns is not None:
        return _table_records(files.paths[0], recognized.columns, on_malformed)
    read = {"json": _json_records, "jsonl": _jsonl_records}[recognized.format]
    return read(files.paths[0], sides, on_malformed)


# --- recognising ----------------------------------------------------------------------------------


def _sample(begin: bytes, limit: int | None = _SAMPLE_ROWS) -> list[str]:
    """The first lines that are not blank, without one that may be cut off."""
    found = begin.split(b"\n")
    if len(found) > 1 and len(begin) >= _MAYBE_CUT_BYTES:
        found.pop()
    texts = (line.decode("utf-8", errors="replace").rstrip("\r") for line in found)
    return list(itertools.islice((text for text in texts if text.strip()), limit))


def _require_line_feeds(path: Path, begin: bytes) -> None:
    """Raise if lines end with carriage returns only, as old programs for the Mac write them: the
    whole file would be one line. JSON may have them between its values."""
    text = begin.strip()
    if b"\r" in text and b"\n" not in begin and not text.startswith((b"[", b"{")):
        raise CorpusError(
            f"{path}: its lines end with carriage returns (\\r) only; expected line feeds (\\n). "
            "Convert it: tr '\\r' '\\n' < old > new"
        )


def _guess(path: Path, begin: bytes, sides: Sides) -> str:
    """The format of a file whose name says nothing."""
    sample = _sample(begin)
    if not sample:
        raise CorpusError(f"{path}: is empty; expected pairs of {sides}")
    if sample[0].lstrip()[0] in "[{":
        return "json"
    if sum("\t" in line for line in sample) > len(sample) / 2:
        return "tsv"
    if any(sides.find_in(_split_row(sample[0], mark)) for mark in ",;"):
        return "csv"
    raise CorpusError(
        f"{path}: has one column of text ({_short(sample[0])}); expected two columns with a tab "
        f"between them, JSON, CSV whose first line names {sides}, or two text files"
    )


def _json_kind(begin: bytes, format_: str) -> str:
    """ "json" for one list, "jsonl" for a record per line; files are often named for the other."""
    sample = _sample(begin)
    if not sample:
        return format_
    try:
        first = json.loads(sample[0])
    except (ValueError, RecursionError):
        return "json" if format_ == "json" or sample[0].strip() == "[" else "jsonl"
    if isinstance(first, dict):
        # {"train": [...]} in one line is no record.
        is_record = all(isinstance(value, str | dict) for value in first.values())
        return "jsonl" if is_record or len(sample) > 1 else format_
    if isinstance(first, list) and any(isinstance(record, list | dict) for record in first):
        return "json"
    return "jsonl" if len(sample) > 1 else format_


def _find_columns(path: Path, begin: bytes, sides: Sides, format_: str) -> Columns:
    """The columns of a table with sentence pairs."""
    sample = _sample(begin)
    delimiter = "\t" if format_ == "tsv" else _find_delimiter(sample, sides)
    quoted = (
        format_ == "csv"
        or _has_only_quoted_cells(sample, delimiter)
        or _has_quoted_lines(_sample(begin, limit=None), delimiter)
    )
    rows = _split_rows(sample, delimiter) if quoted else [line.split(delimiter) for line in sample]
    if not rows:
        return Columns(delimiter, 0, 1, 2, False, quoted, (sides.src, sides.trg))
    first, width = [cell.strip() for cell in rows[0]], len(rows[0])
    named = sides.find_in(first)
    if named is not None and not all(_is_repeated(rows, at) for at in named):
        names = first[named[0]], first[named[1]]
        return Columns(delimiter, *named, width, True, quoted, names)
    header_error = CorpusError(
        f"{path}:1: has the columns {_listed(first)}; expected {sides}, as --src and --trg say. "
        "Give two of its columns there, or rename them"
    )
    if any(
        sides.side_of(name) and len(name) < 4 and not _is_repeated(rows, at)
        for at, name in enumerate(first)
    ):
        raise header_error
    src, trg = 0, 1
    if width > 2:
        with_sentences = [
            at for at in range(width) if _has_sentences(rows, at, width, header_error)
        ]
        if len(with_sentences) != 2:
            raise CorpusError(
                f"{path}:1: has {width} columns ({_listed(first)}); expected 2, "
                f"{_DELIMITERS[delimiter]}-separated, or a first line that names them: {sides}. "
                "If it has other names, give two of them as --src and --trg"
            )
        src, trg = with_sentences
    pairs = [(row[src], row[trg]) for row in rows if len(row) == width > 1]
    if sides.are_swapped(pairs):
        src, trg = trg, src
    return Columns(delimiter, src, trg, max(2, width), False, quoted, (sides.src, sides.trg))


def _is_repeated(rows: list[list[str]], column: int) -> bool:
    """Whether the second row has the same cell as the first: a language code, and no heading."""
    return len(rows) > 1 and column < len(rows[1]) and rows[0][column] == rows[1][column]


def _has_sentences(
    rows: list[list[str]], column: int, width: int, header_error: CorpusError
) -> bool:
    """Whether a column has sentences. Raises if its first cell is a heading that is not known."""
    cells = [row[column].strip() for row in rows if len(row) == width]
    for pattern in _NO_SENTENCES:
        if all(pattern.fullmatch(cell) for cell in cells):
            return False
        if len(cells) > 2 and all(pattern.fullmatch(cell) for cell in cells[1:]):
            raise header_error
    return True


def _find_delimiter(sample: list[str], sides: Sides) -> str:
    """Tab, comma or semicolon: with which the first line names the languages, else with which
    the lines have the same number of columns."""
    widths = {}
    for delimiter in _DELIMITERS:
        rows = _split_rows(sample, delimiter)
        if rows and sides.find_in([cell.strip() for cell in rows[0]]):
            return delimiter
        widths[delimiter] = [len(row) for row in rows]
    for delimiter, found in widths.items():
        if found and min(found) == max(found) > 1:
            return delimiter
    return ","


def _has_quoted_lines(sample: list[str], delimiter: str) -> bool:
    """Whether a TSV has cells in quotes with line breaks inside, as Python's csv writes them: its
    lines differ in width, its rows, read as CSV, do not."""
    if len({line.count(delimiter) for line in sample}) < 2:
        return False
    rows = _complete_rows(sample, delimiter)
    return len({len(row) for row in rows or ()}) == 1


def _has_only_quoted_cells(sample: list[str], delimiter: str) -> bool:
    """Whether the first cell of each row is in quotes, as some programs write all cells. Sentences
    may begin with quotes, too: most of the lines must be CSV."""
    if not all(line.startswith('"') for line in sample):
        return False
    if _complete_rows(sample, delimiter):
        return True
    return 2 * sum(bool(_complete_rows([line], delimiter)) for line in sample) > len(sample)


def _split_rows(sample: list[str], delimiter: str) -> list[list[str]]:
    """The rows of CSV; one for each line if the lines are not correct CSV."""
    rows = _complete_rows(sample, delimiter)
    return rows or [_split_row(line, delimiter) for line in sample]


def _complete_rows(sample: list[str], delimiter: str) -> list[list[str]] | None:
    """The rows of CSV, without a last one that is cut off. None if the lines are not CSV."""
    rows = []
    try:
        for row in csv.reader((f"{line}\n" for line in sample), delimiter=delimiter, strict=True):
            rows.append(row)
    except csv.Error as problem:
        if "unexpected end" not in str(problem):
            return None
    return rows


def _split_row(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return line.split(delimiter)


# --- reading --------------------------------------------------------------------------------------


def _decode(line: bytes, where: str, on_malformed: OnMalformed) -> str | None:
    if len(line) > MAX_LINE_BYTES:
        on_malformed(
            f"{where}: is longer than {MAX_LINE_BYTES:,} bytes; expected one sentence, or one pair"
        )
        return None
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        found = f"byte {line[problem.start]:#04x} at column {problem.start + 1}"
        on_malformed(f"{where}: is not UTF-8 ({found}); {_EXPECTED_UTF8}")
        return None


def _text_records(files: PairFiles, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    lengths = [0, 0]
    for number, both in enumerate(itertools.zip_longest(*map(lines, files.paths)), 1):
        lengths = [n + (line is not None) for n, line in zip(lengths, both, strict=True)]
        if lengths[0] == lengths[1]:
            # Stop at the first malformed side, so that a pair is reported once.
            texts: list[str] = []
            for path, line in zip(files.paths, both, strict=True):
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


def _table_records(
    path: Path, columns: Columns, on_malformed: OnMalformed
) -> Iterator[Pair | None]:
    rows = _csv_rows if columns.quoted else _tsv_rows
    is_first = columns.header
    for number, row in rows(path, columns, on_malformed):
        if is_first:
            is_first = False
        elif row is None:
            yield None
        elif len(row) != columns.width:
            message = (
                f"{path}:{number}: has {_count(len(row), 'column')}; expected {columns.width}, "
                f"{_DELIMITERS[columns.delimiter]}-separated"
            )
            if not columns.quoted and any(cell.startswith('"') for cell in row):
                message += ". If cells in quotes have line breaks, name the file .csv"
            on_malformed(message)
            yield None
        else:
            yield row[columns.src], row[columns.trg]


# The number of the line in which a row begins, and its cells; None if it is malformed.
_Rows = Iterator[tuple[int, list[str] | None]]


def _tsv_rows(path: Path, columns: Columns, on_malformed: OnMalformed) -> _Rows:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        text = _decode(line, f"{path}:{number}", on_malformed)
        if text is None:
            yield number, None
            continue
        cells = text.split(columns.delimiter)
        if columns.header and '"' in text:
            # Programs that write a header also double the quotes inside of a quoted cell.
            cells = [_unquoted(cell) for cell in cells]
        yield number, cells


def _unquoted(cell: str) -> str:
    """The text of a cell that is quoted because it has quotes; any other cell unchanged."""
    inner = cell[1:-1]
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner
    return inner.replace('""', '"') if is_quoted and '"' not in inner.replace('""', "") else cell


def _csv_rows(path: Path, columns: Columns, on_malformed: OnMalformed) -> _Rows:
    malformed: list[int] = []

    def decoded() -> Iterator[str]:
        for number, line in enumerate(lines(path), 1):
            text = _decode(line, f"{path}:{number}", on_malformed)
            if text is None:
                malformed.append(number)
            yield "\n" if text is None else f"{text}\n"

    reader = csv.reader(decoded(), delimiter=columns.delimiter, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as problem:
            found = str(problem)
            if "field limit" in found or "unexpected end" in found:
                found = "a quote is not closed"
            on_malformed(f"{path}:{begin}: is not CSV ({found}); expected quotes in pairs")
            malformed.append(begin)
            row = []
        for number in malformed:
            yield number, None
        malformed.clear()
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield begin, row


def _json_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    """Records of one JSON list, one by one, so that errors can name lines."""
    content = whole_text(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as problem:
        number = content.count(b"\n", 0, problem.start) + 1
        column = problem.start - content.rfind(b"\n", 0, problem.start)
        found = f"byte {content[problem.start]:#04x} at column {column}"
        raise CorpusError(f"{path}:{number}: is not UTF-8 ({found}); {_EXPECTED_UTF8}") from None
    del content
    for number, record in enumerate(_json_list(text, path), 1):
        yield _pair(record, sides, f"{path}: record {number}", on_malformed)


_BLANK = re.compile(r"[ \t\n\r]*")


def _json_list(text: str, path: Path) -> Iterator[Any]:
    """The values of the list that `text` holds."""

    def skip_blank(at: int) -> int:
        found = _BLANK.match(text, at)
        return found.end() if found else at

    def error(message: str, at: int) -> CorpusError:
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        return CorpusError(f"{path}:{line}: is not JSON ({message}, column {column})")

    at = skip_blank(0)
    if at == len(text):
        return
    if text[at] != "[":
        found = _describe(_json_value(text, at, path)[0])
        raise CorpusError(f"{path}: is {found}; expected a list of records")
    at = skip_blank(at + 1)
    if text[at : at + 1] == "]":
        at = skip_blank(at + 1)
    else:
        while True:
            value, at = _json_value(text, at, path)
            yield value
            at = skip_blank(at)
            mark, at = text[at : at + 1], skip_blank(at + 1)
            if mark == "]":
                break
            if mark != ",":
                raise error("Expecting ',' delimiter", at - 1 if mark else len(text))
    if at < len(text):
        raise error("Extra data", at)


def _json_value(text: str, at: int, path: Path) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as problem:
        found = f"{problem.msg}, column {problem.colno}"
        raise CorpusError(f"{path}:{problem.lineno}: is not JSON ({found})") from None
    except _RepeatedKeyError as problem:
        number = text.count("\n", 0, at) + 1
        raise CorpusError(
            f"{path}:{number}: the record that begins here has {problem}; expected each key once"
        ) from None
    except (ValueError, RecursionError) as problem:
        raise CorpusError(f"{path}: cannot be read as JSON ({problem})") from None


def _jsonl_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Iterator[Pair | None]:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _decode(line, where, on_malformed)
        try:
            record = _DECODER.decode(text) if text is not None else None
        except json.JSONDecodeError as problem:
            on_malformed(
                f"{where}: is not JSON ({problem.msg}, column {problem.colno}); "
                "expected one record per line"
            )
            yield None
        except _RepeatedKeyError as problem:
            on_malformed(f"{where}: has {problem}; expected each key once")
            yield None
        except (ValueError, RecursionError) as problem:
            on_malformed(
                f"{where}: cannot be read as JSON ({problem}); expected one record per line"
            )
            yield None
        else:
            yield _pair(record, sides, where, on_malformed) if text is not None else None


class _RepeatedKeyError(ValueError):
    """A JSON object has a key twice. Python's parser would take the last one silently."""


def _without_repeats(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        counts = Counter(name for name, _ in items)
        twice, count = counts.most_common(1)[0]
        raise _RepeatedKeyError(f"the key {twice[:80]!r} {count} times")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


def _pair(record: Any, sides: Sides, where: str, on_malformed: OnMalformed) -> Pair | None:
    if isinstance(record, dict):
        # Hugging Face's datasets: {"id": "7", "translation": {"en": …, "zh": …}}
        texts = record.get("translation")
        texts = texts if isinstance(texts, dict) else record
        keys = list(texts)
        found = _find_in(sides, tuple(keys))
        if found is None:
            named = ", ".join(repr(key) for key in keys[:8]) or "no keys"
            on_malformed(f"{where}: has {named}; expected the keys {sides}")
            return None
        named_texts = [(repr(keys[at]), texts[keys[at]]) for at in found]
    elif isinstance(record, list) and len(record) == 2:
        named_texts = [("the first", record[0]), ("the second", record[1])]
    else:
        kind = f"a list of {len(record)}" if isinstance(record, list) else _describe(record)
        on_malformed(
            f"{where}: is {kind}; expected an object with {sides}, or a list of two strings"
        )
        return None
    return _checked_texts(named_texts, where, on_malformed)


@functools.lru_cache(maxsize=64)  # records of one file have the same keys
def _find_in(sides: Sides, keys: tuple[str, ...]) -> tuple[int, int] | None:
    return sides.find_in(keys)


def _checked_texts(
    named: Iterable[tuple[str, Any]], where: str, on_malformed: OnMalformed
) -> Pair | None:
    texts: list[str] = []
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
        texts.append(text)
    return texts[0], texts[1]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")


def _listed(cells: Sequence[str]) -> str:
    return ", ".join(map(_short, cells[:8])) + (", …" if len(cells) > 8 else "")


def _describe(value: object) -> str:
    """The type of a JSON value, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    return {int: "a number", float: "a number", str: "a string", list: "a list"}[type(value)]
