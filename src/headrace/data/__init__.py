"""From a loader to batches on the device.

In goes any iterable of batches. Out come the same batches, copied to the device before they are
needed, each with the loader's position after it. Batches may be nested (`tree.py`), padded to a few
shapes (`buckets.py`), and are as many on every rank (`align.py`).
"""

from __future__ import annotations

from headrace.data.align import Aligned
from headrace.data.buckets import BucketBatches, Buckets, PadToBuckets
from headrace.data.cache import BatchCache
from headrace.data.feed import Batches, BlockingCopies, Cursor, Feed, Fetched
from headrace.data.loader_state import as_stateful
from headrace.data.prefetcher import Prefetcher, prefetch, unwrap_prefetcher
from headrace.data.rng import (
    generator_states,
    host_rng_states,
    rng_states,
    set_host_rng_states,
    set_rng_states,
)
from headrace.data.source import (
    LoaderRng,
    ResumedLoader,
    Skipping,
    end_workers,
    first_of,
    generators_of,
    loader_error,
    with_samplers,
)
from headrace.data.tree import (
    batch_leaves,
    describe_batch,
    flatten_batch,
    is_plain_object,
    is_plain_tensor,
    measure_leaves,
    moves_itself,
    other_attributes,
    rebuild_batch,
)
from headrace.data.used_iterators import UsedIterators, explain_no_batch

__all__ = [
    "Aligned",
    "BatchCache",
    "Batches",
    "BlockingCopies",
    "BucketBatches",
    "Buckets",
    "Cursor",
    "Feed",
    "Fetched",
    "LoaderRng",
    "PadToBuckets",
    "Prefetcher",
    "ResumedLoader",
    "Skipping",
    "UsedIterators",
    "as_stateful",
    "batch_leaves",
    "describe_batch",
    "end_workers",
    "explain_no_batch",
    "first_of",
    "flatten_batch",
    "generator_states",
    "generators_of",
    "host_rng_states",
    "is_plain_object",
    "is_plain_tensor",
    "loader_error",
    "measure_leaves",
    "moves_itself",
    "other_attributes",
    "prefetch",
    "rebuild_batch",
    "rng_states",
    "set_host_rng_states",
    "set_rng_states",
    "unwrap_prefetcher",
    "with_samplers",
]
