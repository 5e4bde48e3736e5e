"""Graphs by batch shape: captured once, then replayed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch

from headrace.capture.graphs.captured_work import CapturedWork, StateInUse, require_replayable
from headrace.data import batch_leaves, flatten_batch, measure_leaves, rebuild_batch
from headrace.device import Device
from headrace.errors import CaptureError

Result = TypeVar("Result")
# A loader that never repeats a shape must not fill the memory with use counts.
_MAX_COUNTED_KEYS = 4096


class GraphCache(Generic[Result]):
    """Graphs by key, `max_graphs` at most. A key is due for capture after `capture_after` uses. If
    the cache is full, a key that is used more than the least used graph replaces that graph."""

    def __init__(self, device: Device, *, max_graphs: int, capture_after: int) -> None:
        self._device = device
        self._max_graphs = max_graphs
        self._capture_after = capture_after
        self._graphs: dict[Hashable, CapturedWork[Result]] = {}
        # By hash: a key holds values of the batch, and counting must not keep those alive.
        self._uses: Counter[int] = Counter()
        self._pool: object | None = None
        #: Device memory of the graphs' pool, in bytes.
        self.memory_bytes = 0
        self.captures = self.evictions = 0
        #: Seconds that the captures took.
        self.seconds = 0.0
        self._largest_bytes = -1

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Hashable) -> CapturedWork[Result] | None:
        """The graph for `key`, if there is one. Counts a use of `key`."""
        self._uses[hash(key)] += 1
        if len(self._uses) > _MAX_COUNTED_KEYS:
            self._forget_rare_keys()
        return self._graphs.get(key)

    def uses(self, key: Hashable) -> int:
        return self._uses[hash(key)]

    def is_due(self, key: Hashable) -> bool:
        """Whether `key`, which has no graph, has been used often enough for one."""
        if self.uses(key) <= self._capture_after:
            return False
        return len(self._graphs) < self._max_graphs or self.uses(key) > self.uses(
            self._least_used()
        )

    def capture(
        self,
        key: Hashable,
        batch: Any,
        work: Callable[[Any], Result],
        uses: Iterable[torch.Tensor] = (),
        updates: Iterable[torch.Tensor] = (),
    ) -> CapturedWork[Result]:
        """Record `work(batch)` without running it, with copies of the batch's tensors as inputs.
        `uses` are tensors that the work may use besides, `updates` those that it surely writes.

        If it raises (`CaptureError`), all graphs are closed: after a failed capture none may be
        replayed.
        """
        begun_s = time.perf_counter()
        # A graph cannot use memory that eager steps left cached in the allocator. Without this
        # call the device would have to hold both.
        self._device.release_unused()
        nbytes, _ = measure_leaves(batch_leaves(batch))
        if nbytes > self._largest_bytes:
            # Graphs of smaller shapes fit into the memory of the largest. A larger one cannot use
            # their blocks, and needs its own. If memory is scarce, the others are dropped and
            # captured again at their next use.
            if not self._has_room_for(nbytes):
                self.close()
            self._largest_bytes = nbytes
        if len(self._graphs) >= self._max_graphs:
            self._graphs.pop(self._least_used()).close()
            self.evictions += 1
        before = self._device.memory().reserved
        if self._pool is None:
            self._pool = self._device.graph_pool()
        try:
            state = StateInUse(uses)
            inputs = [leaf.clone() for leaf in flatten_batch(batch)]
            own_batch = rebuild_batch(batch, inputs)
            versions = [one._version for one in inputs]
            graph, result = self._device.capture(lambda: work(own_batch), self._pool)
            written = [at for at, one in enumerate(inputs) if one._version != versions[at]]
            require_replayable(flatten_batch(batch), inputs, written)
            state.note_written(updates)
            state.require_separate(flatten_batch(batch), written)
        except torch.OutOfMemoryError as problem:
            self.close()
            raise CaptureError("the device has no memory for a graph's inputs") from problem
        except BaseException:
            self.close()
            raise
        self.memory_bytes += max(0, self._device.memory().reserved - before)
        self.captures += 1
        self.seconds += time.perf_counter() - begun_s
        captured = self._graphs[key] = CapturedWork(inputs, written, graph, result, state)
        return captured

    def drop(self, key: Hashable) -> None:
        """Drop one graph."""
        self._graphs.pop(key).close()

    def close(self) -> None:
        """Drop all graphs and free their memory. The cache may be used again: use counts stay."""
        for captured in self._graphs.values():
            captured.close()
        had_graphs = bool(self._graphs) or self._pool is not None
        self._graphs.clear()
        self._pool = None
        self._largest_bytes = -1
        self.memory_bytes = 0
        if had_graphs:
            self._device.release_unused()

    def _has_room_for(self, nbytes: int) -> bool:
        """Whether a graph of a batch of `nbytes`, larger than all before, fits beside them, and an
        eager step of that batch too. Both are taken to need what the graphs do, in proportion."""
        needed = self.memory_bytes * nbytes / max(self._largest_bytes, 1)
        return self._device.memory().free >= 2 * needed

    def _least_used(self) -> Hashable:
        return min(self._graphs, key=self.uses)

    def _forget_rare_keys(self) -> None:
        kept = dict(self._uses.most_common(_MAX_COUNTED_KEYS // 2))
        kept |= {hash(key): self.uses(key) for key in self._graphs}
        self._uses = Counter(kept)
