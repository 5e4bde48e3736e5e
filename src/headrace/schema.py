"""Checks and decodes values from outside: YAML and JSON files, stored results, options.

`Checked` is the base of plans and settings, which check their fields when they are made: type,
choice and range. `Fields` decodes a mapping as a dataclass. An error names file and field, what was
found and what was expected: `bench.json: rows[2].gpu = 3: expected …`.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import json
import math
import os
import reprlib
import stat
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from headrace.errors import HeadraceError, PlanError

Decoded = TypeVar("Decoded")
# PyYAML needs about ten seconds for a megabyte.
_MAX_YAML_BYTES = 1 << 18


def whole(default: int | None, low: int, high: int, meaning: str, *, unset: str = "") -> Any:
    """A field of a `Checked` record: a whole number from `low` to `high`.

    `meaning` is its help text; `unset` says what happens if it is None.
    """
    described = {"low": low, "high": high, "meaning": meaning, "unset": unset}
    return field(default=default, metadata=described)


def number(default: float | None, low: float, high: float, meaning: str, *, unset: str = "") -> Any:
    """A field of a `Checked` record: a number from `low` to `high`."""
    described = {"low": low, "high": high, "meaning": meaning, "unset": unset}
    return field(default=default, metadata=described)


def choice(default: object, meaning: str, *, unset: str = "") -> Any:
    """A field of a `Checked` record without a range: text, true or false, or one of a `Literal`."""
    return field(default=default, metadata={"meaning": meaning, "unset": unset})


@dataclass(frozen=True, slots=True)
class Checked:
    """Base of frozen records that check their fields when they are made: type, choice, range."""

    #: The error that a wrong value raises.
    error: ClassVar[type[HeadraceError]] = PlanError

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for known in dataclasses.fields(self):
            _check_field(known, hints[known.name], getattr(self, known.name), self.error)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        """The record from the plain values of a file or of options; errors begin with `where`.

        Unknown keys are refused. Lists become tuples, and text becomes a number where the field is
        one, since YAML reads `1e-3` as text.
        """
        refuse_unknown(values, cls.field_names(), where, cls.error)
        hints = typing.get_type_hints(cls)
        try:
            return cls(**{name: _from_yaml(value, hints[name]) for name, value in values.items()})
        except cls.error as problem:
            raise cls.error(f"{where}: {problem}") from None

    @classmethod
    def field_names(cls) -> list[str]:
        return [known.name for known in dataclasses.fields(cls)]


def _from_yaml(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and float in (hint, *typing.get_args(hint)):
        with suppress(ValueError):  # `Checked` refuses what is not a number
            return float(value)
    return value


def require_regular_file(path: Path, error: type[HeadraceError]) -> int:
    """The size of a file in bytes. Raises `error` if it cannot be found or is not a plain file: a
    FIFO, a socket or a device could block its reader forever."""
    try:
        status = path.stat()
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from problem
    except ValueError as problem:  # a NUL
        raise error(f"{str(path)!r}: cannot be read ({problem})") from problem
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if stat.S_ISDIR(status.st_mode):
        raise error(f"{path}: cannot be read ({os.strerror(errno.EISDIR)})")
    kind = next(kind for is_kind, kind in _FILE_KINDS if is_kind(status.st_mode))
    raise error(f"{path}: is {kind}; expected a plain file")


_FILE_KINDS = (
    (stat.S_ISFIFO, "a FIFO (a pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (lambda mode: True, "no file"),
)


def read_yaml(path: str | Path, error: type[HeadraceError]) -> Mapping[str, Any]:
    """The mapping in a YAML file. Raises `error`, with file and line, if there is none, or if a
    key stands in a mapping twice."""
    import yaml

    size = require_regular_file(Path(path), error)
    if size > _MAX_YAML_BYTES:
        raise error(f"{path}: has {size:,} bytes; expected at most {_MAX_YAML_BYTES:,}")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        repeated = _repeated_key(root)
        content = None if root is None else loader.construct_document(root)
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
    except ValueError as problem:  # an impossible date or number
        raise error(f"{path}: has a value that cannot be read ({problem})") from problem
    except RecursionError as problem:
        raise error(f"{path}: is nested too deeply") from problem
    if repeated is not None:
        raise error(f"{path}:{repeated}")
    return mapping(content, str(path), error)


def _repeated_key(root: Any) -> str | None:
    """The line of a key that stands in a YAML mapping twice, and what is wrong with it; else None.

    PyYAML takes the last one silently.
    """
    open_nodes, done = [root], set()
    while open_nodes:
        node = open_nodes.pop()
        if id(node) in done or not isinstance(getattr(node, "value", None), list):
            continue
        done.add(id(node))  # an alias may refer to its own ancestor
        keys: dict[str, int] = {}
        for child in node.value:
            if not isinstance(child, tuple):
                open_nodes.append(child)
                continue
            key, value = child
            open_nodes += (key, value)
            if isinstance(key.value, str):
                line, first = key.start_mark.line + 1, keys.get(key.value)
                keys[key.value] = line
                if first is not None:
                    return (
                        f"{line}: has the key {quoted(key.value)} a second time; it also stands in "
                        f"line {first}. Remove one of them"
                    )
    return None


def read_json(
    path: str | Path, error: type[HeadraceError], *, max_bytes: int | None = 1 << 30
) -> Fields:
    """The mapping in a JSON file. Raises `error`, with file and line, if there is none."""
    path = Path(path)
    size = require_regular_file(path, error)
    if max_bytes is not None and size > max_bytes:
        raise error(f"{path}: has {size:,} bytes; expected at most {max_bytes:,}")
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path}: is not UTF-8 text ({problem.reason})") from problem
    except json.JSONDecodeError as problem:
        raise error(f"{path}:{problem.lineno}: is not JSON ({problem.msg})") from problem
    except (ValueError, RecursionError) as problem:  # thousands of digits, or nested too deeply
        raise error(f"{path}: cannot be read as JSON ({problem})") from problem
    return Fields(content, str(path), error)


class Fields:
    """A mapping from a file. `record` decodes it, and checks it on the way.

    Null counts as missing. Errors name the field by `file` and `path`:
    `bench.json: rows[2].speedup = 'x': expected a number`.
    """

    def __init__(
        self, values: object, file: str, error: type[HeadraceError], path: str = ""
    ) -> None:
        self.file, self.path, self.error = file, path, error
        if not isinstance(values, Mapping):
            raise self._problem(path, values, "a mapping")
        self.values: Mapping[str, Any] = values

    def section(self, name: str) -> Fields:
        """The mapping in a field; an empty one if it is missing."""
        value = self.values.get(name)
        return self._fields({} if value is None else value, self.path_of(name))

    def children(self, name: str) -> list[Fields]:
        """A list of mappings; empty if it is missing."""
        value, path = self.values.get(name), self.path_of(name)
        values = () if value is None else self._decoded(value, tuple[Any, ...], path)
        return [self._fields(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def record(self, kind: type[Decoded]) -> Decoded:
        """These values as the dataclass `kind`, checked against its type hints.

        A missing field gets its default. Unknown keys are ignored, since a later version may have
        written them. If `kind` has a class method `unpacked`, that gets the mapping first: a
        record may be stored in a shorter form than its fields. If it has a method `invalid`, that
        checks what type hints cannot say.
        """
        unpacked = getattr(kind, "unpacked", None)
        values = self.values if unpacked is None else unpacked(self.values)
        given: dict[str, Any] = {}
        for name, hint, required in _hints(typing.cast("Any", kind)):
            value = values.get(name)
            if required or value is not None:
                given[name] = self._decoded(value, hint, self.path_of(name))
        made = kind(**given)
        invalid: Callable[[], Invalid | None] | None = getattr(made, "invalid", None)
        if invalid is not None and (found := invalid()) is not None:
            raise self._problem(self.path_of(found.field), found.value, found.expected)
        return made

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def problem(self, name: str, expected: str) -> HeadraceError:
        """The error for a field whose value is not what was expected."""
        return self._problem(self.path_of(name), self.values.get(name), expected)

    def _problem(self, path: str, value: object, expected: str) -> HeadraceError:
        if not path:
            return self.error(f"{self.file}: expected {expected}, found {_kind(value)}")
        if value is None:
            return self.error(f"{self.file}: {path} is missing: expected {expected}")
        return self.error(f"{self.file}: {path} = {_short(value)}: expected {expected}")

    def _fields(self, values: object, path: str) -> Fields:
        return Fields(values, self.file, self.error, path)

    def _decoded(self, value: Any, hint: Any, path: str) -> Any:
        """The value, checked and converted to the type `hint`: a plain value, or a dataclass,
        tuple or dict of them."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if is_union(hint):
            if value is None and type(None) in arguments:
                return None
            kinds = [kind for kind in arguments if kind is not type(None)]
            fitting = next((kind for kind in kinds if type(value) is kind), kinds[0])
            return self._decoded(value, fitting, path)
        if dataclasses.is_dataclass(hint):
            return self._fields(value, path).record(typing.cast("type[Any]", hint))
        if origin is tuple:
            if not isinstance(value, list | tuple):
                raise self._problem(path, value, "a list")
            return tuple(
                self._decoded(one, arguments[0], f"{path}[{index}]")
                for index, one in enumerate(value)
            )
        if origin is dict:
            inner = self._fields(value, path)
            return {
                str(key): self._decoded(one, arguments[1], inner.path_of(str(key)))
                for key, one in inner.values.items()
            }
        if origin is Literal:
            if value not in arguments:
                raise self._problem(path, value, listed(arguments))
            return value
        if hint is float:
            return self._number(value, path)
        if hint is int:
            if self._number(value, path, "a whole number") % 1:
                raise self._problem(path, value, "a whole number")
            return int(value)
        if hint in _EXPECTED and (
            not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
        ):
            raise self._problem(path, value, _EXPECTED[hint])
        return value

    def _number(self, value: object, path: str, expected: str = "a number") -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._problem(path, value, expected)
        try:
            number = float(value)
        except OverflowError:
            raise self._problem(path, value, "a number below 1e308") from None
        if not math.isfinite(number):
            raise self._problem(path, value, "a finite number")
        return number


