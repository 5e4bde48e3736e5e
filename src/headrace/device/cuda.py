"""CUDA (and ROCm, which PyTorch gives the same name): the only file that names `torch.cuda`."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from headrace.device import kineto
from headrace.device.accelerator import AcceleratorDevice, AcceleratorStream
from headrace.device.base import Result, Stream
from headrace.device.graph import Graph, Obstacle
from headrace.device.host_activity import HostUse
from headrace.device.nvml import NvmlAbsent, NvmlSensors
from headrace.device.trace import Trace
from headrace.errors import CaptureError
from headrace.source_lines import Site

_USE_EVERY_NS = 1_000_000_000
_MARKER_CYCLES = 1000


class _StreamId(NamedTuple):
    """A stream, as PyTorch's own functions know it."""

    stream_id: int
    device_index: int
    device_type: int


class CudaPool:
    """Memory that graphs share. PyTorch's pools end with their last graph, and capturing into one
    that has ended is an internal error of its: so a new one is taken then."""

    #: Whether there has been any in this process.
    made = False

    def __init__(self) -> None:
        CudaPool.made = True
        self._handle: Any = None
        self._graphs = 0

    def enter(self) -> Any:
        """One graph more: PyTorch's handle of the pool that it goes to."""
        if self._graphs == 0:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs += 1
        return self._handle

    def leave(self) -> None:
        self._graphs -= 1


