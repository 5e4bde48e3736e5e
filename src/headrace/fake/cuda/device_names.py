"""Names of streams, of the device, of random numbers, and the calls below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.fake.cuda import state
from headrace.fake.cuda.cuda_graph import CUDAGraph
from headrace.fake.cuda.properties import DeviceProperties
from headrace.fake.cuda.random import Generator
from headrace.fake.cuda.streams import (
    CudaEvent,
    CudaStream,
    Event,
    ExternalStream,
    Stream,
    stream_of,
)
from headrace.fake.cuda.table import copy_of, names_of, on_device, returning
from headrace.fake.patches import Replacement

_CYCLES_PER_MS = 1_000_000


def stream_names() -> Iterator[Replacement]:
    cuda = torch.cuda
    why = "work goes to the fake device's streams"
    yield from names_of(
        cuda,
        why,
        Stream=CudaStream,
        ExternalStream=ExternalStream,
        Event=CudaEvent,
        CUDAGraph=CUDAGraph,
        current_stream=on_device(lambda: stream_of(state.device().current_stream())),
        default_stream=on_device(lambda: stream_of(state.device().default_stream)),
        get_stream_from_external=lambda data_ptr, device=None: ExternalStream(data_ptr, device),
        set_stream=_set_stream,
        _set_stream_by_id=_set_stream_by_id,
        synchronize=on_device(lambda: state.device().synchronize("torch.cuda.synchronize")),
        _sleep=_sleep,
    )
    yield from names_of(torch, why, Stream=Stream, Event=Event)
    yield from names_of(
        cuda.graphs,
        "a capture records on the fake device",
        graph_pool_handle=lambda: state.device().graph_pool(),
    )
    # `torch.cuda.graph` keeps its stream for the next capture: it must not outlive the block.
    yield Replacement(cuda.graph, "default_capture_stream", None, "a stream of this block")
    yield Replacement(torch._C, "_host_emptyCache", returning(None), "called by torch.cuda.graph")


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        state.device().switch(stream._fake)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    device = state.device()
    device.switch(device.stream_by_id(stream_id))


def _sleep(cycles: int) -> None:
    state.device().work(cycles / _CYCLES_PER_MS, "torch.cuda._sleep")


def device_names() -> Iterator[Replacement]:
    cuda, properties = torch.cuda, DeviceProperties()
    yield from names_of(
        cuda,
        "there is one CUDA device, and it is ready",
        _initialized=True,
        is_available=lambda: True,
        is_initialized=state.in_use,
        init=returning(None),
        _lazy_init=lambda: (state.device(), None)[1],
        _nvml_based_avail=lambda: True,
        _is_in_bad_fork=state.in_forked_child,
        device_count=lambda: 1,
        current_device=lambda: (state.device(), 0)[1],
        set_device=state.check_index,
        _exchange_device=_exchange_device,
        _maybe_exchange_device=_exchange_device,
        ipc_collect=returning(None),
        can_device_access_peer=returning(False),
        set_sync_debug_mode=_set_sync_debug_mode,
        get_sync_debug_mode=lambda: state.device().sync_debug_mode,
    )
    yield from names_of(
        cuda,
        "what the device can do",
        is_bf16_supported=returning(True),
        is_tf32_supported=returning(True),
        get_device_name=on_device(lambda: properties.name),
        get_device_capability=on_device(lambda: (properties.major, properties.minor)),
        get_device_properties=on_device(
            lambda: replace(properties, total_memory=state.device().memory().total)
        ),
        get_arch_list=returning(["sm_90"]),
        get_gencode_flags=returning("-gencode compute=compute_90,code=sm_90"),
    )
    built = "PyTorch looks built with CUDA"
    yield from names_of(torch.backends.cuda, built, is_built=lambda: True)
    yield from names_of(torch.version, built, cuda=torch.version.cuda or "13.0")
    yield from names_of(
        torch.backends.cudnn, "cuDNN would be given CPU tensors", is_acceptable=returning(False)
    )
    yield from names_of(
        torch.distributed, "NCCL needs GPUs", init_process_group=_without_nccl("init_process_group")
    )


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    names = ["default", "warn", "error"]
    if debug_mode not in (*names, *range(len(names))):
        raise RuntimeError(
            "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
        )
    mode = names.index(debug_mode) if isinstance(debug_mode, str) else debug_mode
    state.device().sync_debug_mode = mode


def _exchange_device(index: int) -> int:
    state.check_index(index)
    return 0


def _without_nccl(name: str) -> Callable[..., Any]:
    if not torch.distributed.is_available():
        return returning(None)
    original = copy_of(getattr(torch.distributed.distributed_c10d, name))

    def call(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend is not None and "nccl" in str(backend):
            raise state.not_emulated(f"backend={str(backend)!r} (NCCL)", "use backend='gloo'")
        return original(backend, *args, **kwargs)

    return call


def random_names() -> Iterator[Replacement]:
    yield Replacement(torch, "Generator", Generator, "PyTorch cannot make one on cuda")
    yield Replacement(
        torch.cuda, "default_generators", _DefaultGenerators(), "seeds and random states"
    )


class _DefaultGenerators(Sequence[torch.Generator]):
    """`torch.cuda.default_generators`: one for each device."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return (state.device().generator,)[index]


