"""What is known of PyTorch's operators beyond their schemas: what they read, write and wait for."""

from __future__ import annotations

from typing import Any

import torch

# Operators that allocate and do not write, or take a tensor only for its shape.
_ALLOCATE_ONLY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_SHAPE_ONLY = ("_like", "new_full", "new_zeros", "new_ones", *_ALLOCATE_ONLY)
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Everywhere else mixing host and device is an error, save for 0-dim tensors. The second line
# takes lengths from the host.
MAY_MIX = (
    *("copy_", "_foreach_copy_"),
    *("_pack_padded_sequence", "_pack_padded_sequence_backward", "_pad_packed_sequence"),
    *("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss"),
)
# Results that lie on the host, by their position, though the operator runs on the device.
HOST_RESULTS = {"_pack_padded_sequence": 1}
# In place, and yet no kernel: only the tensor's own view of its memory changes.
METADATA_ONLY = (
    *("unsqueeze_", "squeeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_"),
    *("detach_", "set_", "resize_", "resize_as_", "rename_"),
)
# Arguments that are written though the schema does not say so.
_UNSAID_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    ("running_mean", "running_var"),
)
# Operators whose result's size or value the host must read before it can go on.
_HOST_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "bincount",
    "repeat_interleave",
)


class Operation:
    """One call of an operator, as the dispatch mode sees it."""

    __slots__ = ("args", "func", "kwargs", "name", "short")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = str(func._schema.name)
        self.short = self.name.removeprefix("aten::")

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def argument(self, position: int, name: str) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)

    def inputs(self) -> list[torch.Tensor]:
        return tensors((self.args, self.kwargs))

    def only_for_shape(self) -> bool:
        """Whether its tensors are taken for nothing but their shape and type."""
        return self.short.endswith(_SHAPE_ONLY)

    def reads_and_writes(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors it reads and those it writes in place."""
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        if self.only_for_shape():
            return reads, writes
        unsaid = self._unsaid_writes()
        for position, argument in enumerate(self.func._schema.arguments):
            value = self.argument(position, argument.name)
            if argument.name in unsaid:
                writes += tensors(value)
            elif argument.alias_info is None:
                reads += tensors(value)
            elif argument.alias_info.is_write:
                writes += tensors(value)
        return reads, writes

    def _unsaid_writes(self) -> tuple[str, ...]:
        names = _UNSAID_WRITES.get(self.short, ())
        if names:
            for position, argument in enumerate(self.func._schema.arguments):
                if argument.name == "training" and not self.argument(position, "training"):
                    return ()  # running figures are then only read
        return names

    def indices(self) -> list[torch.Tensor]:
        """The index tensors of `x[…]`."""
        return tensors(self.args[1]) if self.short in INDEXING else []

    def makes_the_host_wait(self) -> bool:
        """`x[mask]` too: the host must count the mask before it knows the result's size."""
        masks = (torch.bool, torch.uint8)
        return self.short in _HOST_READS or any(at.dtype in masks for at in self.indices())

    def returns_alias(self) -> bool:
        return any(value.alias_info is not None for value in self.func._schema.returns)


def tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts that have memory of their own; a sparse one
    gives its parts."""
    if isinstance(values, torch.Tensor):
        return memory_of(values)
    found: list[torch.Tensor] = []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return found
    for value in values:
        found += tensors(value)
    return found


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself; a sparse one's indices and values; nothing inside `vmap`."""
    if torch._C._has_storage(tensor):
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return []


def only_allocates(short: str) -> bool:
    """Whether an operator leaves its fresh memory unwritten. With deterministic algorithms PyTorch
    fills it: a kernel on the allocating stream that nobody sees."""
    fills = (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )
    return short in _ALLOCATE_ONLY and not fills
