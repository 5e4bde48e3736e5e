"""The names of `torch.cuda.memory`: the fake device counts its own memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.fake.cuda import state
from headrace.fake.cuda.table import names_of, on_device, returning
from headrace.fake.patches import Replacement


def memory_names() -> Iterator[Replacement]:
    why = "the fake device counts its own memory"
    nothing = "there is no cache to empty"
    yield from names_of(
        torch.cuda.memory,
        why,
        memory_stats=on_device(_memory_stats),
        memory_stats_as_nested_dict=on_device(lambda: _nested(_memory_stats())),
        mem_get_info=on_device(free_and_total),
        reset_peak_memory_stats=on_device(lambda: state.device().reset_peak_memory()),
        reset_max_memory_allocated=on_device(lambda: state.device().reset_peak_memory()),
        reset_max_memory_cached=on_device(lambda: state.device().reset_peak_memory()),
        set_per_process_memory_fraction=_limit_memory,
        get_allocator_backend=returning("native"),
        MemPool=MemPool,
        use_mem_pool=_use_mem_pool,
    )
    yield from names_of(
        torch.cuda.memory,
        nothing,
        empty_cache=lambda: None,
        reset_accumulated_memory_stats=on_device(lambda: None),
        reset_accumulated_host_memory_stats=lambda: None,
        reset_peak_host_memory_stats=lambda: None,
    )
    yield from names_of(
        torch._C,
        why,
        _accelerator_getDeviceStats=lambda index: _nested(_memory_stats()),
        _accelerator_getMemoryInfo=lambda index: free_and_total(),
        _accelerator_resetPeakStats=lambda index: state.device().reset_peak_memory(),
        _accelerator_resetAccumulatedStats=returning(None),
        _accelerator_emptyCache=returning(None),
        _accelerator_emptyHostCache=returning(None),
        _accelerator_isAllocatorInitialized=returning(True),
    )


class MemPool:
    """`torch.cuda.MemPool`. Its `id` is a pool for captures, as the real one's is."""

    def __init__(
        self, allocator: object = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None:
            raise state.not_emulated("torch.cuda.MemPool(allocator=…)")
        self.allocator = None
        self.id = state.device().graph_pool()

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> Any:
        raise state.not_emulated("MemPool.snapshot()")


@contextmanager
def _use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """The fake device has one allocator: which pool memory comes from makes no difference."""
    state.check_index(device)
    yield


class _Statistics(dict[str, int]):
    """PyTorch has dozens of keys. Those that mean nothing here are 0."""

    def __missing__(self, key: str) -> int:
        return 0


def _memory_stats() -> dict[str, int]:
    figures = state.device().memory()
    return _Statistics(
        {
            f"{what}.all.{when}": value
            for what, current, peak in (
                ("allocated_bytes", figures.allocated, figures.peak_allocated),
                ("active_bytes", figures.allocated, figures.peak_allocated),
                ("requested_bytes", figures.allocated, figures.peak_allocated),
                ("reserved_bytes", figures.reserved, figures.peak_reserved),
            )
            for when, value in (("current", current), ("peak", peak))
        }
        | {"num_ooms": 0, "num_alloc_retries": 0}
    )


def _nested(flat: dict[str, int]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def free_and_total() -> tuple[int, int]:
    figures = state.device().memory()
    return figures.free, figures.total


def _limit_memory(fraction: float, device: Any = None) -> None:
    state.check_index(device)
    total = state.device().memory().total
    state.device().limit_memory(int(total * fraction))
