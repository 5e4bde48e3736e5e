"""Reading a stored result field by field: what is wrong is an error with file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ReportError
from headrace.schema import quoted

_MOST_BYTES = 1 << 30


class Fields:
    """A mapping in a result, which knows where it stands: `bench.json: rows[2].gpu`.

    A field that is missing and one that is null are the same: not known.
    """

    def __init__(self, file: str, path: str, values: Mapping[str, Any]) -> None:
        self.file, self.path, self.values = file, path, values

    @classmethod
    def of(cls, file: str, path: str, values: object) -> Fields:
        if not isinstance(values, Mapping):
            where = f"{file}: {path}" if path else file
            raise ReportError(f"{where}: expected an object, found {_found(values)}")
        return cls(file, path, values)

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.problem(name, "a number")
        try:
            number = float(value)
        except OverflowError:
            raise self.problem(name, "a number") from None
        if not math.isfinite(number):
            raise self.problem(name, "a finite number")
        return number

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.problem(name, "true or false")
        return bool(value)

    def whole(self, name: str) -> int | None:
        number = self.number(name)
        return None if number is None else round(number)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.problem(name, "text")
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.problem(name, "text")
        return value

    def child(self, name: str) -> Fields | None:
        value = self.values.get(name)
        return None if value is None else Fields.of(self.file, self.at(name), value)

    def children(self, name: str) -> list[Fields]:
        return [
            Fields.of(self.file, f"{self.at(name)}[{index}]", value)
            for index, value in enumerate(self._list(name))
        ]

    def numbers(self, name: str) -> list[float | None]:
        """A list of numbers; null where one is not known."""
        values = self._list(name)
        inner = Fields(self.file, self.at(name), {str(i): value for i, value in enumerate(values)})
        return [inner.number(str(index)) for index in range(len(values))]

    def texts(self, name: str) -> list[str]:
        values = self._list(name)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise ReportError(
                    f"{self.file}: {self.at(name)}[{index}]: expected text, found {_found(value)}"
                )
        return list(values)

    def plain(self, name: str) -> dict[str, Any]:
        """A mapping that is shown as it is, whatever its keys."""
        child = self.child(name)
        return {} if child is None else {str(key): value for key, value in child.values.items()}

    def named(self, name: str) -> Iterator[tuple[str, Fields]]:
        """The children of a mapping of mappings, with their keys."""
        child = self.child(name)
        for key, value in {} if child is None else child.values.items():
            yield str(key), Fields.of(self.file, f"{self.at(name)}.{key}", value)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def problem(self, name: str, expected: str) -> ReportError:
        found = _found(self.values.get(name))
        return ReportError(f"{self.file}: {self.at(name)}: expected {expected}, found {found}")

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.problem(name, "a list")
        return value


def read_json(path: Path) -> Fields:
    """The object in a JSON file."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ReportError(f"{path}: has {path.stat().st_size:,} bytes; expected a result file")
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as problem:
        raise ReportError(f"{path}: cannot be read ({problem.strerror})") from problem
    except UnicodeDecodeError as problem:
        raise ReportError(f"{path}: is not UTF-8 text ({problem.reason})") from problem
    except json.JSONDecodeError as problem:
        raise ReportError(f"{path}:{problem.lineno}: is not JSON ({problem.msg})") from problem
    except (ValueError, RecursionError) as problem:  # a number of thousands of digits, say
        raise ReportError(f"{path}: cannot be read as JSON ({problem})") from problem
    return Fields.of(str(path), "", content)


def _found(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = quoted(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
