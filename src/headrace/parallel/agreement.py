"""Requests that any rank may make, and that all act on after the same update."""

from __future__ import annotations

import torch

from headrace.device import Device
from headrace.parallel.ranks import AllReduce, Ranks

# Updates between two exchanges of requests. A request takes effect within two of these intervals.
# With many ranks an exchange takes longer, since it goes round a ring: so they exchange less often.
_EXCHANGE_EVERY = 4


_RANKS_PER_UPDATE = 16


class Agreement:
    """Requests that any rank may make, and that all ranks act on after the same update.

        agreement = Agreement(ranks, device)
        for progress in engine.steps(loader):
            stop, save = agreement.poll(signal_number, save_is_due)

    A request is a number, 0 for none; the largest of all ranks counts. The exchange runs in the
    background: a rank waits only if another is several updates behind. A single process
    gets its own requests back at once.
    """

    def __init__(self, ranks: Ranks, device: Device, every: int | None = None) -> None:
        self._ranks, self._ledger = ranks, device.ledger
        self._every = every or max(_EXCHANGE_EVERY, ranks.size // _RANKS_PER_UPDATE)
        self._polls = 0
        self._exchange: tuple[torch.Tensor, AllReduce] | None = None

    def poll(self, *requests: int) -> tuple[int, ...]:
        """Call this after each update. Returns the requests that all ranks act on now."""
        if not self._ranks.several:
            return requests
        self._polls += 1
        if self._polls % self._every:
            return (0,) * len(requests)
        agreed = self._finish_exchange() or (0,) * len(requests)
        if not any(agreed):
            self._exchange = self._ranks.start_all_reduce_max(requests)
        return agreed

    def wait(self, *requests: int) -> tuple[int, ...]:
        """At the end of an epoch, wait for all ranks. Returns everything that they request.

        The requests are those of `poll`, in the same order: one may still be on its way.
        """
        if not self._ranks.several:
            return requests
        self._polls = 0
        before = self._finish_exchange() or (0,) * len(requests)
        now = self._ranks.all_reduce_max(requests, self._ledger, "agreement")
        return tuple(max(pair) for pair in zip(before, now, strict=True))

    def _finish_exchange(self) -> tuple[int, ...] | None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return None
        tensor, reduction = exchange
        reduction.wait(self._ledger, "agreement")
        return tuple(int(number) for number in tensor.numpy())
