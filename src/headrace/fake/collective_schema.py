"""What a collective reads and writes, and the stream that it runs on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from headrace.races.operators import Operation, tensors

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from headrace.fake.streams import FakeEvent

# For operators whose tensors the schema calls neither inputs nor outputs.
_READ_ONLY = ("send",)
_WRITE_ONLY = ("recv_", "recv_any_source_")
#: When each `Work` or `Future` is done.
ends: weakref.WeakKeyDictionary[Any, list[FakeEvent]] = weakref.WeakKeyDictionary()


def reads_and_writes(operation: Operation) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    if operation.name == "c10d::barrier":
        return reads, writes
    for position, argument in enumerate(operation.func._schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        found = tensors(operation.argument(position, argument.name))
        if argument.name.startswith("output"):
            writes += found
        elif argument.name.startswith("input") or operation.short.endswith(_READ_ONLY):
            reads += found
        elif operation.short.endswith(_WRITE_ONLY):
            writes += found
        elif operation.name in ("c10d::broadcast_", "c10d::reduce_"):
            is_root = _group(operation).rank() == operation.named("root_rank")
            sends = is_root if operation.name == "c10d::broadcast_" else not is_root
            (reads if sends else writes).extend(found)
        else:
            writes += found
    return reads, writes


def _group(operation: Operation) -> Any:
    boxed = operation.named("process_group")
    return torch.distributed.ProcessGroup.unbox(boxed)


def stream_name(operation: Operation) -> str:
    """Each process group has a stream, and each peer that is sent to or received from by itself."""
    if operation.name.startswith("c10d::"):
        name = f"collectives of group {_group(operation).group_name}"
    else:
        name = f"collectives of group {operation.named('group_name')}"
    peer = operation.named("dst") if operation.short.endswith("send") else operation.named("src")
    return name if peer is None else f"{name}, peer {peer}"
