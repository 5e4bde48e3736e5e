"""A small cache of batches that stay on the device."""

from __future__ import annotations

from typing import Any

from headrace.data.tree import batch_tensors

_Versions = tuple[tuple[int, int], ...]


class BatchCache:
    """At most `max_batches` batches that stay on the device from epoch to epoch.

    The key is the identity of the loader's tensors. So it hits only if the loader yields the same
    tensors again, unchanged: a list of batches, or a data set that was collated once.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._kept: dict[_Versions, tuple[Any, Any, _Versions]] = {}
        self.hits = 0
        self.misses = 0

    def find(self, batch: Any) -> Any | None:
        """The device's copy of this batch, if there is one and neither has changed since. A step
        may have written to the copy."""
        kept = self._kept.get(_versions(batch))
        if kept is not None and _versions(kept[1]) != kept[2]:
            del self._kept[_versions(batch)]
            kept = None
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        return kept[1]

    def keep(self, batch: Any, on_device: Any) -> None:
        """Keep a batch if there is room. The host's batch is kept, too: its identity is the key."""
        if len(self._kept) < self._max_batches:
            self._kept[_versions(batch)] = (batch, on_device, _versions(on_device))


def _versions(batch: Any) -> _Versions:
    """Which tensors a batch has, and how often each was written to."""
    return tuple((id(tensor), tensor._version) for tensor in batch_tensors(batch))
