"""Reads sentence pairs: from JSON, JSON lines, CSV or TSV, or from two text files, line by line.

The name says which (`pair_files.FORMATS`). An error names the file and the line, or the number of
the record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from headrace.errors import CorpusError
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import PairFiles
from headrace.translation.corpus.pair_json import recognize_json
from headrace.translation.corpus.pair_tables import recognize_table
from headrace.translation.corpus.recognized import OnMalformed, Recognized, Records
from headrace.translation.corpus.text_files import line_problem, lines, sample_lines


def recognize(files: PairFiles, sides: Sides) -> Recognized:
    """Look at the beginning of a file. Raises if it holds no pairs in its format."""
    return _FORMATS[files.format](files, sides)


def _texts(files: PairFiles, sides: Sides) -> Recognized:
    samples = [sample_lines(path) for path in files.paths]
    if sides.are_swapped(list(zip(*samples, strict=False))):
        files = PairFiles(files.paths[::-1], files.format)
    described = f"two text files, the first is {sides.src}, the second {sides.trg}"
    return Recognized(files, described, partial(_text_records, files))


def _text_records(files: PairFiles, on_malformed: OnMalformed) -> Records:
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


_FORMATS: dict[str, Callable[[PairFiles, Sides], Recognized]] = {
    "json": recognize_json,
    "jsonl": recognize_json,
    "tsv": recognize_table,
    "csv": recognize_table,
    "text": _texts,
}
