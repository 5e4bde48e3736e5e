"""A small cache of batches that stay on the device."""

from __future__ import annotations

from typing import Any

from headrace.data.tree import batch_tensors


class BatchCache:
    """Batches that stay on the device from epoch to epoch.

    Keyed by the very tensors the loader handed out, so it can only hit where a loader hands out
    the same ones again, unchanged: a list of batches, or a data set collated once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[tuple[tuple[int, int], ...], tuple[Any, Any]] = {}
        self.hits = 0
        self.misses = 0

    def find(self, batch: Any) -> Any | None:
        """The device's copy of this batch, if it is kept and the batch has not been written to."""
        kept = self._kept.get(self._key(batch))
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        return kept[1]

    def keep(self, batch: Any, on_device: Any) -> None:
        """Keep it if there is room. The host batch is held too: its identity is the key."""
        if len(self._kept) < self._most:
            self._kept[self._key(batch)] = (batch, on_device)

    @staticmethod
    def _key(batch: Any) -> tuple[tuple[int, int], ...]:
        return tuple((id(tensor), tensor._version) for tensor in batch_tensors(batch))
