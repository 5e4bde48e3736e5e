"""CUDA (and ROCm, which PyTorch gives the same name): the only file that names `torch.cuda`."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headrace.device.accelerator import AcceleratorDevice
from headrace.device.base import Result
from headrace.device.graph import Graph, Obstacle
from headrace.device.hostuse import HostUse
from headrace.errors import CaptureError
from headrace.sites import Site

_USE_EVERY_NS = 1_000_000_000


class CudaGraph(Graph):
    def __init__(self, raw: torch.cuda.CUDAGraph) -> None:
        #: PyTorch's own graph object.
        self.raw = raw

    def replay(self) -> None:
        self.raw.replay()

    def close(self) -> None:
        self.raw.reset()


class CudaDevice(AcceleratorDevice):
    captures = True
    compiles = True
    _use: float | None = None
    _use_asked_ns = 0

    @contextmanager
    def numerics(self, precision: str) -> Iterator[None]:
        # One of PyTorch's two ways to say it, throughout: mixing them raises.
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = (matmul.allow_tf32, cudnn.allow_tf32)
        matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    def use_share(self) -> float | None:
        now_ns = time.monotonic_ns()
        if now_ns - self._use_asked_ns > _USE_EVERY_NS:  # the driver is slow to answer
            self._use_asked_ns = now_ns
            try:
                self._use = torch.cuda.utilization(self.torch_device) / 100
            except (ImportError, RuntimeError, OSError) as problem:
                self.say_once("use", "the GPU's use is not known: %s", problem)
        return self._use

    def has_fast_bf16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def annotate(self, name: str) -> AbstractContextManager[object]:
        annotation: AbstractContextManager[object] = torch.cuda.nvtx.range(name)
        return annotation

    # --- graphs ---------------------------------------------------------------------------------

    def graph_pool(self) -> object:
        self._warm_up_capture()
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Result], pool: Any) -> tuple[Graph, Result]:
        raw, random_state = torch.cuda.CUDAGraph(), self.random_state()
        collects = gc.isenabled()
        gc.disable()  # a graph or event that is freed in the midst of a capture may spoil it
        try:
            with self.use(self.stream("capture")):  # the default stream cannot capture
                # thread_local: a thread that pins memory for a loader meanwhile does no harm.
                raw.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                    raw.capture_end()
                except BaseException as problem:
                    self._end_failed_capture(raw, pool, random_state)
                    if not isinstance(problem, Exception):
                        raise
                    raise CaptureError("the step could not be captured") from problem
        finally:
            if collects:
                gc.enable()
        return CudaGraph(raw), result

    def _end_failed_capture(self, raw: Any, pool: Any, random_state: torch.Tensor) -> None:
        """Mend what a failed capture leaves behind. After an error of Python's own the capture can
        be ended as usual; after one of CUDA's the allocator still serves the pool, and the random
        generator refuses to work outside a graph."""
        try:
            raw.capture_end()
        except RuntimeError:
            torch._C._cuda_endAllocateToPool(self._index, pool)
            torch._C._cuda_releasePool(self._index, pool)
            fresh = torch.Generator(device=self.torch_device)
            fresh.set_state(random_state)
            torch.cuda.default_generators[self._index].graphsafe_set_state(fresh)
        else:
            raw.reset()

    def _warm_up_capture(self) -> None:
        """cuBLAS gets its workspace for a stream once and keeps it: outside of any graph's pool,
        or that pool could never be freed. Backward has a thread, and so a workspace, of its own."""
        with self.use(self.stream("capture")):
            matrix = torch.ones(8, 8, device=self.torch_device, requires_grad=True)
            (matrix @ matrix).sum().backward()

    @contextmanager
    def watch(self) -> Iterator[list[Obstacle]]:
        found: list[Obstacle] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with HostUse(self, found):
                    yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            text = str(warning.message)
            if "synchronizing CUDA operation" in text:
                found.append(
                    Obstacle(
                        "the host waits for the device", Site(warning.filename, warning.lineno)
                    )
                )
            elif "debug mode" not in text:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )

    def _raw_event(self, timing: bool) -> Any:
        # blocking: a host that waits sleeps instead of spinning on a core the loader needs.
        # torch.Event(blocking=True) would ignore the flag, so it is CUDA's own class.
        return torch.cuda.Event(enable_timing=timing, blocking=True)