def driver_names() -> Iterator[Replacement]:
    """Libraries call these where `torch.cuda`'s own functions take too long for them."""

    def ids(stream: Any) -> tuple[int, int, int]:
        return stream.state.number, 0, 1

    def synchronize() -> None:
        state.device().synchronize("torch.cuda.synchronize")

    for name, new in {
        "_cuda_getDevice": lambda: (state.device(), 0)[1],
        "_cuda_setDevice": state.check_index,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getCurrentStream": lambda index: ids(state.device().current_stream()),
        "_cuda_getDefaultStream": lambda index: ids(state.device().default_stream),
        "_cuda_setStream": _set_stream_by_id,
        "_cuda_synchronize": synchronize,
        "_cuda_isCurrentStreamCapturing": lambda: state.device().current_stream().tape is not None,
        "_cuda_isInBadFork": state.in_forked_child,
        "_cuda_clearCublasWorkspaces": lambda: None,
        # After a capture that failed. Its memory is gone then.
        "_cuda_endAllocateToPool": lambda index, pool: None,
        "_cuda_releasePool": lambda index, pool: None,
        "_nccl_version": lambda: (2 << 32) + (28 << 16),
        "_nccl_version_suffix": lambda: b"",
        "_scatter": _scatter,
    }.items():
        yield Replacement(torch._C, name, new, "what torch.cuda's functions call")
    yield Replacement(torch, "_cufft_get_plan_cache_size", lambda index: 0, "FFTs run on the CPU")


def _scatter(tensor: torch.Tensor, devices: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    """For `nn.DataParallel`, which has one device here."""
    if len(devices) > 1:
        raise state.not_emulated(f"a scatter to {len(devices)} devices")
    return (tensor.to(torch.device("cuda", devices[0]), non_blocking=True),)


def accelerator_names() -> Iterator[Replacement]:
    yield from names_of(
        torch._C,
        "torch.accelerator asks C++",
        _accelerator_getAccelerator=lambda: torch.device("cuda"),
        _get_accelerator=lambda check=None: torch.device("cuda"),
        _accelerator_getDeviceIndex=lambda: 0,
        _accelerator_setDeviceIndex=state.check_index,
        _accelerator_exchangeDevice=_exchange_device,
        _accelerator_maybeExchangeDevice=_exchange_device,
        _accelerator_getStream=lambda index=None: stream_of(state.device().current_stream()),
        _accelerator_setStream=_set_stream,
        _accelerator_synchronizeDevice=lambda index=None: state.device().synchronize(
            "torch.accelerator.synchronize"
        ),
        _accelerator_hooks_device_count=lambda: 1,
        _accelerator_hooks_get_current_device=lambda: 0,
        _accelerator_hooks_set_current_device=state.check_index,
        _accelerator_hooks_exchange_device=_exchange_device,
        _accelerator_hooks_maybe_exchange_device=_exchange_device,
    )
