"""Helpers for the table of what `fake_cuda()` replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from headrace.fake.cuda import state
from headrace.fake.patches import Replacement


def names_of(owner: Any, why: str, /, **new: Any) -> Iterator[Replacement]:
    for name, replacement in new.items():
        if hasattr(owner, name):  # PyTorch's versions differ
            yield Replacement(owner, name, replacement, why)


def returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after a check of its argument `device`."""

    def call(device: Any = None) -> Any:
        state.check_index(device)
        return function()

    return call


def refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise state.not_emulated(what)

    return refuse


def copy_of(function: Any) -> Callable[..., Any]:
    """A Python function as it is now, whatever replaces its code later."""
    assert isinstance(function, FunctionType)
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
