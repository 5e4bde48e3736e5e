"""Batches that stay on the device."""

from __future__ import annotations

import torch

from headrace.data import BatchCache


def test_a_copy_that_a_step_has_written_to_is_not_used_again() -> None:
    cache, batch, on_device = BatchCache(2), [torch.ones(3)], [torch.ones(3)]
    cache.keep(batch, on_device)
    assert cache.find(batch) is on_device
    on_device[0].div_(2)
    assert cache.find(batch) is None
    again = [torch.ones(3)]
    cache.keep(batch, again)
    assert cache.find(batch) is again
    batch[0].add_(1)
    assert cache.find(batch) is None
    assert (cache.hits, cache.misses) == (2, 2)


def test_what_is_no_tensor_is_not_kept() -> None:
    cache, packed = BatchCache(2), torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    for leaves in ([packed], [torch.ones(2), packed], []):
        cache.keep(leaves, leaves)
        assert cache.find(leaves) is None
