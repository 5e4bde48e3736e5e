"""Iterators that were given as loaders: they have one pass in them, and then no batch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import StepError
from headrace.source_lines import users_line

_REMEMBERED = 8


class UsedIterators:
    """The iterators that an engine has had batches from, the last few of them."""

    def __init__(self) -> None:
        self._known: deque[Callable[[], Any]] = deque(maxlen=_REMEMBERED)

    def note(self, loader: object) -> None:
        """After a pass that had batches."""
        if isinstance(loader, Iterator) and not self._knows(loader):
            self._known.append(_reference(loader))

    def require_batches(self, loader: object) -> None:
        """After a pass that had none: raises `StepError` if an earlier one has used them up."""
        if self._knows(loader):
            raise StepError(
                f"the loader given at {users_line()} has no batch left: it is an iterator (a "
                f"{type(loader).__name__}), and an earlier epoch has used it up. Give the loader "
                "itself, engine.epoch(loader), not iter(loader) or a generator; or make a new "
                "iterator for each epoch"
            )

    def _knows(self, loader: object) -> bool:
        return any(known() is loader for known in self._known)


def _reference(iterator: Iterator[Any]) -> Callable[[], Any]:
    """Whoever gives it again still has it, so it need not be kept alive. Some kinds cannot be
    referred to weakly, a list's among them."""
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: iterator
