"""From a loader to batches on the device.

In goes any iterable of batches. Out come the same batches, copied to the device before they are
needed, each with the loader's position after it. Batches may be nested (`tree.py`), padded to a few
shapes (`buckets.py`), and are as many on every rank (`align.py`).
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.data.align import Aligned as Aligned
    from headrace.data.buckets import BucketBatches as BucketBatches
    from headrace.data.buckets import Buckets as Buckets
    from headrace.data.buckets import PadToBuckets as PadToBuckets
    from headrace.data.cache import BatchCache as BatchCache
    from headrace.data.feed import Batches as Batches
    from headrace.data.feed import BlockingCopies as BlockingCopies
    from headrace.data.feed import Cursor as Cursor
    from headrace.data.feed import Feed as Feed
    from headrace.data.feed import Fetched as Fetched
    from headrace.data.loader_processes import end_workers as end_workers
    from headrace.data.loader_processes import loader_error as loader_error
    from headrace.data.loader_rng import LoaderRng as LoaderRng
    from headrace.data.loader_state import as_stateful as as_stateful
    from headrace.data.partial_loaders import ResumedLoader as ResumedLoader
    from headrace.data.partial_loaders import Skipping as Skipping
    from headrace.data.partial_loaders import first_of as first_of
    from headrace.data.prefetcher import Prefetcher as Prefetcher
    from headrace.data.prefetcher import prefetch as prefetch
    from headrace.data.prefetcher import unwrap_prefetcher as unwrap_prefetcher
    from headrace.data.rng import generator_states as generator_states
    from headrace.data.rng import host_rng_states as host_rng_states
    from headrace.data.rng import rng_states as rng_states
    from headrace.data.rng import set_host_rng_states as set_host_rng_states
    from headrace.data.rng import set_rng_states as set_rng_states
    from headrace.data.samplers import generators_of as generators_of
    from headrace.data.samplers import with_samplers as with_samplers
    from headrace.data.transfer import Sender as Sender
    from headrace.data.tree import batch_leaves as batch_leaves
    from headrace.data.tree import batch_tensors as batch_tensors
    from headrace.data.tree import describe_batch as describe_batch
    from headrace.data.tree import flatten_batch as flatten_batch
    from headrace.data.tree import is_plain_object as is_plain_object
    from headrace.data.tree import is_plain_tensor as is_plain_tensor
    from headrace.data.tree import measure_leaves as measure_leaves
    from headrace.data.tree import moves_itself as moves_itself
    from headrace.data.tree import other_attributes as other_attributes
    from headrace.data.tree import rebuild_batch as rebuild_batch
    from headrace.data.used_iterators import UsedIterators as UsedIterators
    from headrace.data.used_iterators import explain_no_batch as explain_no_batch

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
