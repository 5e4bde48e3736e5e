"""A small cache of batches that stay on the device."""

from __future__ import annotations

from typing import Any

import torch

_Versions = tuple[tuple[int, int], ...]


class BatchCache:
    """The tensors of at most `max_batches` batches, which stay on the device from epoch to epoch.

    The key is the identity of the loader's tensors. So it hits only if the loader yields the same
    tensors again, unchanged: a list of batches, or a data set that was collated once. What a batch
    holds besides tensors is not kept. A batch with a leaf that moves itself is not kept at all.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._kept: dict[_Versions, tuple[list[Any], list[Any], _Versions]] = {}
        self.hits = 0
        self.misses = 0

    def find(self, leaves: list[Any]) -> list[Any] | None:
        """The device's copies of a batch's leaves, if there are any and neither side has changed
        since. A step may have written to a copy."""
        key = _versions(leaves)
        kept = None if key is None else self._kept.get(key)
        if key is not None and kept is not None and _versions(kept[1]) != kept[2]:
            del self._kept[key]
            kept = None
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        return kept[1]

    def keep(self, leaves: list[Any], on_device: list[Any]) -> None:
        """Keep the copies of a batch's leaves if there is room. The host's tensors are kept, too:
        their identity is the key."""
        key, versions = _versions(leaves), _versions(on_device)
        if key is not None and versions is not None and len(self._kept) < self._max_batches:
            self._kept[key] = (leaves, on_device, versions)


def _versions(leaves: list[Any]) -> _Versions | None:
    """Which tensors these are, and how often each was written to. None if there are others."""
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return tuple((id(leaf), leaf._version) for leaf in leaves)
