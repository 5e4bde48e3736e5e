"""Work captured once per shape and replayed.

A graph reads and writes the memory it was captured with. So each shape has inputs of its own, and
a batch that has arrived is copied into them, on the device and on the stream that replays:

    transfer  ..[copy N+1]......[copy N+2]..           from the host, beside the replays
    compute   ..[N into place][replay N][N+1 into place][replay N+1]..

That stream's order is all that a slot's life needs here: nothing writes the inputs while a replay
reads them, and results are copied out before the next replay overwrites them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import torch

from headrace.data import batch_leaves, flatten_batch, measure_leaves, moves_itself, rebuild_batch
from headrace.device import Device, Graph
from headrace.errors import CaptureError

Result = TypeVar("Result")
# Shapes whose uses are counted. A loader that never repeats a shape must not fill the memory.
_MOST_COUNTED = 4096


class Captured(Generic[Result]):
    """One captured piece of work: its inputs, and what it returned (memory that each replay
    writes anew)."""

    def __init__(self, inputs: list[torch.Tensor], graph: Graph, result: Result) -> None:
        self._inputs = inputs
        self._graph = graph
        self.result = result

    def replay(self, leaves: list[torch.Tensor]) -> Result:
        """Run it on the tensors of another batch, on the current stream."""
        if leaves:
            torch._foreach_copy_(self._inputs, leaves)
        self._graph.replay()
        return self.result

    def close(self) -> None:
        self._graph.close()


class GraphCache(Generic[Result]):
    """Graphs by key, at most `most` of them: a key that is used more than the least used graph
    takes its place. A key is due for capture after `after` uses; until then, run it as it is."""

    def __init__(self, device: Device, *, most: int, after: int) -> None:
        self._device = device
        self._most = most
        self._after = after
        self._graphs: dict[Hashable, Captured[Result]] = {}
        # By hash: a key has the batch's own values in it, which are not to be kept alive.
        self._uses: Counter[int] = Counter()
        self._pool: object | None = None
        #: Device memory that the graphs' pool took, in bytes.
        self.memory_bytes = 0
        self.captures = self.evictions = 0
        self._largest = -1

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Hashable) -> Captured[Result] | None:
        """The graph for `key`, if there is one. Counts the use."""
        self._uses[hash(key)] += 1
        if len(self._uses) > _MOST_COUNTED:
            self._forget_rare()
        return self._graphs.get(key)

    def uses(self, key: Hashable) -> int:
        return self._uses[hash(key)]

    def is_due(self, key: Hashable) -> bool:
        """Whether `key`, which has no graph, has been used often enough for one."""
        if self.uses(key) <= self._after:
            return False
        return len(self._graphs) < self._most or self.uses(key) > self.uses(self._least_used())

    def capture(self, key: Hashable, batch: Any, work: Callable[[Any], Result]) -> Captured[Result]:
        """Record `work(batch)`, without running it, with inputs of its own in the batch's place.

        Raises `CaptureError` with all graphs closed: after a failed capture none may be replayed.
        """
        nbytes, _ = measure_leaves(batch_leaves(batch))
        if nbytes > self._largest:
            # The largest first: smaller shapes then fit into the memory it took, while pieces cut
            # for small shapes serve no large one. The others are captured anew when they come.
            self.close()
            self._largest = nbytes
        if len(self._graphs) >= self._most:
            self._graphs.pop(self._least_used()).close()
            self.evictions += 1
        # What steps launched one by one left in the allocator can serve no graph: without this,
        # the device would have to hold both.
        self._device.release_unused()
        before = self._device.memory().reserved
        if self._pool is None:
            self._pool = self._device.graph_pool()
        try:
            inputs = [leaf.clone() for leaf in flatten_batch(batch)]
            own_batch = rebuild_batch(batch, inputs)
            graph, result = self._device.capture(lambda: work(own_batch), self._pool)
        except torch.OutOfMemoryError as problem:
            self.close()
            raise CaptureError("there is no memory for its inputs") from problem
        except BaseException:
            self.close()
            raise
        self.memory_bytes += max(0, self._device.memory().reserved - before)
        self.captures += 1
        captured = self._graphs[key] = Captured(inputs, graph, result)
        return captured

    def drop(self, key: Hashable) -> None:
        """Let go of one graph."""
        self._graphs.pop(key).close()

    def close(self) -> None:
        """Let go of all graphs and of their memory. Uses stay counted: it may be used again."""
        for captured in self._graphs.values():
            captured.close()
        had_graphs = bool(self._graphs) or self._pool is not None
        self._graphs.clear()
        self._pool = None
        self._largest = -1
        self.memory_bytes = 0
        if had_graphs:
            self._device.release_unused()

    def _least_used(self) -> Hashable:
        return min(self._graphs, key=self.uses)

    def _forget_rare(self) -> None:
        kept = dict(self._uses.most_common(_MOST_COUNTED // 2))
        kept |= {hash(key): self.uses(key) for key in self._graphs}
        self._uses = Counter(kept)


def signature(batch: Any) -> Hashable:
    """What tells a batch that a graph can take in from one it cannot: the nesting, each tensor's
    shape, type and strides, and every value that is no tensor, since a graph keeps the one it was
    captured with. Raises `CaptureError` for what cannot be told apart."""
    if type(batch) is torch.Tensor:
        strides = None if batch.is_contiguous() else batch.stride()
        return (batch.shape, batch.dtype, strides)
    if moves_itself(batch):
        raise CaptureError(f"a batch holds a {type(batch).__name__}, which moves itself")
    if isinstance(batch, Mapping):
        return (type(batch), *((key, signature(value)) for key, value in batch.items()))
    if isinstance(batch, tuple | list):
        return (type(batch), *map(signature, batch))
    if dataclasses.is_dataclass(batch):
        fields = dataclasses.fields(batch)
        return (type(batch), *(signature(getattr(batch, field.name)) for field in fields))
    try:
        hash(batch)
    except TypeError:
        raise CaptureError(
            f"a batch holds a {type(batch).__name__}, which cannot be compared from batch to batch"
        ) from None
    return (type(batch), batch)