class CudaGraph(Graph):
    def __init__(self, raw: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        #: PyTorch's own graph object.
        self.raw: torch.cuda.CUDAGraph | None = raw
        self._pool = pool

    def replay(self) -> None:
        if self.raw is None:
            raise CaptureError("this graph has been closed")
        self.raw.replay()

    def close(self) -> None:
        if self.raw is not None:
            self.raw.reset()
            self.raw = None
            self._pool.leave()


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Inside the block float32 products are computed in TF32, or are not.

    PyTorch has two ways to say so, and raises where they are mixed: the one that the user has not
    used must not be touched.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = (matmul.allow_tf32, cudnn.allow_tf32)
    except RuntimeError:  # the user has set `fp32_precision`
        with _by_fp32_precision("tf32" if tf32 else "ieee"):
            yield
        return
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def _by_fp32_precision(wanted: str) -> Iterator[None]:
    switches = list(_switches().values())
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = wanted
    try:
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _switches() -> dict[str, Any]:
    """PyTorch's newer switches. Reading them never raises, whichever way the user has set them."""
    cudnn: Any = torch.backends.cudnn
    return {"matmul": torch.backends.cuda.matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}


class CudaDevice(AcceleratorDevice):
    captures = True
    compiles = True
    _use: float | None = None
    _use_asked_ns = 0

    def numerics(self, precision: str | None) -> AbstractContextManager[object]:
        return nullcontext() if precision is None else float32_products(tf32=precision != "fp32")

    def float32_switches(self) -> str:
        return ", ".join(
            f"{name} {'tf32' if switch.fp32_precision == 'tf32' else 'fp32'}"
            for name, switch in _switches().items()
        )

    def use_share(self) -> float | None:
        now_ns = time.monotonic_ns()
        if now_ns - self._use_asked_ns > _USE_EVERY_NS:  # the driver is slow to answer
            self._use_asked_ns = now_ns
            try:
                self._use = torch.cuda.utilization(self.torch_device) / 100
            except (ImportError, RuntimeError, OSError) as problem:
                self.say_once("use", "the GPU's use is not known: %s", problem)
        return self._use

    def sensors(self) -> NvmlSensors | None:
        known: Any = torch.cuda.get_device_properties(self.torch_device)
        uuid, bus = getattr(known, "uuid", None), getattr(known, "pci_bus_id", None)
        pci = None
        if bus is not None:
            pci = f"{known.pci_domain_id:08X}:{bus:02X}:{known.pci_device_id:02X}.0"
        try:
            return NvmlSensors(None if uuid is None else f"GPU-{uuid}", pci)
        except NvmlAbsent as problem:
            self.say_once("sensors", "power, use and clock of the GPU are not known: %s", problem)
            return None

    @contextmanager
    def _watch_work(self, trace: Trace) -> Iterator[None]:
        if kineto.is_profiling():
            trace.missing = "another profiler is at work in this process"
            yield
            return
        with kineto.profiled(graphs=CudaPool.made) as records:
            streams = self._mark_streams()
            yield
        found = kineto.seen(records.found, self._index, streams)
        if found is None:
            trace.missing = "PyTorch's profiler recorded no kernel (does CUPTI work here?)"
        else:
            trace.saw(found.spans, found.launches, from_ns=found.from_ns)

    def _mark_streams(self) -> list[str]:
        """Run a marker on each stream with a name, one after the other; returns the names."""
        raw_streams = {raw.stream_id: (name, raw) for name, raw in self.named_streams()}
        default = torch.cuda.default_stream(self.torch_device)
        raw_streams.setdefault(default.stream_id, ("default", default))
        current = torch.cuda.current_stream(self.torch_device)
        raw_streams.setdefault(current.stream_id, ("current", current))
        self.synchronize("trace")
        for _, raw in raw_streams.values():
            with torch.cuda.stream(raw):
                torch.cuda._sleep(_MARKER_CYCLES)
            self.synchronize("trace")
        return [name for name, _ in raw_streams.values()]

    def limit_memory(self, nbytes: int | None) -> None:
        share = 1.0 if nbytes is None else min(1.0, nbytes / self.memory().total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def switch_back(self, before: object) -> None:
        if isinstance(before, _StreamId):
            torch._C._cuda_setStream(*before)
        else:
            super().switch_back(before)

    def _switch(self, stream: Stream) -> object:
        # In every step: what `torch.cuda.set_stream` and its like call, without the objects that
        # they make.
        assert isinstance(stream, AcceleratorStream)
        if torch._C._cuda_getDevice() != self._index:
            return super()._switch(stream)
        before, raw = torch._C._cuda_getCurrentStream(self._index), stream.raw
        if before[0] == raw.stream_id:
            return None  # there already
        torch._C._cuda_setStream(raw.stream_id, raw.device_index, raw.device_type)
        return _StreamId(*before)

    def has_fast_bf16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def annotate(self, name: str) -> AbstractContextManager[object]:
        annotation: AbstractContextManager[object] = torch.cuda.nvtx.range(name)
        return annotation

    # --- graphs ---------------------------------------------------------------------------------

    def graph_pool(self) -> object:
        self._warm_up_capture()
        return CudaPool()

    def capture(self, work: Callable[[], Result], pool: object) -> tuple[Graph, Result]:
        if not isinstance(pool, CudaPool):
            raise TypeError(f"expected a pool of graph_pool()'s, found {type(pool).__name__}")
        raw, random_state = torch.cuda.CUDAGraph(), self.random_state()
        collects = gc.isenabled()
        gc.disable()  # a graph or event that is freed in the midst of a capture may spoil it
        try:
            with self.use(self.stream("capture")):  # the default stream cannot capture
                handle = pool.enter()
                try:
                    # thread_local: a thread that pins memory for a loader meanwhile does no harm.
                    raw.capture_begin(pool=handle, capture_error_mode="thread_local")
                    result = work()
                    raw.capture_end()
                except BaseException as problem:
                    self._end_failed_capture(raw, handle, random_state)
                    pool.leave()
                    if not isinstance(problem, Exception):
                        raise
                    raise CaptureError("the step could not be captured") from problem
        finally:
            if collects:
                gc.enable()
        return CudaGraph(raw, pool), result

    def _end_failed_capture(self, raw: Any, handle: Any, random_state: torch.Tensor) -> None:
        """Mend what a failed capture leaves behind. After an error of Python's own the capture can
        be ended as usual; after one of CUDA's the allocator still serves the pool, and the random
        generator refuses to work outside a graph."""
        try:
            raw.capture_end()
        except RuntimeError:
            torch._C._cuda_endAllocateToPool(self._index, handle)
            torch._C._cuda_releasePool(self._index, handle)
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
