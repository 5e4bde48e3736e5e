"""The properties of the fake CUDA device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns: figures like those of a large GPU."""

    name: str = "Headrace fake GPU"
    major: int = 9
    minor: int = 0
    total_memory: int = 16 << 30
    multi_processor_count: int = 132
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_multiprocessor: int = 233472
    warp_size: int = 32
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""  # noqa: N815 - PyTorch's name
    uuid: str = "00000000-0000-0000-0000-000000000000"
