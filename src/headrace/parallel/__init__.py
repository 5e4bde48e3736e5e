"""Several processes that train one model.

In go the processes that torchrun started and a model wrapped by DDP or sharded by FSDP2. Out come
`Ranks`, with their collectives, and what a wrapped model needs that a plain one does not. A single
process uses `SINGLE`, which has the same methods and sends nothing.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.parallel.agreement import Agreement as Agreement
    from headrace.parallel.models import Parallelism as Parallelism
    from headrace.parallel.models import device_of as device_of
    from headrace.parallel.models import eval_mode as eval_mode
    from headrace.parallel.models import full_state_dict as full_state_dict
    from headrace.parallel.models import is_sharded as is_sharded
    from headrace.parallel.models import local_shard as local_shard
    from headrace.parallel.models import local_shards as local_shards
    from headrace.parallel.models import parallelism_of as parallelism_of
    from headrace.parallel.models import ranks_of as ranks_of
    from headrace.parallel.models import reshard as reshard
    from headrace.parallel.models import set_gradient_sync as set_gradient_sync
    from headrace.parallel.models import shard_like as shard_like
    from headrace.parallel.models import shard_region as shard_region
    from headrace.parallel.models import unwrap as unwrap
    from headrace.parallel.models import wrap_ddp as wrap_ddp
    from headrace.parallel.ranks import SINGLE as SINGLE
    from headrace.parallel.ranks import AllReduce as AllReduce
    from headrace.parallel.ranks import Ranks as Ranks
    from headrace.parallel.ranks import close_before_group as close_before_group
    from headrace.parallel.torchrun import is_launched as is_launched
    from headrace.parallel.torchrun import join_ranks as join_ranks
    from headrace.parallel.torchrun import rank_device as rank_device

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
