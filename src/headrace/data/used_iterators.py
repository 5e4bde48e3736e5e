"""Iterators passed as loaders: after one epoch they have no batches left."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import StepError
from headrace.source_lines import users_line

_REMEMBERED = 8


class UsedIterators:
    """The last few iterators from which an engine has taken batches."""

    def __init__(self) -> None:
        self._used: deque[Callable[[], Any]] = deque(maxlen=_REMEMBERED)

    def note(self, loader: object) -> None:
        """Call this after a pass that had batches."""
        if isinstance(loader, Iterator) and not self._was_used(loader):
            self._used.append(_reference(loader))

    def require_batches(self, loader: object) -> None:
        """Call this after a pass without batches. Raises `StepError` if an earlier pass has used
        the iterator up."""
        if self._was_used(loader):
            raise StepError(
                f"the loader passed at {users_line()} has no batch left: it is an iterator (a "
                f"{type(loader).__name__}), and an earlier epoch has used it up. Pass the loader "
                "itself, engine.epoch(loader), not iter(loader) or a generator; or make a new "
                "iterator for each epoch"
            )

    def _was_used(self, loader: object) -> bool:
        return any(reference() is loader for reference in self._used)


def _reference(iterator: Iterator[Any]) -> Callable[[], Any]:
    """A weak reference: a caller that passes the iterator again has kept it alive. Some iterators,
    such as a list's, do not support weak references; they are kept."""
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: iterator
