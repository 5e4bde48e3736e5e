"""Results in one JSON file, which names its kind and version."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar, Self

from headrace.atomic_files import replace_file
from headrace.errors import ReportError, RunError
from headrace.schema import Fields, read_json

VERSION = 1


class ResultFile:
    """Base of the results that are stored as one JSON file. Subclasses are frozen dataclasses."""

    #: What the file says it is.
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no NaN and no infinity: they become None."""
        values: dict[str, Any] = plain_values(dataclasses.asdict(self))  # type: ignore[call-overload]
        return {"kind": self.kind, "version": VERSION} | values

    def to_json(self) -> str:
        """The result as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    def write(self, path: str | Path) -> None:
        """Write the JSON file. A reader sees the whole file or none."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise RunError(f"{path}: cannot be written ({problem.strerror})") from problem
        replace_file(path, f"{self.to_json()}\n".encode(), RunError)

    @classmethod
    def from_dict(cls, content: object, *, file: str = "result") -> Self:
        """The result in plain values; `file` is what errors call it."""
        return cls.from_fields(Fields(content, file, ReportError))

    @classmethod
    def from_fields(cls, content: Fields) -> Self:
        check_header(content, cls.kind)
        return content.record(cls)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The result in a JSON file."""
        return cls.from_fields(read_json(path, ReportError))


def check_header(content: Fields, *kinds: str) -> None:
    """Refuse a file that is of none of these kinds, or of another version."""
    if content.values.get("kind") not in kinds:
        raise content.problem("kind", " or ".join(repr(kind) for kind in kinds))
    version = content.values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise content.problem("version", f"{VERSION}, which this Headrace reads")


def plain_values(value: Any) -> Any:
    """The value with what JSON can hold: a number that is not finite becomes None, and what JSON
    does not know becomes text."""
    if isinstance(value, dict):
        return {str(key): plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
