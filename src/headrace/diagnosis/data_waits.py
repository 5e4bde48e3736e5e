"""How long a thread waits for its DataLoader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from headrace.replacing import replaced


class DataWaits:
    """The time in which one thread waited for batches."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._ns = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all loaders inside the block."""
        loader: Any = _BaseDataLoaderIter
        with replaced(loader, "__next__", self._timing(loader.__next__)):
            yield

    def begin(self, thread: int) -> None:
        """Time this thread from now on."""
        self._thread = thread

    def take(self) -> int:
        """Nanoseconds since the last call."""
        ns, self._ns = self._ns, 0
        return ns

    def _timing(self, next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timing(iterator: Any) -> Any:
            start_ns = perf_counter_ns()
            try:
                return next_batch(iterator)
            finally:
                if threading.get_ident() == self._thread:
                    self._ns += perf_counter_ns() - start_ns

        return timing
