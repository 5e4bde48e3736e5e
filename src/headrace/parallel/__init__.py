"""Several processes that train one model.

In go the processes that torchrun started and a model wrapped by DDP or sharded by FSDP2. Out come
`Ranks`, with their collectives, and what a wrapped model needs that a plain one does not. A single
process uses `SINGLE`, which has the same methods and sends nothing.
"""

from __future__ import annotations

from headrace.parallel.models import (
    Parallelism,
    device_of,
    eval_mode,
    full_state_dict,
    is_sharded,
    local_shard,
    local_shards,
    parallelism_of,
    ranks_of,
    reshard,
    set_gradient_sync,
    shard_like,
    shard_region,
    unwrap,
    wrap_ddp,
)
from headrace.parallel.ranks import SINGLE, Agreement, AllReduce, Ranks, close_before_group
from headrace.parallel.torchrun import is_launched, join_ranks, rank_device

__all__ = [
    "SINGLE",
    "Agreement",
    "AllReduce",
    "Parallelism",
    "Ranks",
    "close_before_group",
    "device_of",
    "eval_mode",
    "full_state_dict",
    "is_launched",
    "is_sharded",
    "join_ranks",
    "local_shard",
    "local_shards",
    "parallelism_of",
    "rank_device",
    "ranks_of",
    "reshard",
    "set_gradient_sync",
    "shard_like",
    "shard_region",
    "unwrap",
    "wrap_ddp",
]
