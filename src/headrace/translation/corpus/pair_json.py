"""Reads sentence pairs from JSON and JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.translation.corpus.languages import Sides
from headrace.translation.corpus.pair_files import Pair, PairFiles
from headrace.translation.corpus.recognized import OnMalformed, Recognized, Records
from headrace.translation.corpus.text_files import head, line_problem, lines, whole_text


def recognize_json(files: PairFiles, sides: Sides) -> Recognized:
    (path,) = files.paths
    begin = head(path).lstrip()
    # Many programs write JSON lines and name them .json.
    if files.format == "json" and not begin.startswith("{"):
        return Recognized(files, "a JSON list", partial(_json_records, path, sides))
    return Recognized(files, "JSON lines", partial(_jsonl_records, path, sides))


def _json_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Records:
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


def _jsonl_records(path: Path, sides: Sides, on_malformed: OnMalformed) -> Records:
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


def _describe(value: object) -> str:
    """The type of a JSON value, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    return {int: "a number", float: "a number", str: "a string", list: "a list"}[type(value)]
