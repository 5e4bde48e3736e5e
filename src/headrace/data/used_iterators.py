"""Loaders that have no batch: iterators that an earlier epoch has used up, and empty ones."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader

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


def explain_no_batch(loader: object) -> str:
    """Why a `DataLoader` has no batch, as a part of a sentence; "" of any other loader."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if not isinstance(dataset, Sized):
        return ""
    count, size = len(dataset), getattr(loader, "batch_size", None)
    if count == 0:
        return "its dataset is empty"
    if getattr(loader, "drop_last", False) and size is not None and count < size:
        return f"its dataset has {count:,} samples, and drop_last drops a batch of less than {size}"
    return f"its dataset has {count:,} samples, and its sampler chose none"


def _reference(iterator: Iterator[Any]) -> Callable[[], Any]:
    """A weak reference: a caller that passes the iterator again has kept it alive. Some iterators,
    such as a list's, do not support weak references; they are kept."""
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: iterator
