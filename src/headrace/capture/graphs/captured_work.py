"""One graph with its inputs.

A graph reads and writes the memory it was captured with. So each graph has input tensors of its
own, and each batch is copied into them, on the device and on the stream that replays:

    transfer  ..[copy N+1]......[copy N+2]..           from the host, beside the replays
    compute   ..[N to inputs][replay N][N+1 to inputs][replay N+1]..

That stream's order suffices: nothing writes the inputs while a replay reads them, and results are
copied out before the next replay overwrites them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch

from headrace.device import Graph
from headrace.errors import CaptureError

Result = TypeVar("Result")


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


class StateInUse:
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
        state: StateInUse,
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


def require_replayable(
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
