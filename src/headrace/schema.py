"""Records that are checked where they are made, and files of them.

Plans and settings are frozen dataclasses whose fields say what they may be: a type, a choice or a
range. A wrong value is an error that names the field, what was found and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from headrace.errors import HeadraceError, PlanError


def whole(default: int | None, low: int, high: int, meaning: str, *, unset: str = "") -> Any:
    """A whole number. `meaning` is its help text; `unset` says what None stands for."""
    described = {"low": low, "high": high, "meaning": meaning, "unset": unset}
    return field(default=default, metadata=described)


def number(default: float | None, low: float, high: float, meaning: str, *, unset: str = "") -> Any:
    described = {"low": low, "high": high, "meaning": meaning, "unset": unset}
    return field(default=default, metadata=described)


def choice(default: object, meaning: str, *, unset: str = "") -> Any:
    return field(default=default, metadata={"meaning": meaning, "unset": unset})


@dataclass(frozen=True, slots=True)
class Checked:
    """A frozen record whose fields are checked where it is made: type, choice and range."""

    #: What a wrong value raises.
    error: ClassVar[type[HeadraceError]] = PlanError

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for known in dataclasses.fields(self):
            _check_field(known, hints[known.name], getattr(self, known.name), self.error)

    @classmethod
    def field_names(cls) -> list[str]:
        return [known.name for known in dataclasses.fields(cls)]


def read_yaml(path: str | Path, error: type[HeadraceError]) -> Mapping[str, Any]:
    """The mapping in a YAML file. What is wrong with it is an `error` with file and line."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from problem
    except UnicodeDecodeError as problem:
        line_number = problem.object.count(b"\n", 0, problem.start) + 1
        raise error(f"{path}:{line_number}: is not UTF-8 text ({problem.reason})") from problem
    except yaml.MarkedYAMLError as problem:
        line = f":{problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise error(f"{path}{line}: is not YAML ({problem.problem})") from problem
    except yaml.YAMLError as problem:
        raise error(f"{path}: is not YAML ({' '.join(str(problem).split())})") from problem
    except ValueError as problem:  # a date or number that is none, or a path that is none
        raise error(f"{path}: has a value that cannot be read ({problem})") from problem
    except RecursionError as problem:
        raise error(f"{path}: is nested too deeply") from problem
    return mapping(content, str(path), error)


def _check_field(
    known: dataclasses.Field[Any], hint: Any, value: object, error: type[HeadraceError]
) -> None:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    allowed = typing.get_args(hint) if is_union else (hint,)
    if value is None and type(None) in allowed:
        return
    if typing.get_origin(allowed[0]) is Literal:
        choices = typing.get_args(allowed[0])
        if value not in choices:
            raise error(
                f"{known.name} = {quoted(value)}{nearest(value, choices)}: "
                f"expected {listed(choices)}" + (" or none" if len(allowed) > 1 else "")
            )
        return
    found = f"{known.name} = {quoted(value)}"
    low, high = known.metadata.get("low", 0), known.metadata.get("high", 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if float in allowed:
        if not is_number or not low <= value <= high:
            raise error(f"{found}: expected a number from {low:g} to {high:g}")
    elif int in allowed:
        if not is_number or not isinstance(value, int) or not low <= value <= high:
            raise error(f"{found}: expected a whole number from {low:,} to {high:,}")
    elif bool in allowed and not isinstance(value, bool):
        raise error(f"{found}: expected true or false")
    elif str in allowed and not (isinstance(value, str) and value):
        raise error(f"{found}: expected a name")


def mapping(
    values: object, where: str, error: type[HeadraceError] = PlanError
) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        found = "nothing" if values is None else type(values).__name__
        raise error(f"{where}: expected a mapping, found {found}")
    return values


def refuse_unknown(
    given: Mapping[str, Any],
    known: list[str],
    where: str,
    error: type[HeadraceError] = PlanError,
) -> None:
    for key in given:
        if key not in known:
            raise error(
                f"{where}: unknown key {quoted(key)}{nearest(key, known)}; known: {listed(known)}"
            )


def nearest(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def quoted(value: object) -> str:
    """The value as it was given, shortened where it is long: a few lines of YAML can stand for
    more text than there is memory, and Python refuses to write out thousands of digits."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too long to show>"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 200, 200, 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 8


def listed(words: Iterable[object]) -> str:
    return ", ".join(str(word) for word in words)


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
