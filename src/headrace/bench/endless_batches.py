"""An endless stream of batches from a loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.data import end_workers
from headrace.errors import BenchError


class Taken:
    """Some batches of a loader, to be iterated once. Like the loader, it has `num_workers`: what
    workers have loaded draws no random numbers here, so the engine need not note their states."""

    def __init__(self, batches: Iterator[Any], num_workers: int) -> None:
        self._batches, self.num_workers = batches, num_workers

    def __iter__(self) -> Iterator[Any]:
        return self._batches


class EndlessBatches:
    """Iterates over a loader again and again, and hands out some batches at a time.

    The loader's iterator stays open in between, so workers are not restarted and the batches that
    they have prefetched are not lost. `ahead` is how many those may be.
    """

    def __init__(self, loader: Iterable[Any], owner: str = "work") -> None:
        self._loader, self._owner = loader, owner
        self._batches = self._endless()
        workers = getattr(loader, "num_workers", 0)
        self.ahead: int = workers * (getattr(loader, "prefetch_factor", None) or 2)

    def take(self, count: int) -> Taken:
        """The next `count` batches. Asks the loader for no more."""
        workers = getattr(self._loader, "num_workers", 0)
        return Taken(itertools.islice(self._batches, count), workers)

    def close(self) -> None:
        self._batches.close()
        # The garbage collector would take seconds for each worker process: it may collect the
        # queue that tells the worker to end before the worker has read it.
        end_workers(self._loader)

    def _endless(self) -> Any:
        for epoch in itertools.count():
            for name in ("sampler", "batch_sampler"):
                set_epoch = getattr(getattr(self._loader, name, None), "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)
            is_empty = True
            for batch in self._loader:
                is_empty = False
                yield batch
            if is_empty:
                raise BenchError(f"{self._owner}: the loader has no batches: expected at least one")
