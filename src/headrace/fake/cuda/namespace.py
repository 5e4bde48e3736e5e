"""What `fake_cuda()` replaces in PyTorch, each with its reason.

Three kinds: names that are emulated, names that are kept because PyTorch's own code works on the
emulated ones, and all others of `torch.cuda`, which raise an error that names them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from headrace.fake.cuda import state
from headrace.fake.cuda.device_names import (
    accelerator_names,
    device_names,
    driver_names,
    random_names,
    stream_names,
)
from headrace.fake.cuda.memory_names import memory_names
from headrace.fake.cuda.table import refusing
from headrace.fake.cuda.tensor_names import tensor_names
from headrace.fake.cuda.tool_names import autocast_names, tool_names
from headrace.fake.patches import Replacement


def replacements() -> list[Replacement]:
    """The whole table. Made anew for each block: no two blocks share an object."""
    emulated = [
        one
        for part in (
            *(
                stream_names,
                device_names,
                memory_names,
                tensor_names,
                random_names,
                autocast_names,
                tool_names,
            ),
            *(driver_names, accelerator_names),
        )
        for one in part()
    ]
    return [*emulated, *_refusals(emulated)]


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
                yield Replacement(module, name, refusing(f"{shown}()"), "no emulation")
            elif isinstance(value, type) and not _is_legacy_type(value):
                yield Replacement(module, name, _refusing_class(shown), "no emulation")
    why = "calls of the driver have no emulation"
    allowed = {one.name for one in emulated if one.owner is torch._C} | set(_SETTINGS)
    for name, value in list(vars(torch._C).items()):  # a PyTorch that is built for CUDA has some
        if name.startswith(_DRIVER_CALLS) and inspect.isbuiltin(value) and name not in allowed:
            yield Replacement(torch._C, name, refusing(f"torch._C.{name}()"), why)
    yield Replacement(torch._C, "__getattr__", _no_such_call, why)


def _is_legacy_type(value: type) -> bool:
    """`torch.cuda.FloatStorage`: PyTorch says itself that it is not available."""
    return value.__name__.endswith("Storage")


def _refusing_class(what: str) -> type:
    return type(what.rpartition(".")[2], (), {"__new__": refusing(f"{what}()")})


def _no_such_call(name: str) -> Any:
    if name.startswith(_DRIVER_CALLS):
        raise state.not_emulated(f"torch._C.{name}")
    raise AttributeError(f"module 'torch._C' has no attribute {name!r}")
