"""Reads sentence pairs from CSV and TSV."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.errors import CorpusError
from headrace.text_table import counted
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import PairFiles
from headrace.translation.corpus.recognized import OnMalformed, Recognized, Records
from headrace.translation.corpus.text_files import line_problem, lines, sample_lines

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
class _Table:
    """Which columns are src and trg. `header` says whether the first line names them, `quoted`
    whether cells may be in quotes, as in CSV."""

    delimiter: str
    quoted: bool
    header: bool
    width: int
    src: int
    trg: int


def recognize_table(files: PairFiles, sides: Sides) -> Recognized:
    (path,) = files.paths
    sample = sample_lines(path)
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
            f"{path}:1: has {counted(width, 'column')} ({_listed(first)}); expected 2, "
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


def _table_records(path: Path, table: _Table, on_malformed: OnMalformed) -> Records:
    rows = _csv_rows(path, table.delimiter) if table.quoted else _tsv_rows(path, table)
    for number, row in itertools.islice(rows, int(table.header), None):
        if isinstance(row, list) and len(row) == table.width:
            yield row[table.src], row[table.trg]
            continue
        problem = row
        if isinstance(row, list):
            problem = (
                f"has {counted(len(row), 'column')}; expected {table.width}, "
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


def _listed(cells: Sequence[str]) -> str:
    short = [repr(cell if len(cell) <= 40 else f"{cell[:39]}…") for cell in cells[:8]]
    return ", ".join(short) + (", …" if len(cells) > 8 else "")
