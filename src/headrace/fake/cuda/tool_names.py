"""Names of autocast, profilers, the compiler and CUDA's runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from headrace.fake.cuda import state
from headrace.fake.cuda.memory_names import free_and_total
from headrace.fake.cuda.table import copy_of, names_of, refusing, returning
from headrace.fake.patches import Replacement


def autocast_names() -> Iterator[Replacement]:
    autocast = torch.amp.autocast_mode.autocast
    enter, leave = copy_of(autocast.__enter__), copy_of(autocast.__exit__)
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    blocks = 0  # how many are being entered or left

    @contextmanager
    def changing() -> Iterator[None]:
        nonlocal blocks
        blocks += 1
        try:
            yield
        finally:
            blocks -= 1

    def enable(*given: Any) -> None:
        set_enabled(*given)
        if given[0] == "cuda" and not blocks:
            set_enabled("cpu", given[1])

    def use_dtype(kind: str, dtype: torch.dtype) -> None:
        set_dtype(kind, dtype)
        if kind == "cuda" and not blocks and torch.is_autocast_enabled("cuda"):
            set_dtype("cpu", dtype)

    def begin(self: Any) -> Any:
        with changing():
            result = enter(self)
            twins = self.__dict__.setdefault("_cpu_twins", [])
            twins.append(None)
            if self.device == "cuda":
                twins[-1] = autocast("cpu", self.fast_dtype, self._enabled, self._cache_enabled)
                enter(twins[-1])
        return result

    def end(self: Any, *exception: Any) -> Any:
        with changing():
            twin = self.__dict__["_cpu_twins"].pop()
            if twin is not None:
                leave(twin, *exception)
            return leave(self, *exception)

    why = "autocast('cuda') has to cast what PyTorch computes on the CPU"
    yield Replacement(autocast, "__enter__", begin, why)
    yield Replacement(autocast, "__exit__", end, why)
    yield Replacement(torch, "set_autocast_enabled", enable, why)
    yield Replacement(torch, "set_autocast_dtype", use_dtype, why)


def tool_names() -> Iterator[Replacement]:
    yield from names_of(
        torch.cuda.nvtx,
        "marks for a profiler that is not there",
        range_push=returning(0),
        range_pop=returning(0),
        range_start=returning(0),
        range_end=returning(None),
        mark=returning(None),
        range=_no_range,
        _device_range_start=returning(None),
        _device_range_end=returning(None),
    )
    yield from names_of(
        torch.cuda.profiler,
        "there is no profiler to start",
        start=returning(None),
        stop=returning(None),
        profile=_no_range,
    )
    profile = torch.autograd.profiler.profile
    yield Replacement(
        profile, "__init__", _host_profile(copy_of(profile.__init__)), "there are no CUDA events"
    )
    yield Replacement(torch, "compile", _compile, "the compiler would generate kernels for a GPU")
    yield from names_of(
        torch.export,
        "PyTorch's C++ would end the process: it has no code for tensors on cuda",
        export=refusing("torch.export.export"),
        draft_export=refusing("torch.export.draft_export"),
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
        return free_and_total()

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
