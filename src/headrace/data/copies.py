"""The copies of one pass over a loader: which batches are on their way to the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from headrace.data.cache import BatchCache, CachedBatch
from headrace.data.transfer import Sender
from headrace.data.tree import batch_tensors, flatten_batch, measure_leaves, rebuild_batch
from headrace.device import Device, Event, Stream

# How many copies may be queued before the host waits for the oldest. In a loop without a run-ahead
# bound, pinned memory would grow for as long as the host is faster than the device.
_MAX_COPIES = 32


@dataclass(frozen=True, slots=True)
class Arriving:
    """A batch on its way. The event `ready` passes when its copy is done; None if nothing was
    copied. `to_keep` is what the cache gets when the batch is handed out. `is_shared`: it has
    tensors of the loader's own, not copies."""

    batch: Any
    ready: Event | None
    nbytes: int
    samples: int
    to_keep: CachedBatch | None = None
    is_shared: bool = False


class Copies:
    """Sends batches to the device, on the streams `transfers` in turn, for the stream `owner`."""

    def __init__(
        self,
        device: Device,
        owner: Stream,
        transfers: tuple[Stream, ...],
        *,
        depth: int,
        pin: bool,
        runs_on_owner: bool,
        cache: BatchCache | None,
    ) -> None:
        self._device = device
        self._owner = owner
        self._transfers = transfers
        self._depth = depth
        self._cache = cache
        self._sender = Sender(device, owner, pin=pin, runs_on_owner=runs_on_owner)
        self._count = 0
        self._queued: deque[tuple[Event, bool]] = deque()
        self._spare: list[Event] = []

    def start(self, batch: Any) -> Arriving:
        """Start the copy of a batch, if it needs one."""
        self._count += 1
        leaves = flatten_batch(batch)
        nbytes, samples = measure_leaves(leaves)
        kept = None if self._cache is None else self._cache.take_out(leaves)
        if kept is not None:
            found = rebuild_batch(batch, kept.on_device)
            return Arriving(found, None, nbytes, samples, to_keep=kept)
        if not self._device.asynchronous:
            return Arriving(self._moved(batch, leaves), None, nbytes, samples, is_shared=True)
        ready = self._free_event()
        transfer = self._transfers[(self._count - 1) % len(self._transfers)]
        arriving, copied = self._sender.send(leaves, transfer, ready)
        if copied:
            self._queued.append((ready, self._is_reusable()))
        else:
            self._spare.append(ready)
        try:
            on_device = rebuild_batch(batch, arriving)
        except BaseException:  # from the batch's own class; the copy still writes to the memory
            if copied:
                self._owner.wait_event(ready)
            raise
        # Not objects that have moved themselves: what they hold is on the device now.
        is_shared = copied < len(leaves) and any(
            one is leaf and isinstance(leaf, torch.Tensor)
            for one, leaf in zip(arriving, leaves, strict=True)
        )
        to_keep = None if self._cache is None else CachedBatch.of(leaves, arriving)
        return Arriving(on_device, ready if copied else None, nbytes, samples, to_keep, is_shared)

    def hand_over(self, arriving: Arriving, reader: Stream) -> None:
        """Make the stream that reads a batch wait for its copy."""
        if arriving.ready is not None:
            reader.wait_event(arriving.ready)
            if reader is not self._owner:
                # The loop has switched to another stream than the one that owns the memory.
                for tensor in batch_tensors(arriving.batch):
                    self._device.record_stream(tensor, reader)
        self._keep(arriving)

    def drop(self, arriving: Arriving) -> None:
        """Give up a batch that nobody will read."""
        if arriving.ready is not None:
            # The owner gets the memory back, and must not reuse it before the copy is done.
            self._owner.wait_event(arriving.ready)
        self._keep(arriving)

    def _keep(self, arriving: Arriving) -> None:
        """Put a batch into the cache, when the owner waits for its copy: another pass that finds it
        there will not."""
        if self._cache is not None and arriving.to_keep is not None:
            self._cache.keep(arriving.to_keep)

    def _moved(self, batch: Any, leaves: list[Any]) -> Any:
        """The batch on a device that needs no copies: itself, if all of its tensors are there."""
        if all(type(leaf) is torch.Tensor and self._device.holds(leaf) for leaf in leaves):
            return batch
        target = self._device.torch_device
        return rebuild_batch(batch, [leaf.to(target) for leaf in leaves])

    def _free_event(self) -> Event:
        """An event to record behind a copy: a new one, or one whose copy is done. If too many
        copies are queued, the host waits for the oldest."""
        if self._spare:
            return self._spare.pop()
        if len(self._queued) < _MAX_COPIES:
            return self._device.event()
        oldest, is_reusable = self._queued.popleft()
        if not oldest.query():
            self._device.wait(oldest, "copies_behind")
        return oldest if is_reusable else self._device.event()

    def _is_reusable(self) -> bool:
        """Whether this copy's event can be recorded again once it is the oldest. Its batch has been
        handed out by then; but a staging buffer, if there is one, still waits for the event."""
        return self._depth < _MAX_COPIES and not self._sender.staged
