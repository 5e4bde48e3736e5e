"""A small cache of batches that stay on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_Versions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """A batch's leaves, the loader's and the device's, with how often each was written to when they
    were copied. The loader's are kept, too: their identity is the key."""

    leaves: list[Any]
    on_device: list[Any]
    key: _Versions
    versions: _Versions

    @classmethod
    def of(cls, leaves: list[Any], on_device: list[Any]) -> CachedBatch | None:
        """None if there are leaves whose changes would not be noticed."""
        key, versions = _versions(leaves), _versions(on_device)
        if key is None or versions is None:
            return None
        return cls(leaves, on_device, key, versions)


class BatchCache:
    """The tensors of at most `max_batches` batches, which stay on the device from epoch to epoch.

    The key is the identity of the loader's tensors. So it hits only if the loader yields the same
    tensors again, unchanged: a list of batches, or a data set that was collated once. What a batch
    holds besides tensors is not kept. A batch with a leaf that moves itself is not kept at all.
    """

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._kept: dict[_Versions, CachedBatch] = {}
        self.hits = 0
        self.misses = 0

    def take_out(self, leaves: list[Any]) -> CachedBatch | None:
        """The batch with these leaves, if it is kept and neither side has changed since. A step may
        have written to a copy. Keep it again when it is handed out: until then nobody else may get
        it, and write to it."""
        key = _versions(leaves)
        kept = None if key is None else self._kept.pop(key, None)
        if kept is None or _versions(kept.on_device) != kept.versions:
            self.misses += 1
            return None
        self.hits += 1
        return kept

    def keep(self, batch: CachedBatch) -> None:
        """Keep a batch if there is room. Its copies must have been handed out: whoever finds it
        does not wait for them."""
        if batch.key in self._kept or len(self._kept) < self._max_batches:
            self._kept[batch.key] = batch


def _versions(leaves: list[Any]) -> _Versions | None:
    """Which tensors these are, and how often each was written to. None if that is not known of
    all."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
            return None
    return tuple((id(leaf), leaf._version) for leaf in leaves) or None
