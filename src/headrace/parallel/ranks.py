"""The processes that train together, as PyTorch's distributed engine knows them.

A process alone is rank 0 of 1, and nothing here then does anything. Work on the device is summed
in the group that the gradients use; what the hosts have to tell each other goes as JSON through a
group of its own. The host waits for the other ranks only through the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.device import Device, Ledger

Value = TypeVar("Value")
# Updates between two looks at what the other ranks wish for: a stop comes twice as late at most.
# With many ranks the answer takes longer, since it goes round: then they look less often.
_AGREE_EVERY = 4
_RANKS_PER_UPDATE = 16


class Sum:
    """A sum over all ranks under way, into the tensor that was given."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor  # must live as long as the sum is under way
        #: Whether the device does the waiting: the current stream, not the host.
        self.on_stream = not tensor.is_cpu

    def done(self) -> bool:
        """Whether a host wait would find it done. Never blocks."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, ledger: Ledger, reason: str) -> None:
        """What follows comes after the sum: on the current stream, or here on the host."""
        work, self._work = self._work, None
        if work is None:
            return
        if self.on_stream:
            work.wait()
        elif work.is_completed():
            work.wait()  # raises what went wrong, if so
            ledger.passed(reason)
        else:
            with ledger.waiting(reason):
                work.wait()


class Ranks:
    """This process among those that train together: `rank` of `size`.

    `group` is PyTorch's, None for a process alone. What is called here is called on all ranks, in
    the same order.
    """

    def __init__(self, group: Any = None, *, timeout_s: float | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        #: Whether there is any other: no property, since each step asks some times.
        self.several = self.size > 1
        self._timeout_s = timeout_s
        # The device's group may know no host memory, and its order is the gradients'.
        self._hosts = self._new_group() if self.several else None

    @classmethod
    def of(cls, group: Any, *, timeout_s: float | None = None) -> Ranks:
        """The ranks of a process group: the same object each time."""
        name = str(group.group_name)
        known = _KNOWN.get(name)
        if known is None or known.group is not group:
            known = _KNOWN[name] = cls(group, timeout_s=timeout_s)
        return known

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    @property
    def on_device(self) -> bool:
        """Whether gradients are averaged by the device, without the host."""
        return self.group is not None and "nccl" in str(dist.get_backend_config(self.group))

    def beside(self) -> Ranks:
        """The same ranks with a group of their own, for one other thread of each process."""
        return Ranks(self.group, timeout_s=self._timeout_s) if self.several else self

    # --- on the device ----------------------------------------------------------------------------

    def sum(self, tensor: torch.Tensor) -> Sum:
        """Start to sum `tensor` over all ranks, in place. The host goes on."""
        if not self.several:
            return Sum(None, tensor)
        return Sum(dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def average_gradients(self, gradients: Sequence[torch.Tensor], ledger: Ledger) -> None:
        """What DDP does to gradients while it goes backward, for those that it left alone."""
        sums = [self.sum(gradient) for gradient in gradients]
        for one in sums:
            one.wait(ledger, "ranks")
        torch._foreach_div_(list(gradients), float(self.size))

    # --- between the hosts ------------------------------------------------------------------------

    def start_maximum(self, numbers: Sequence[int]) -> tuple[torch.Tensor, Sum]:
        """Start to find the largest of each number over all ranks. The host goes on."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        work = None
        if self.several:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._hosts, async_op=True)
        return tensor, Sum(work, tensor)

    def maximum(self, numbers: Sequence[int], ledger: Ledger, reason: str = "ranks") -> list[int]:
        """The largest of each number over all ranks."""
        tensor, under_way = self.start_maximum(numbers)
        under_way.wait(ledger, reason)
        return [int(number) for number in tensor.numpy()]

    def gathered(self, value: Value, ledger: Ledger, reason: str = "ranks") -> list[Value]:
        """Every rank's value, which must be one for JSON, in the order of ranks."""
        if not self.several:
            return [value]
        own = json.dumps(value).encode()
        longest = self.maximum([len(own)], ledger, reason)[0]
        # Behind its length, so that all are of one size.
        padded = len(own).to_bytes(8, "little") + own.ljust(longest, b" ")
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with ledger.waiting(reason):
            dist.all_gather(found, mine, group=self._hosts)
        return [_unpadded(one.numpy().tobytes()) for one in found]

    def told(self, value: Value, ledger: Ledger, reason: str = "ranks") -> Value:
        """What rank 0 has: what the others give is not looked at."""
        return self.gathered(value if self.is_first else None, ledger, reason)[0]  # type: ignore[return-value]

    def barrier(self, ledger: Ledger, reason: str = "ranks") -> None:
        """Wait until all ranks are here."""
        self.maximum([0], ledger, reason)

    def _new_group(self) -> Any:
        members = dist.get_process_group_ranks(self.group)
        timeout = None if self._timeout_s is None else timedelta(seconds=self._timeout_s)
        return dist.new_group(
            members, backend="gloo", timeout=timeout, use_local_synchronization=True
        )


def _unpadded(content: bytes) -> Any:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])


_KNOWN: dict[str, Ranks] = {}
SINGLE = Ranks()


class Agreement:
    """Wishes that any rank may have, and that all of them learn of after the same update.

        agreement = Agreement(ranks, device)
        for info in engine.steps(loader):
            stop, save = agreement.look(signal_number, save_is_due)

    A wish is a number, 0 for none; the largest of all ranks counts. It travels while training goes
    on: nobody waits, unless another rank is some updates behind. A process alone knows at once.
    """

    def __init__(self, ranks: Ranks, device: Device, every: int | None = None) -> None:
        self._ranks, self._ledger = ranks, device.ledger
        self._every = every or max(_AGREE_EVERY, ranks.size // _RANKS_PER_UPDATE)
        self._looks = 0
        self._under_way: tuple[torch.Tensor, Sum] | None = None

    def look(self, *wishes: int) -> tuple[int, ...]:
        """After each update: what is wished for, to be done now, by all ranks."""
        if not self._ranks.several:
            return wishes
        self._looks += 1
        if self._looks % self._every:
            return (0,) * len(wishes)
        agreed = self._arrived() or (0,) * len(wishes)
        if not any(agreed):
            self._under_way = self._ranks.start_maximum(wishes)
        return agreed

    def settle(self, *wishes: int) -> tuple[int, ...]:
        """At the end of an epoch: wait for all ranks, and for all that they wish."""
        if not self._ranks.several:
            return wishes
        self._looks = 0
        before = self._arrived() or (0,) * len(wishes)
        now = self._ranks.maximum(wishes, self._ledger, "agreement")
        return tuple(map(max, before, now))

    def _arrived(self) -> tuple[int, ...] | None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        tensor, work = under_way
        work.wait(self._ledger, "agreement")
        return tuple(int(number) for number in tensor.numpy())
