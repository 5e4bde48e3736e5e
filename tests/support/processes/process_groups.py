"""Process groups of one process, for tests of collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_process_group(ranks: int = 2) -> Iterator[None]:
    """PyTorch's fake transport: this process is rank 0, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def gloo_process_group() -> Iterator[None]:
    """Gloo with one rank: DDP and futures work."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
