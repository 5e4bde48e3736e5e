"""Graphs by batch shape: captured once, then replayed.

A graph reads and writes the memory it was captured with. So each graph has input tensors of its
own, and each batch is copied into them, on the device and on the stream that replays:

    transfer  ..[copy N+1]......[copy N+2]..           from the host, beside the replays
    compute   ..[N to inputs][replay N][N+1 to inputs][replay N+1]..

That stream's order suffices: nothing writes the inputs while a replay reads them, and results are
copied out before the next replay overwrites them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch

from headrace.data import (
    batch_leaves,
    flatten_batch,
    measure_leaves,
    rebuild_batch,
)
from headrace.device import Device, Graph
from headrace.errors import CaptureError

Result = TypeVar("Result")
# A loader that never repeats a shape must not fill the memory with use counts.
_MAX_COUNTED_KEYS = 4096


class _Memory:
    """The memory of some tensors: where they begin, and their storages."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._storages = frozenset(_storage(one) for one in tensors)
        self._addresses = frozenset(one.data_ptr() for one in tensors) - {0}
        self._has_offsets = any(map(torch.Tensor.storage_offset, tensors))

    def shares(self, others: list[torch.Tensor]) -> bool:
        """Whether other tensors may have memory of these. It runs before each replay: comparing
        storages takes longer, and is needed only if a tensor does not begin where its storage
        does."""
        if self._has_offsets or any(map(torch.Tensor.storage_offset, others)):
            return not self._storages.isdisjoint(map(_storage, others))
        return not self._addresses.isdisjoint(map(torch.Tensor.data_ptr, others))


def _storage(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


class _StateInUse:
    """Tensors that a step uses besides its batch, and which of them it writes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        dense = [one for one in tensors if one.layout is torch.strided and not one.is_nested]
        self._versions = [(one, one._version) for one in dense if not one.is_inference()]
        self._used, self._written = _Memory(dense), _Memory([])

    def note_written(self, updated: Iterable[torch.Tensor]) -> None:
        """Call after the step. `updated` are tensors that it writes in any case: PyTorch's fused
        optimizers do not count versions."""
        written = [one for one, version in self._versions if one._version != version]
        written += updated
        self._versions.clear()
        self._written = _Memory(written)

    def is_separate_from(self, leaves: list[torch.Tensor], written: list[int]) -> bool:
        """Whether no tensor of a batch shares memory with one that the step uses, if one of the two
        is written. `written` are the positions of those of the batch."""
        if self._written.shares(leaves):
            return False
        return not written or not self._used.shares([leaves[at] for at in written])

    def require_separate(self, leaves: list[torch.Tensor], written: list[int]) -> None:
        """Raise `CaptureError` if a batch is not separate."""
        if not self.is_separate_from(leaves, written):
            raise CaptureError(
                "a tensor of the step's batch shares memory with one that the step uses elsewhere, "
                "and the step writes to it, while a graph gets a copy of its batch: pass a clone, "
                "or leave the tensor out of the batch"
            )


class CapturedWork(Generic[Result]):
    """One graph with its inputs. `result` is what the work returned at capture; each replay
    overwrites its memory. `written` are the positions of inputs that the work changes. `uses` are
    tensors that must live as long as the graph."""

    def __init__(
        self,
        inputs: list[torch.Tensor],
        written: list[int],
        graph: Graph,
        result: Result,
        state: _StateInUse,
    ) -> None:
        self._inputs, self._written = inputs, written
        self._graph, self._state = graph, state
        self.result = result
        self.uses: list[torch.Tensor] = []

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors alive as long as the graph."""
        self.uses += tensors

    def suits(self, leaves: list[torch.Tensor]) -> bool:
        """Whether the graph can run on a copy of this batch. It cannot if the batch shares memory
        with a tensor that the step uses, and one of the two is written."""
        return self._state.is_separate_from(leaves, self._written)

    def replay(self, leaves: list[torch.Tensor]) -> Result:
        """Run the graph on the tensors of another batch, on the current stream."""
        if leaves:
            torch._foreach_copy_(self._inputs, leaves)
        self._graph.replay()
        if self._written:  # the caller sees what the work has changed in its batch
            changed = [self._inputs[at] for at in self._written]
            torch._foreach_copy_([leaves[at] for at in self._written], changed)
        return self.result

    def close(self) -> None:
        self._graph.close()


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
            state = _StateInUse(uses)
            inputs = [leaf.clone() for leaf in flatten_batch(batch)]
            own_batch = rebuild_batch(batch, inputs)
            versions = [one._version for one in inputs]
            graph, result = self._device.capture(lambda: work(own_batch), self._pool)
            written = [at for at, one in enumerate(inputs) if one._version != versions[at]]
            _require_replayable(flatten_batch(batch), inputs, written)
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


def _require_replayable(
    leaves: list[torch.Tensor], inputs: list[torch.Tensor], written: list[int]
) -> None:
    """Raise `CaptureError` if the work did to a tensor of its batch what a replay cannot repeat."""
    if any(one.requires_grad for one in inputs):
        raise CaptureError(
            "the step calls requires_grad_() on a tensor of its batch: write "
            "x = x.detach().requires_grad_() instead"
        )
    shared = Counter(leaf.untyped_storage()._cdata for leaf in leaves)
    if any(shared[leaves[at].untyped_storage()._cdata] > 1 for at in written):
        raise CaptureError(
            "the step writes to a tensor of its batch that shares memory with another one: pass a "
            "clone of one of them"
        )
