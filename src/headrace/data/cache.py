"""A small cache of batches that stay on the device."""

from __future__ import annotations

from typing import Any

from headrace.data.tree import batch_tensors


class BatchCache:
    """At most `max_batches` batches that stay on the device from epoch to epoch.

    The key is the identity of the loader's tensors. So it hits only if the loader yields the same
    tensors again, unchanged: a list of batches, or a data set that was collated once.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._kept: dict[tuple[tuple[int, int], ...], tuple[Any, Any]] = {}
        self.hits = 0
        self.misses = 0

    def find(self, batch: Any) -> Any | None:
        """The device's copy of this batch, if there is one and the batch has not changed since."""
        kept = self._kept.get(self._key(batch))
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        return kept[1]

    def keep(self, batch: Any, on_device: Any) -> None:
        """Keep a batch if there is room. The host's batch is kept, too: its identity is the key."""
        if len(self._kept) < self._max_batches:
            self._kept[self._key(batch)] = (batch, on_device)

    @staticmethod
    def _key(batch: Any) -> tuple[tuple[int, int], ...]:
        return tuple((id(tensor), tensor._version) for tensor in batch_tensors(batch))
