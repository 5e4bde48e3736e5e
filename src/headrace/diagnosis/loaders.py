"""What a script's DataLoader costs: when the script waits for it, and how fast it is on its own.

A loader with processes loads ahead. A trace of a slow step shows that the loader keeps up with it,
but not how fast a step may become before the loader is the limit. So before a script is ended,
batches are taken from its loader as fast as it delivers them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headrace.replacing import replaced

#: How many batches are timed, at least and at most, and how many seconds they may all take.
_MIN_BATCHES, _MAX_BATCHES = 4, 32
_MAX_S = 4.0


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class LoaderFacts:
    """How a loader is made. `batch_tensors` is the number of tensors in a batch; `batch_ms` is how
    long the loader needs for a batch if nothing holds it up, None if that was not measured."""

    workers: int
    pins: bool
    batch_tensors: int
    batch_ms: float | None = None


class Loaders:
    """Watches the DataLoaders of a script."""

    def __init__(self) -> None:
        self._inputs: list[tuple[int, int]] | None = None
        self._facts: LoaderFacts | None = None
        self._dataset: Any = None
        self._then: Callable[[], object] | None = None
        self._thread: int | None = None
        self._begins: Callable[[], object] = _nothing
        self._ends: Callable[[], object] = _nothing

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all loaders inside the block."""
        iterators: Any = _BaseDataLoaderIter
        original = iterators.__next__

        def next_batch(iterator: Any) -> Any:
            if self._inputs is not None:
                return self._noting(original, iterator, self._inputs)
            if self._then is not None and threading.get_ident() == self._thread:
                self._time_alone(original, iterator, self._then)
            return original(iterator)

        with replaced(iterators, "__next__", next_batch):
            yield

    @contextmanager
    def noted(
        self, begins: Callable[[], object] | None = None, ends: Callable[[], object] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield the list of times, from and to, in which the script waited for a batch inside the
        block. `begins` and `ends` are called then."""
        inputs: list[tuple[int, int]] = []
        self._inputs = inputs
        self._begins, self._ends = begins or _nothing, ends or _nothing
        try:
            yield inputs
        finally:
            self._inputs = None
            self._begins = self._ends = _nothing

    @property
    def facts(self) -> LoaderFacts | None:
        """Of the loader that was noted last; None if none was."""
        return self._facts

    def time_alone(self, then: Callable[[], object]) -> bool:
        """When this thread asks for the next batch, time the loader on its own and call `then`. The
        script gets none of the batches that this takes. Returns False if there is nothing to time:
        without processes, a loader does its work in the step, where the trace shows it."""
        if self._facts is None or not self._facts.workers:
            return False
        self._then, self._thread = then, threading.get_ident()
        return True

    def _noting(self, original: Any, iterator: Any, inputs: list[tuple[int, int]]) -> Any:
        self._begins()
        start_ns = time.perf_counter_ns()
        try:
            batch = original(iterator)
        finally:
            inputs.append((start_ns, time.perf_counter_ns()))
            self._ends()
        if self._facts is None or iterator._dataset is not self._dataset:
            self._dataset = iterator._dataset
            tensors = sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch))
            self._facts = LoaderFacts(iterator._num_workers, bool(iterator._pin_memory), tensors)
        return batch

    def _time_alone(self, original: Any, iterator: Any, then: Callable[[], object]) -> None:
        self._then = None
        if self._facts is not None and iterator._dataset is self._dataset:
            # So many batches may be loaded already.
            ready = iterator._num_workers * iterator._prefetch_factor
            self._facts.batch_ms = time_per_batch(lambda: original(iterator), ready)
        then()


def time_per_batch(
    take: Callable[[], object],
    ready: int,
    now_ns: Callable[[], int] = time.perf_counter_ns,
) -> float | None:
    """Milliseconds per call of `take`, which is called many times in a row. The first `ready` calls
    do not count: what they return may have been made before. None if `take` ended the iteration, or
    was too slow, before enough calls were timed."""
    times_ns = [now_ns()]
    deadline_ns = times_ns[0] + _MAX_S * 1e9
    while len(times_ns) <= ready + _MAX_BATCHES and times_ns[-1] < deadline_ns and _takes(take):
        times_ns.append(now_ns())
    timed = len(times_ns) - 1 - ready
    if timed < _MIN_BATCHES:
        return None
    return (times_ns[-1] - times_ns[ready]) / timed / 1e6


def _takes(take: Callable[[], object]) -> bool:
    """Whether there was another batch. An error is not the script's: it did not ask for so many."""
    try:
        take()
    except Exception:
        return False
    return True
