"""What `fake_cuda()` replaces in PyTorch, each with its reason.

Three kinds: names that are emulated, names that are kept because PyTorch's own code works on the
emulated ones, and all others of `torch.cuda`, which raise an error that names them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from headrace.fake.cuda import state
from headrace.fake.cuda.legacy import legacy_types, set_default_tensor_type
from headrace.fake.cuda.random import Generator
from headrace.fake.cuda.streams import (
    CudaEvent,
    CUDAGraph,
    CudaStream,
    Event,
    ExternalStream,
    Stream,
    stream_of,
)
from headrace.fake.cuda.tensors import is_cpu, is_cuda
from headrace.fake.patches import Replacement
from headrace.fake.raw_memory import unobserved

_CYCLES_PER_MS = 1_000_000


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


def replacements() -> list[Replacement]:
    """The whole table. Made anew for each block: no two blocks share an object."""
    emulated = [
        one
        for part in (
            *(_streams, _devices, _memory, _tensors_and_storages, _random, _autocast, _tools),
            *(_driver, _accelerator),
        )
        for one in part()
    ]
    return [*emulated, *_refusals(emulated)]


def _all(owner: Any, why: str, /, **new: Any) -> Iterator[Replacement]:
    for name, replacement in new.items():
        if hasattr(owner, name):  # PyTorch's versions differ
            yield Replacement(owner, name, replacement, why)


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after a check of its argument `device`."""

    def call(device: Any = None) -> Any:
        state.check_index(device)
        return function()

    return call


# --- streams, events, graphs ----------------------------------------------------------------------


def _streams() -> Iterator[Replacement]:
    cuda = torch.cuda
    why = "work goes to the fake device's streams"
    yield from _all(
        cuda,
        why,
        Stream=CudaStream,
        ExternalStream=ExternalStream,
        Event=CudaEvent,
        CUDAGraph=CUDAGraph,
        current_stream=_on_device(lambda: stream_of(state.device().current_stream())),
        default_stream=_on_device(lambda: stream_of(state.device().default_stream)),
        get_stream_from_external=lambda data_ptr, device=None: ExternalStream(data_ptr, device),
        set_stream=_set_stream,
        _set_stream_by_id=_set_stream_by_id,
        synchronize=_on_device(lambda: state.device().synchronize("torch.cuda.synchronize")),
        _sleep=_sleep,
    )
    yield from _all(torch, why, Stream=Stream, Event=Event)
    yield from _all(
        cuda.graphs,
        "a capture records on the fake device",
        graph_pool_handle=lambda: state.device().graph_pool(),
    )
    # `torch.cuda.graph` keeps its stream for the next capture: it must not outlive the block.
    yield Replacement(cuda.graph, "default_capture_stream", None, "a stream of this block")
    yield Replacement(torch._C, "_host_emptyCache", _returning(None), "called by torch.cuda.graph")


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        state.device().switch(stream._fake)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    device = state.device()
    device.switch(device.stream_by_id(stream_id))


def _sleep(cycles: int) -> None:
    state.device().work(cycles / _CYCLES_PER_MS, "torch.cuda._sleep")


# --- the device -----------------------------------------------------------------------------------


