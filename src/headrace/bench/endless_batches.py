"""Batches without end: a loader that is iterated over again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.data import end_workers
from headrace.errors import BenchError


class EndlessBatches:
    """Hands out a loader's batches, some at a time, each time from where the last one ended.

    The loader's iterator lives on in between: workers are not started anew, and what they have
    loaded ahead is not lost. `ahead` is how many batches that may be.
    """

    def __init__(self, loader: Iterable[Any], whose: str = "work") -> None:
        self._loader, self._whose = loader, whose
        self._batches = self._endless()
        workers = getattr(loader, "num_workers", 0)
        self.ahead: int = workers * (getattr(loader, "prefetch_factor", None) or 2)

    def take(self, count: int) -> Iterator[Any]:
        """The next `count` batches. No more are asked for."""
        return itertools.islice(self._batches, count)

    def close(self) -> None:
        self._batches.close()
        # Left to a garbage collection, each of its processes would take seconds to end: what tells
        # them to is collected before.
        end_workers(self._loader)

    def _endless(self) -> Any:
        for epoch in itertools.count():
            for owner in ("sampler", "batch_sampler"):
                tell = getattr(getattr(self._loader, owner, None), "set_epoch", None)
                if callable(tell):
                    tell(epoch)
            some = False
            for batch in self._loader:
                some = True
                yield batch
            if not some:
                raise BenchError(f"{self._whose}: its loader has no batch: expected at least one")
