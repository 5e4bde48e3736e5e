"""Graphs on CUDA: their memory, their capture, and the order of those that draw random numbers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from headrace.device.base import Result
from headrace.device.graph import Graph
from headrace.errors import CaptureError, StepError


class CudaPool:
    """Memory that graphs share.

    PyTorch closes a pool with its last graph, and fails with an internal error if a later graph is
    captured into it. So the next graph gets a new pool of PyTorch's.
    """

    #: Whether this process has made any.
    made: bool = False

    def __init__(self) -> None:
        CudaPool.made = True
        self._handle: Any = None
        # A graph also leaves when nobody holds it any more.
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def handle(self) -> Any:
        """PyTorch's handle of the pool that the next graph is captured into."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: CudaGraph) -> None:
        self._graphs.add(graph)

    def remove(self, graph: CudaGraph) -> None:
        self._graphs.discard(graph)


class DrawOrder:
    """All graphs of a GPU find the random seed and offset in the same memory. Each replay of one
    that draws sets them first: so it waits for the one before it, if that is on another stream."""

    #: By the number of the GPU.
    _known: ClassVar[dict[int, DrawOrder]] = {}

    def __init__(self, generator: torch.Generator) -> None:
        #: The GPU's random generator, which owns that memory.
        self.generator = generator
        self._lock = threading.Lock()
        self._stream: tuple[int, ...] | None = None
        self._replayed = torch.cuda.Event()

    @classmethod
    def of(cls, device_index: int) -> DrawOrder:
        generator = torch.cuda.default_generators[device_index]
        found = cls._known.get(device_index)
        if found is None or found.generator is not generator:
            found = cls._known[device_index] = cls(generator)
        return found

    @contextmanager
    def next(self, stream: tuple[int, ...]) -> Iterator[None]:
        """Replay a graph in the block, on this stream, the current one."""
        with self._lock:
            if self._stream not in (None, stream):
                self._replayed.wait()
            yield
            self._replayed.record()
            self._stream = stream


class CudaGraph(Graph):
    def __init__(self, raw: torch.cuda.CUDAGraph, pool: CudaPool, device_index: int) -> None:
        #: PyTorch's own graph object.
        self.raw: torch.cuda.CUDAGraph | None = raw
        self._pool, self._index = pool, device_index
        pool.add(self)
        # The graph may launch kernels of these, and keeps none of them alive.
        self._fft_plans = torch._cufft_get_plan_cache_size(device_index)
        #: Whether it draws random numbers: known after the first replay.
        self._draws: bool | None = None

    def replay(self) -> None:
        if self.raw is None:
            raise CaptureError("this graph has been closed")
        plans = self._fft_plans
        if plans and torch._cufft_get_plan_cache_size(self._index) < plans:
            raise StepError(
                "cuFFT's plans were freed after a step was captured as a graph, which may use "
                "them: expected no call of torch.backends.cuda.cufft_plan_cache.clear() while "
                "graphs are in use; close the engine first"
            )
        if self._draws is False:
            self.raw.replay()
            return
        before = torch.cuda.get_rng_state(self._index) if self._draws is None else None
        with DrawOrder.of(self._index).next(torch._C._cuda_getCurrentStream(self._index)):
            self.raw.replay()
        if before is not None:
            self._draws = not torch.equal(before, torch.cuda.get_rng_state(self._index))

    def close(self) -> None:
        if self.raw is not None:
            self.raw.reset()
            self.raw = None
            self._pool.remove(self)


def _forget_workspaces() -> None:
    """Make PyTorch allocate cuBLAS's workspaces anew, in all threads.

    PyTorch has one for each thread and stream, and frees them when it records graphs itself
    (`torch.compile(mode="reduce-overhead")`). A graph may use only memory of its pool: so forget
    them before a capture, which then allocates in the pool, and after it, since PyTorch would keep
    the pool's memory for eager work.
    """
    torch._C._cuda_clearCublasWorkspaces()


def capture(
    device_index: int, work: Callable[[], Result], pool: object
) -> tuple[CudaGraph, Result]:
    """Capture on the current stream, which is not the default one."""
    if not isinstance(pool, CudaPool):
        raise TypeError(f"pool is a {type(pool).__name__}: expected one from graph_pool()")
    raw, random_state = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state(device_index)
    collects = gc.isenabled()
    gc.disable()  # freeing a graph or an event during a capture may break it
    _forget_workspaces()
    try:
        handle = pool.handle()
        try:
            # thread_local: another thread may pin memory for a loader meanwhile.
            raw.capture_begin(pool=handle, capture_error_mode="thread_local")
            result = work()
            raw.capture_end()
        except BaseException as problem:
            _end_failed_capture(device_index, raw, handle, random_state)
            if not isinstance(problem, Exception):
                raise
            raise CaptureError("the step could not be captured") from problem
    finally:
        _forget_workspaces()
        if collects:
            gc.enable()
    return CudaGraph(raw, pool, device_index), result


def _end_failed_capture(
    device_index: int, raw: Any, handle: Any, random_state: torch.Tensor
) -> None:
    """Clean up after a failed capture. After a Python error the capture can be ended as usual.
    After a CUDA error the allocator still allocates from the pool, and the random generator works
    only inside a graph: this resets both."""
    try:
        raw.capture_end()
    except RuntimeError:
        torch._C._cuda_endAllocateToPool(device_index, handle)
        torch._C._cuda_releasePool(device_index, handle)
        fresh = torch.Generator(device=torch.device("cuda", device_index))
        fresh.set_state(random_state)
        torch.cuda.default_generators[device_index].graphsafe_set_state(fresh)
    else:
        raw.reset()