def _devices() -> Iterator[Replacement]:
    cuda, properties = torch.cuda, DeviceProperties()
    yield from _all(
        cuda,
        "there is one CUDA device, and it is ready",
        _initialized=True,
        is_available=lambda: True,
        is_initialized=state.in_use,
        init=_returning(None),
        _lazy_init=lambda: (state.device(), None)[1],
        _nvml_based_avail=lambda: True,
        _is_in_bad_fork=state.in_forked_child,
        device_count=lambda: 1,
        current_device=lambda: (state.device(), 0)[1],
        set_device=state.check_index,
        _exchange_device=_exchange_device,
        _maybe_exchange_device=_exchange_device,
        ipc_collect=_returning(None),
        can_device_access_peer=_returning(False),
        set_sync_debug_mode=_set_sync_debug_mode,
        get_sync_debug_mode=lambda: state.device().sync_debug_mode,
    )
    yield from _all(
        cuda,
        "what the device can do",
        is_bf16_supported=_returning(True),
        is_tf32_supported=_returning(True),
        get_device_name=_on_device(lambda: properties.name),
        get_device_capability=_on_device(lambda: (properties.major, properties.minor)),
        get_device_properties=_on_device(
            lambda: replace(properties, total_memory=state.device().memory().total)
        ),
        get_arch_list=_returning(["sm_90"]),
        get_gencode_flags=_returning("-gencode compute=compute_90,code=sm_90"),
    )
    built = "PyTorch looks built with CUDA"
    yield from _all(torch.backends.cuda, built, is_built=lambda: True)
    yield from _all(torch.version, built, cuda=torch.version.cuda or "13.0")
    yield from _all(
        torch.backends.cudnn, "cuDNN would be given CPU tensors", is_acceptable=_returning(False)
    )
    yield from _all(
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
        return _returning(None)
    original = copy_of(getattr(torch.distributed.distributed_c10d, name))

    def call(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend is not None and "nccl" in str(backend):
            raise state.not_emulated(f"backend={str(backend)!r} (NCCL)", "use backend='gloo'")
        return original(backend, *args, **kwargs)

    return call


# --- memory ---------------------------------------------------------------------------------------


def _memory() -> Iterator[Replacement]:
    why = "the fake device counts its own memory"
    nothing = "there is no cache to empty"
    yield from _all(
        torch.cuda.memory,
        why,
        memory_stats=_on_device(_memory_stats),
        memory_stats_as_nested_dict=_on_device(lambda: _nested(_memory_stats())),
        mem_get_info=_on_device(_free_and_total),
        reset_peak_memory_stats=_on_device(lambda: state.device().reset_peak_memory()),
        reset_max_memory_allocated=_on_device(lambda: state.device().reset_peak_memory()),
        reset_max_memory_cached=_on_device(lambda: state.device().reset_peak_memory()),
        set_per_process_memory_fraction=_limit_memory,
        get_allocator_backend=_returning("native"),
        MemPool=MemPool,
        use_mem_pool=_use_mem_pool,
    )
    yield from _all(
        torch.cuda.memory,
        nothing,
        empty_cache=lambda: None,
        reset_accumulated_memory_stats=_on_device(lambda: None),
        reset_accumulated_host_memory_stats=lambda: None,
        reset_peak_host_memory_stats=lambda: None,
    )
    yield from _all(
        torch._C,
        why,
        _accelerator_getDeviceStats=lambda index: _nested(_memory_stats()),
        _accelerator_getMemoryInfo=lambda index: _free_and_total(),
        _accelerator_resetPeakStats=lambda index: state.device().reset_peak_memory(),
        _accelerator_resetAccumulatedStats=_returning(None),
        _accelerator_emptyCache=_returning(None),
        _accelerator_emptyHostCache=_returning(None),
        _accelerator_isAllocatorInitialized=_returning(True),
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


def _free_and_total() -> tuple[int, int]:
    figures = state.device().memory()
    return figures.free, figures.total


def _limit_memory(fraction: float, device: Any = None) -> None:
    state.check_index(device)
    total = state.device().memory().total
    state.device().limit_memory(int(total * fraction))


# --- tensors --------------------------------------------------------------------------------------


def _tensors_and_storages() -> Iterator[Replacement]:
    for name, read in {"is_cuda": is_cuda, "is_cpu": is_cpu}.items():
        yield Replacement(torch.Tensor, name, property(read), "C++ takes all for the host's")
    yield Replacement(
        torch.Tensor,
        "record_stream",
        _record_stream,
        "PyTorch's parser refuses a stream that is not its own",
    )
    yield Replacement(
        torch.UntypedStorage, "device", property(_storage_device), "torch.save stores where it is"
    )
    yield Replacement(
        torch.UntypedStorage,
        "__new__",
        staticmethod(_new_storage),
        "PyTorch cannot make one on cuda",
    )
    yield Replacement(
        torch.UntypedStorage,
        "_share_cuda_",
        _refusing("a CUDA tensor in another process"),
        "no memory of a GPU to share",
    )
    why = "PyTorch's own need a CUDA device"
    yield from _all(torch.cuda, why, **legacy_types(vars(torch.cuda)))
    yield from _all(torch, why, set_default_tensor_type=set_default_tensor_type)
    yield Replacement(
        FakeTensor,
        "__new__",
        staticmethod(_planned(vars(FakeTensor)["__new__"].__func__)),
        "C++ ends the process if a shape without memory is on cuda",
    )
    base = torch.storage._StorageBase
    yield Replacement(base, "to", _storage_to(copy_of(base.to)), "torch.load(map_location='cuda')")


def _planned(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch plans ahead with tensors without memory: let it plan for the CPU, which computes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        named = {name: _where_it_computes(value) for name, value in kwargs.items()}
        return original(*map(_where_it_computes, args), **named)

    return make


def _where_it_computes(value: Any) -> Any:
    if isinstance(value, str | torch.device) and torch.device(value).type == "cuda":
        return torch.device("cpu")
    return value


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    state.device().record_stream(tensor, stream._fake)


def _as_bytes(storage: Any) -> torch.Tensor:
    with unobserved():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    make = torch._C.StorageBase.__new__
    if device is None or torch.device(device).type != "cuda":
        return make(cls, *args, **kwargs, **({} if device is None else {"device": device}))
    state.check_index(device)
    storage, cuda = make(cls, *args, **kwargs), state.device()
    cuda.operation(
        cuda.current_stream(), "allocation", "kernel", allocates=[_as_bytes(storage)], cost_ns=0
    )
    return storage


def _storage_device(storage: Any) -> torch.device:
    real: torch.device = torch._C.StorageBase.device.__get__(storage)  # type: ignore[attr-defined]
    if real.type == "cpu" and state.in_use() and state.device().holds(_as_bytes(storage)):
        return state.device().torch_device
    return real


def _storage_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device)
        if target.type != "cuda":
            return original(storage, device=device, non_blocking=non_blocking)
        moved = _as_bytes(storage).clone().to(target, non_blocking=non_blocking)
        return moved.untyped_storage()

    return to


# --- random numbers -------------------------------------------------------------------------------


def _random() -> Iterator[Replacement]:
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


# --- autocast -------------------------------------------------------------------------------------


def _autocast() -> Iterator[Replacement]:
    autocast = torch.amp.autocast_mode.autocast
    enter, leave = copy_of(autocast.__enter__), copy_of(autocast.__exit__)

    def begin(self: Any) -> Any:
        result = enter(self)
        twins = self.__dict__.setdefault("_cpu_twins", [])
        twins.append(None)
        if self.device == "cuda":
            twins[-1] = autocast("cpu", self.fast_dtype, self._enabled, self._cache_enabled)
            enter(twins[-1])
        return result

    def end(self: Any, *exception: Any) -> Any:
        twin = self.__dict__["_cpu_twins"].pop()
        if twin is not None:
            leave(twin, *exception)
        return leave(self, *exception)

    why = "autocast('cuda') has to cast what PyTorch computes on the CPU"
    yield Replacement(autocast, "__enter__", begin, why)
    yield Replacement(autocast, "__exit__", end, why)


# --- tools ----------------------------------------------------------------------------------------


def _tools() -> Iterator[Replacement]:
    yield from _all(
        torch.cuda.nvtx,
        "marks for a profiler that is not there",
        range_push=_returning(0),
        range_pop=_returning(0),
        range_start=_returning(0),
        range_end=_returning(None),
        mark=_returning(None),
        range=_no_range,
        _device_range_start=_returning(None),
        _device_range_end=_returning(None),
    )
    yield from _all(
        torch.cuda.profiler,
        "there is no profiler to start",
        start=_returning(None),
        stop=_returning(None),
        profile=_no_range,
    )
    profile = torch.autograd.profiler.profile
    yield Replacement(
        profile, "__init__", _host_profile(copy_of(profile.__init__)), "there are no CUDA events"
    )
    yield Replacement(torch, "compile", _compile, "the compiler would generate kernels for a GPU")
    yield from _all(
        torch.export,
        "PyTorch's C++ would end the process: it has no code for tensors on cuda",
        export=_refusing("torch.export.export"),
        draft_export=_refusing("torch.export.draft_export"),
    )
    yield Replacement(torch.cuda, "_cudart", _Runtime(), "pinning and profiling")


class _Result(int):
    """What calls of CUDA's runtime return."""

    success: ClassVar[_Result]


_Result.success = _Result(0)


class _Runtime:
    """What `torch.cuda.cudart()` returns."""

    cudaError = _Result  # noqa: N815

    def cudaGetErrorString(self, result: _Result) -> str:  # noqa: N802
        return "no error" if result == _Result.success else "unknown error"

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> _Result:  # noqa: N802
        state.device().registered_memory[address] = nbytes
        return _Result.success

    def cudaHostUnregister(self, address: int) -> _Result:  # noqa: N802
        if state.in_use():  # memory may be unpinned when it is freed, at any time
            state.device().unregister_memory(address)
        return _Result.success

    def cudaMemGetInfo(self, device: Any) -> tuple[int, int]:  # noqa: N802
        state.check_index(device)
        return _free_and_total()

    def cudaProfilerStart(self) -> _Result:  # noqa: N802
        return _Result.success

    cudaProfilerStop = cudaProfilerStart  # noqa: N815

    def __getattr__(self, name: str) -> Any:
        raise state.not_emulated(f"torch.cuda.cudart().{name}")


@contextmanager
def _no_range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _host_profile(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's profiler, which then watches the host only."""

    def make(self: Any, enabled: bool = True, **options: Any) -> None:
        if options.get("use_device") == "cuda":
            options["use_device"] = None
        original(self, enabled, **{**options, "use_cuda": False})

    return make


def _compile(model: Any = None, **options: Any) -> Any:
    state.device().warn_once(
        "compile", "fake_cuda runs what torch.compile was given without compiling it"
    )
    return model if model is not None else lambda function: function


# --- the calls below torch.cuda -------------------------------------------------------------------


def _driver() -> Iterator[Replacement]:
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


# --- torch.accelerator ----------------------------------------------------------------------------


def _accelerator() -> Iterator[Replacement]:
    yield from _all(
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


# --- everything else of torch.cuda ----------------------------------------------------------------

#: Public names that PyTorch implements with emulated ones, or that need no device.
_KEPT = {
    "torch.cuda": (
        *("stream", "StreamContext", "device", "device_of", "cudart", "check_error"),
        *("CudaError", "cudaStatus", "DeferredCudaCallError"),
    ),
    "torch.cuda.memory": (
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("memory_cached", "max_memory_cached", "memory_summary"),
    ),
    # The first calls a name that `FakeDevice` and `Device.answering` replace.
    "torch.cuda.graphs": ("is_current_stream_capturing", "graph", "make_graphed_callables"),
    "torch.cuda.nccl": ("is_available", "version"),
    "torch.cuda.streams": (),
    "torch.cuda.gds": (),
    "torch.cuda.jiterator": (),
    "torch.cuda.tunable": (),
    "torch.cuda.green_contexts": (),
}
#: How the names in `torch._C` begin that call the driver.
_DRIVER_CALLS = ("_cuda", "_nccl", "_broadcast", "_scatter", "_gather")
#: Those of them that only read or change PyTorch's own settings.
_SETTINGS = (
    *("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    *("_cuda_get_conv_benchmark_empty_cache", "_cuda_getCompiledVersion", "_cuda_getArchFlags"),
)
#: Other names that would reach the driver.
_REFUSED_TOO = {
    "torch.cuda": ("_compile_kernel", "_register_triton_kernels"),
    "torch.cuda.memory": (
        *("_snapshot", "_dump_snapshot", "_record_memory_history", "_save_segment_usage"),
        *("_save_memory_usage", "_set_allocator_settings"),
    ),
    "torch.cuda.jiterator": ("_create_jit_fn", "_create_multi_output_jit_fn"),
}


def _refusals(emulated: list[Replacement]) -> Iterator[Replacement]:
    # By identity: `torch.cuda.Stream` is emulated, so `torch.cuda.streams.Stream` is, too.
    known = {id(vars(one.owner).get(one.name)) for one in emulated}
    for module_name, kept in _KEPT.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # a later PyTorch's module
            continue
        for name, value in list(vars(module).items()):
            public = not name.startswith("_") or name in _REFUSED_TOO.get(module_name, ())
            own = getattr(value, "__module__", None) == module_name
            if name in kept or not public or not own or id(value) in known:
                continue
            shown = f"{module_name}.{name}"
            if inspect.isfunction(value):
                yield Replacement(module, name, _refusing(f"{shown}()"), "no emulation")
            elif isinstance(value, type) and not _is_legacy_type(value):
                yield Replacement(module, name, _refusing_class(shown), "no emulation")
    why = "calls of the driver have no emulation"
    allowed = {one.name for one in emulated if one.owner is torch._C} | set(_SETTINGS)
    for name, value in list(vars(torch._C).items()):  # a PyTorch that is built for CUDA has some
        if name.startswith(_DRIVER_CALLS) and inspect.isbuiltin(value) and name not in allowed:
            yield Replacement(torch._C, name, _refusing(f"torch._C.{name}()"), why)
    yield Replacement(torch._C, "__getattr__", _no_such_call, why)


def _is_legacy_type(value: type) -> bool:
    """`torch.cuda.FloatStorage`: PyTorch says itself that it is not available."""
    return value.__name__.endswith("Storage")


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise state.not_emulated(what)

    return refuse


def _refusing_class(what: str) -> type:
    return type(what.rpartition(".")[2], (), {"__new__": _refusing(f"{what}()")})


def _no_such_call(name: str) -> Any:
    if name.startswith(_DRIVER_CALLS):
        raise state.not_emulated(f"torch._C.{name}")
    raise AttributeError(f"module 'torch._C' has no attribute {name!r}")


def copy_of(function: Any) -> Callable[..., Any]:
    """A Python function as it is now, whatever replaces its code later."""
    assert isinstance(function, FunctionType)
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
