"""The processes that train together, and their collectives.

Tensors on the device are reduced in the process group that the gradients use. The hosts exchange
JSON through a separate gloo group. Every wait of the host for other ranks is in the ledger. A
single process is rank 0 of 1: its collectives return at once and send nothing.
"""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from headrace.device import Ledger

Value = TypeVar("Value")


class AllReduce:
    """An all-reduce under way, in place. `work` is PyTorch's; None if there is nothing to do."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor  # keeps the memory alive until the all-reduce is done
        #: Whether `wait` makes the current stream wait, and not the host.
        self.on_stream = not tensor.is_cpu

    def done(self) -> bool:
        """Whether the host would not have to wait. Never blocks."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, ledger: Ledger, reason: str) -> None:
        """Make the current stream (`on_stream`) or the host wait until it is done."""
        work, self._work = self._work, None
        if work is None:
            return
        if self.on_stream:
            work.wait()
        elif work.is_completed():
            work.wait()  # returns at once; raises if the all-reduce failed
            ledger.passed(reason)
        else:
            with ledger.waiting(reason):
                work.wait()


class Ranks:
    """This process, `rank` of `size`, among those that train together.

    `group` is PyTorch's process group, None for a single process. All ranks must call the same
    methods in the same order.
    """

    def __init__(self, group: Any = None, *, timeout_s: float | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        #: Whether there are other ranks. No property: each step reads it several times.
        self.several = self.size > 1
        self.resume_command = ""
        self._timeout_s = timeout_s
        # Not the gradients' group: NCCL cannot send host memory, and all ranks must call a group's
        # collectives in the same order, which there DDP's hooks decide.
        self._hosts = self._new_group() if self.several else None

    def resume_with(self, command: str) -> None:
        """Set what resumes the run, for the error that names a lost rank."""
        self.resume_command = command

    @classmethod
    def of(cls, group: Any, *, timeout_s: float | None = None) -> Ranks:
        """The ranks of a process group: the same object each time."""
        name = str(group.group_name)
        ranks = _BY_GROUP.get(name)
        if ranks is None or ranks.group is not group:
            ranks = _BY_GROUP[name] = cls(group, timeout_s=timeout_s)
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL averages the gradients, on the device and without the host."""
        return self.group is not None and "nccl" in str(dist.get_backend_config(self.group))

    def with_own_group(self) -> Ranks:
        """The same ranks with a separate host group, for use in another thread."""
        return Ranks(self.group, timeout_s=self._timeout_s) if self.several else self

    # --- on the device ----------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> AllReduce:
        """Start summing `tensor` over all ranks, in place. The host does not wait."""
        if not self.several:
            return AllReduce(None, tensor)
        return AllReduce(dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def average_gradients(self, gradients: Sequence[torch.Tensor], ledger: Ledger) -> None:
        """Average gradients over ranks in place: those that DDP did not average in backward."""
        reductions = [self.all_reduce(gradient) for gradient in gradients]
        for reduction in reductions:
            reduction.wait(ledger, "ranks")
        torch._foreach_div_(list(gradients), float(self.size))

    # --- between the hosts ------------------------------------------------------------------------

    def start_all_reduce_max(self, numbers: Sequence[int]) -> tuple[torch.Tensor, AllReduce]:
        """Start an all-reduce of each number to its maximum. The host does not wait."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        work = None
        if self.several:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._hosts, async_op=True)
        return tensor, AllReduce(work, tensor)

    def all_reduce_max(
        self, numbers: Sequence[int], ledger: Ledger, reason: str = "ranks"
    ) -> list[int]:
        """The maximum of each number over all ranks."""
        tensor, reduction = self.start_all_reduce_max(numbers)
        reduction.wait(ledger, reason)
        return [int(number) for number in tensor.numpy()]

    def all_gather(self, value: Value, ledger: Ledger, reason: str = "ranks") -> list[Value]:
        """The values of all ranks, in the order of ranks. They must be JSON values."""
        if not self.several:
            return [value]
        own = json.dumps(value).encode()
        longest = self.all_reduce_max([len(own)], ledger, reason)[0]
        # PyTorch gathers tensors of one size: length, text, padding.
        padded = len(own).to_bytes(8, "little") + own.ljust(longest, b" ")
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with ledger.waiting(reason):
            dist.all_gather(found, mine, group=self._hosts)
        return [_unpadded(padded.numpy().tobytes()) for padded in found]

    def broadcast(self, value: Value, ledger: Ledger, reason: str = "ranks") -> Value:
        """Rank 0's value, on all ranks. The other ranks' `value` is ignored."""
        return self.all_gather(value if self.is_first else None, ledger, reason)[0]  # type: ignore[return-value]

    def barrier(self, ledger: Ledger) -> None:
        """Wait until all ranks have called this."""
        self.all_reduce_max([0], ledger)

    def _new_group(self) -> Any:
        members = dist.get_process_group_ranks(self.group)
        timeout = None if self._timeout_s is None else timedelta(seconds=self._timeout_s)
        return dist.new_group(
            members, backend="gloo", timeout=timeout, use_local_synchronization=True
        )


def _unpadded(content: bytes) -> Any:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])


_BY_GROUP: dict[str, Ranks] = {}
SINGLE = Ranks()


# --- graphs of collectives ------------------------------------------------------------------------


class HasGraphs(Protocol):
    def close(self) -> None: ...


_WITH_GRAPHS: weakref.WeakSet[HasGraphs] = weakref.WeakSet()


def close_before_group(graphs: HasGraphs) -> None:
    """Close `graphs` before the process group is destroyed, or when Python ends. A graph of NCCL's
    collectives uses the group's communicator, which may hang or crash if it goes first."""
    if not _WITH_GRAPHS:
        atexit.register(_close_graphs)
    _WITH_GRAPHS.add(graphs)
    destroy = dist.destroy_process_group
    if hasattr(destroy, "__wrapped__"):
        return

    @wraps(destroy)
    def close_and_destroy(*args: Any, **kwargs: Any) -> None:
        _close_graphs()
        destroy(*args, **kwargs)

    dist.destroy_process_group = close_and_destroy


def _close_graphs() -> None:
    for graphs in list(_WITH_GRAPHS):
        graphs.close()
    _WITH_GRAPHS.clear()
