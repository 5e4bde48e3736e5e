"""Batches that stay on the device."""

from __future__ import annotations

import torch

from headrace.data import BatchCache
from headrace.data.cache import CachedBatch


def kept(batch: list[torch.Tensor]) -> CachedBatch:
    found = CachedBatch.of(batch, [one.clone() for one in batch])
    assert found is not None
    return found


def test_a_copy_that_a_step_has_written_to_is_not_used_again() -> None:
    cache, batch = BatchCache(2), [torch.ones(3)]
    first, second = kept(batch), kept(batch)
    cache.keep(first)
    assert cache.take_out(batch) is first
    cache.keep(first)
    first.on_device[0].div_(2)
    assert cache.take_out(batch) is None
    cache.keep(second)
    assert cache.take_out(batch) is second
    cache.keep(second)
    batch[0].add_(1)
    assert cache.take_out(batch) is None
    assert (cache.hits, cache.misses) == (2, 2)


def test_a_batch_is_taken_out_by_one_at_a_time() -> None:
    cache, batch = BatchCache(1), [torch.ones(3)]
    cache.keep(kept(batch))
    assert cache.take_out(batch) is not None
    assert cache.take_out(batch) is None


def test_a_copy_is_that_of_the_values_when_it_was_made() -> None:
    cache, batch = BatchCache(1), [torch.ones(3)]
    made = kept(batch)
    batch[0].add_(1)  # by a loader that uses its memory again, before the copy is handed out
    cache.keep(made)
    assert cache.take_out(batch) is None


def test_what_is_no_tensor_is_not_kept() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    with torch.inference_mode():
        without_versions = torch.ones(2)
    for leaves in ([packed], [torch.ones(2), packed], [], [without_versions]):
        assert CachedBatch.of(leaves, leaves) is None
        assert BatchCache(2).take_out(leaves) is None
