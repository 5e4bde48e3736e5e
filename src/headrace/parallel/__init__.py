"""Several processes that train one model.

In go what torchrun has started and a model wrapped by DDP or FSDP2; out come `Ranks`, through which
processes sum, agree and gather, and what differs between wrapped models. A process alone is
`SINGLE`: the same calls, and nothing is sent.
"""

from __future__ import annotations

from headrace.parallel.children import end_children
from headrace.parallel.models import (
    Spread,
    bare,
    data_parallel,
    evaluating,
    is_sharded,
    local,
    locals_of,
    place,
    ranks_of,
    reshard,
    shard_like,
    spread_of,
    synchronise_gradients,
    where,
    whole_weights,
)
from headrace.parallel.ranks import SINGLE, Agreement, Ranks, Sum
from headrace.parallel.torchrun import launched, own_device

__all__ = [
    "SINGLE",
    "Agreement",
    "Ranks",
    "Spread",
    "Sum",
    "bare",
    "data_parallel",
    "end_children",
    "evaluating",
    "is_sharded",
    "launched",
    "local",
    "locals_of",
    "own_device",
    "place",
    "ranks_of",
    "reshard",
    "shard_like",
    "spread_of",
    "synchronise_gradients",
    "where",
    "whole_weights",
]
