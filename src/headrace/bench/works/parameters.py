"""The parameters of a workload's function, and the options that users set for them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Literal

from headrace.errors import WorkOptionError
from headrace.schema import is_union, listed, nearest, quoted

# Parameters that Headrace passes. `--set` cannot set those of the first kind. The built-in
# workloads call their batch size `batch`.
_FROM_ELSEWHERE = {
    "device": "--device sets it",
    "seed": "--seed sets it",
    "pin": "each plan sets it",
}


def settable(function: Callable[..., Any]) -> list[str]:
    """The parameters of a workload that `--set` can set."""
    return [name for name in parameters_of(function) if name not in _FROM_ELSEWHERE]


def check_option(title: str, function: Callable[..., Any], name: str, value: object) -> None:
    """Raise unless the function has the parameter `name`, and `value` has its type."""
    parameters = inspect.signature(function).parameters
    own = settable(function)
    if name in _FROM_ELSEWHERE and name in parameters:
        raise WorkOptionError(f"{title}: {name} cannot be set: {_FROM_ELSEWHERE[name]}")
    if name not in own:
        if any(known.kind is known.VAR_KEYWORD for known in parameters.values()):
            return
        others = f"known: {listed(own)}" if own else "it has none"
        raise WorkOptionError(f"{title}: no option {quoted(name)}{nearest(name, own)}; {others}")
    kinds = _kinds(function, name)
    fitting = kinds | ({int} if float in kinds else set())
    if kinds and type(value) not in fitting:
        expected = " or ".join(_KINDS[kind] for kind in _KINDS if kind in kinds)
        quote = f"""; in quotes, --set {name}='"{value}"', it is text""" if str in kinds else ""
        where = place_of(function)
        raise WorkOptionError(
            f"{title}: {name} = {quoted(value)}: expected {expected}, as in the signature"
            f"{f' at {where}' if where else ''}{quote}"
        )


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def _kinds(function: Callable[..., Any], name: str) -> set[type]:
    """The plain types that a parameter accepts, from its annotation or else its default; empty if
    neither says."""
    try:
        hint = typing.get_type_hints(function).get(name)
    except (NameError, TypeError, AttributeError):  # names that only a type checker knows
        hint = None
    default = inspect.signature(function).parameters[name].default
    if hint is None:
        plain = type(default) in _KINDS and default is not None
        return {type(default)} if plain else set()
    found = set(typing.get_args(hint)) if is_union(hint) else {hint}
    if typing.get_origin(hint) is Literal:
        found = {type(choice) for choice in typing.get_args(hint)}
    return found if found <= _KINDS.keys() else set()


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def defaults_of(function: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {
        name: parameters[name].default
        for name in names
        if parameters[name].default is not inspect.Parameter.empty
    }


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function accepts `count` arguments; yes if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def place_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
