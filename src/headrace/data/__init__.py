"""From a loader to batches on the device.

In goes any iterable of batches; out come the same batches, copied ahead of their use, with the
place in the loader after each of them. Batches may be nested in any way (`tree.py`); lengths may be
rounded to a few shapes (`buckets.py`); ranks are kept in step (`align.py`).
"""

from __future__ import annotations

from headrace.data.align import Aligned
from headrace.data.buckets import BucketBatches, Buckets, PadToBuckets
from headrace.data.cache import BatchCache
from headrace.data.feed import Batches, BlockingCopies, Cursor, Feed, Fetched
from headrace.data.loader_state import state_keeper
from headrace.data.prefetcher import Prefetcher, prefetch, unprefetched
from headrace.data.rng import (
    generator_states,
    host_rng_states,
    rng_states,
    set_host_rng_states,
    set_rng_states,
)
from headrace.data.source import (
    Draws,
    Rest,
    Skipping,
    end_workers,
    first_of,
    generators_of,
    loader_error,
    with_samplers,
)
from headrace.data.spent import UsedIterators
from headrace.data.tree import (
    batch_leaves,
    describe_batch,
    flatten_batch,
    is_plain_tensor,
    measure_leaves,
    moves_itself,
    rebuild_batch,
)

__all__ = [
    "Aligned",
    "BatchCache",
    "Batches",
    "BlockingCopies",
    "BucketBatches",
    "Buckets",
    "Cursor",
    "Draws",
    "Feed",
    "Fetched",
    "PadToBuckets",
    "Prefetcher",
    "Rest",
    "Skipping",
    "UsedIterators",
    "batch_leaves",
    "describe_batch",
    "end_workers",
    "first_of",
    "flatten_batch",
    "generator_states",
    "generators_of",
    "host_rng_states",
    "is_plain_tensor",
    "loader_error",
    "measure_leaves",
    "moves_itself",
    "prefetch",
    "rebuild_batch",
    "rng_states",
    "set_host_rng_states",
    "set_rng_states",
    "state_keeper",
    "unprefetched",
    "with_samplers",
]