_EXPECTED = {bool: "true or false", str: "text"}


class Invalid(NamedTuple):
    """What is wrong with a record: the path of a field in it, its value, and what was expected."""

    field: str
    value: object
    expected: str


@functools.cache  # a result has thousands of spans
def _hints(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name and type hint of each of a dataclass's fields, and whether it is required."""
    hints = typing.get_type_hints(kind)
    return [
        (
            known.name,
            hints[known.name],
            known.default is known.default_factory is dataclasses.MISSING,
        )
        for known in dataclasses.fields(kind)
    ]


def _check_field(
    known: dataclasses.Field[Any], hint: Any, value: object, error: type[HeadraceError]
) -> None:
    allowed = typing.get_args(hint) if is_union(hint) else (hint,)
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


def require_whole(name: str, value: object, minimum: int, error: type[HeadraceError]) -> None:
    """Raise `error` unless `value` is a whole number, `minimum` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise error(f"{name} = {quoted(value)}: expected a whole number, {minimum} or more")


def mapping(
    values: object, where: str, error: type[HeadraceError] = PlanError
) -> Mapping[str, Any]:
    """`values`, if they are a mapping; else raise `error`."""
    return Fields(values, where, error).values


def refuse_unknown(
    given: Mapping[str, Any],
    known: list[str],
    where: str,
    error: type[HeadraceError] = PlanError,
) -> None:
    """Raise `error` for a key that is not known, and suggest the nearest one."""
    for key in given:
        if key not in known:
            raise error(
                f"{where}: unknown key {quoted(key)}{nearest(key, known)}; known: {listed(known)}"
            )


def nearest(word: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" with the known word most like `word`; empty if none is like it."""
    close = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def quoted(value: object) -> str:
    """The value as Python writes it, shortened.

    A few lines of YAML can expand to more text than fits in memory, and Python refuses to print
    integers of thousands of digits.
    """
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too long to show>"


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 200, 200, 60
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = 8


def _short(value: object) -> str:
    text = quoted(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping | list):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    return _short(value)


def is_union(hint: Any) -> bool:
    """Whether a type hint is `A | B` or `Optional[A]`."""
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def listed(words: Iterable[object]) -> str:
    return ", ".join(str(word) for word in words)


def shown(value: object) -> str:
    """The value as tables show it: yes, no, – for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
