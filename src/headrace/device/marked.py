"""`@eager`: marks a function that must run at every step, so that no graph contains it.

    @hr.eager
    def match(scores, boxes):
        ...

What calls it is not captured; what it does not contain, such as the layers before and after it, is.
Without a graph around it the function is as it was.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from headrace.device.graph import Obstacle
from headrace.source_lines import describe_function, users_line

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class _Watches(threading.local):
    """Where calls in this thread are noted, while a step is watched."""

    def __init__(self) -> None:
        self.found: list[list[Obstacle]] = []


_watches = _Watches()


def eager(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Mark a function that no graph may contain: `speed_up`, the engine and `graphed` capture what
    is around its calls, and the function runs at every step."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        if not _watches.found:
            return function(*args, **kwargs)
        mark = Obstacle(
            f"{describe_function(function)}, which is marked @eager, is called",
            users_line(),
            "it runs at every step, as the mark asks",
        )
        before = [(found, len(found)) for found in _watches.found]
        returned = function(*args, **kwargs)
        for found, count in before:
            found[count:] = [mark]  # whatever else stands in the way in there is known
        return returned

    return call


@contextmanager
def noting_marked(found: list[Obstacle]) -> Iterator[None]:
    """Append to `found` the calls of marked functions in this block."""
    _watches.found.append(found)
    try:
        yield
    finally:
        _watches.found.pop()
