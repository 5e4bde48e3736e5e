"""Loaders that begin later, or end earlier, than the one inside them."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from headrace.data.loader_state import as_stateful
from headrace.data.rng import drawing_from
from headrace.errors import StepError

log = logging.getLogger("headrace")


_LOG_EVERY_S = 5.0


class ResumedLoader:
    """A loader that begins in the middle of an epoch.

    It has no length, since the loader's length is that of a whole epoch. It has the loader's
    `state_dict`, if there is one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        stateful = as_stateful(loader)
        if stateful is not None:
            self.state_dict = stateful.state_dict
            self.load_state_dict = stateful.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class Skipping:
    """A loader without its first `count` batches."""

    def __init__(
        self,
        loader: Iterable[Any],
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loader, self._count, self._clock = loader, count, clock

    def first(self, limit: int) -> Skipping:
        """The first `limit` batches after the skipped ones."""
        return Skipping(First(self.loader, self._count + limit), self._count, self._clock)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._count)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        self.drop(iterator)
        return iterator

    def drop(self, iterator: Any, rng_before_last: dict[str, Any] | None = None) -> None:
        """Load the skipped batches and drop them, with progress in the log.

        `rng_before_last` has the states of the host's generators before the last of them. A loader
        that works one batch ahead, as Accelerate's does, makes the first batch to train on while it
        yields the last one to drop. That batch must come out as it did before.
        """
        log.warning(
            "the loader has no state_dict() and no start_at(): to resume, the first %d batches of "
            "this epoch, trained on before, are loaded and dropped",
            self._count,
        )
        logged_at = self._clock()
        for done in range(self._count):
            states = rng_before_last if done == self._count - 1 else None
            try:
                with nullcontext() if states is None else drawing_from(states):
                    next(iterator)
            except StopIteration:
                raise StepError(
                    f"the loader ended after {done} batches, and {self._count} of this epoch were "
                    "trained on before: expected the same loader"
                ) from None
            if self._clock() - logged_at > _LOG_EVERY_S:
                logged_at = self._clock()
                log.warning("%d of %d batches dropped", done + 1, self._count)


def first_of(loader: Iterable[Any], limit: int) -> Iterable[Any]:
    """The first `limit` batches of a loader. It is asked for no more than these."""
    return loader.first(limit) if isinstance(loader, Skipping) else First(loader, limit)


class First:
    """The first `limit` batches of a loader. It is asked for no more, because prefetched batches
    beyond the limit would be lost."""

    def __init__(self, loader: Iterable[Any], limit: int) -> None:
        self._loader, self._limit = loader, limit
        stateful = as_stateful(loader)
        if stateful is not None:
            self.state_dict = stateful.state_dict
            self.load_state_dict = stateful.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._limit)

    def __len__(self) -> int:
        return min(self._limit, len(self._loader))  # type: ignore[arg-type]
