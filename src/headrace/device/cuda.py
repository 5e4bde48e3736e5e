"""CUDA devices (and ROCm's, which PyTorch calls the same): only this file and cuda_graphs.py name
`torch.cuda`."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from headrace.device import cuda_graphs, kineto
from headrace.device.accelerator import AcceleratorDevice, AcceleratorStream
from headrace.device.base import MemoryFigures, Result, Stream
from headrace.device.graph import CaptureQuery, Graph, Obstacle, host_wait
from headrace.device.host_activity import HostActivity
from headrace.device.ledger import Ledger
from headrace.device.nvml import NvmlAbsent, NvmlSensors
from headrace.device.trace import Trace
from headrace.source_lines import users_line

_READ_USE_EVERY_NS = 1_000_000_000
_MARKER_CYCLES = 1000
# How long the kernel runs that measures how long it runs: about a millisecond.
_MEASURED_CYCLES = 2_000_000


def cuda_namespace() -> Any:
    """`torch.cuda` itself, for those that watch what other code calls there."""
    return torch.cuda


class _StreamId(NamedTuple):
    """A stream, as PyTorch's internal functions identify it."""

    stream_id: int
    device_index: int
    device_type: int


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Compute float32 products in TF32, or in full precision, inside the block.

    PyTorch has two settings for this and raises if a program uses both. So this uses the one that
    the user has used.
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
    """PyTorch's newer settings. Reading them never raises, whichever ones the user has used."""
    cudnn: Any = torch.backends.cudnn
    return {"matmul": torch.backends.cuda.matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}


class CudaDevice(AcceleratorDevice):
    captures = True
    _use: float | None = None
    _use_asked_ns = 0
    _memory_limit: int | None = None
    _cycles_per_ns: float | None = None

    def __init__(self, torch_device: torch.device, ledger: Ledger | None = None) -> None:
        super().__init__(torch_device, ledger)
        # Older GPUs are too old for Triton, which PyTorch's compiler needs.
        self.compiles = torch.cuda.get_device_capability(torch_device) >= (7, 0)

    def numerics(self, precision: str | None) -> AbstractContextManager[object]:
        return nullcontext() if precision is None else float32_products(tf32=precision != "fp32")

    def float32_switches(self) -> str:
        return ", ".join(
            f"{name} {'tf32' if switch.fp32_precision == 'tf32' else 'fp32'}"
            for name, switch in _switches().items()
        )

    def use_share(self) -> float | None:
        now_ns = time.monotonic_ns()
        if now_ns - self._use_asked_ns > _READ_USE_EVERY_NS:  # NVML is slow
            self._use_asked_ns = now_ns
            try:
                self._use = torch.cuda.utilization(self.torch_device) / 100
            except (ImportError, RuntimeError, OSError) as problem:
                self.warn_once("use", "cannot read the GPU's utilization: %s", problem)
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
            self.warn_once("sensors", "cannot read the GPU's sensors: %s", problem)
            return None

    @contextmanager
    def _watch_work(self, trace: Trace) -> Iterator[None]:
        if kineto.is_profiling():
            trace.give_up("another profiler is running in this process")
            yield
            return
        with kineto.profiled(graphs=cuda_graphs.CudaPool.made) as activities:
            streams = self._mark_streams()
            yield
        found = kineto.device_work(activities, self._index, streams)
        if found is None:
            trace.give_up("PyTorch's profiler recorded no kernel (does CUPTI work here?)")
        else:
            trace.set_spans(found.spans, found.launches, from_ns=found.from_ns)

    def _mark_streams(self) -> list[str]:
        """Run a marker kernel on each named stream, in turn. Returns the names in that order."""
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

    def peak_memory(self) -> int:
        # Not `max_memory_allocated`: it puts all figures into one sorted dict first, which takes
        # longer than all else at the end of a pass.
        figures: Any = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        return int(figures["allocated_bytes"]["all"]["peak"]) if figures else 0

    def memory(self) -> MemoryFigures:
        figures = super().memory()
        if self._memory_limit is None:
            return figures
        left = max(0, self._memory_limit - figures.reserved)
        return dataclasses.replace(figures, free=min(figures.free, left))

    def limit_memory(self, nbytes: int | None) -> None:
        share = 1.0 if nbytes is None else min(1.0, nbytes / self.memory().total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)
        self._memory_limit = nbytes

    def switch_back(self, before: object) -> None:
        if isinstance(before, _StreamId):
            torch._C._cuda_setStream(*before)
        else:
            super().switch_back(before)

    def _switch(self, stream: Stream) -> object:
        # This runs in every step, so it skips `torch.cuda.set_stream` and the like, which make
        # objects, and calls what they call.
        assert isinstance(stream, AcceleratorStream)
        if torch._C._cuda_getDevice() != self._index:
            return super()._switch(stream)
        before, raw = torch._C._cuda_getCurrentStream(self._index), stream.raw
        if before[0] == raw.stream_id:
            return None  # already current
        torch._C._cuda_setStream(raw.stream_id, raw.device_index, raw.device_type)
        return _StreamId(*before)

    def has_fast_bf16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def annotate(self, name: str) -> AbstractContextManager[object]:
        annotation: AbstractContextManager[object] = torch.cuda.nvtx.range(name)
        return annotation

    # --- graphs ---------------------------------------------------------------------------------

    def graph_pool(self) -> object:
        return cuda_graphs.CudaPool()

    def _capture(
        self, work: Callable[[], Result], pool: object, stream: Stream
    ) -> tuple[Graph, Result]:
        with self.use(stream):  # the default stream cannot capture
            return cuda_graphs.capture(self._index, work, pool)

    def is_capturing(self) -> bool:
        return bool(torch._C._cuda_isCurrentStreamCapturing())  # whatever others are answered

    def delay(self, ns: int) -> bool:
        if self._cycles_per_ns is None:
            self._cycles_per_ns = self._measure_delay()
        torch.cuda._sleep(max(1, round(ns * self._cycles_per_ns)))
        return True

    def _measure_delay(self) -> float:
        begin, end = self.event(timing=True), self.event(timing=True)
        for _ in range(2):  # the first launch loads the kernel
            begin.record()
            torch.cuda._sleep(_MEASURED_CYCLES)
            end.record()
            self.synchronize("delay")
        return _MEASURED_CYCLES / max(1.0, begin.elapsed_ms(end) * 1e6)

    @contextmanager
    def watch(self) -> Iterator[list[Obstacle]]:
        found: list[Obstacle] = []
        others: list[tuple[Any, ...]] = []

        def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
            text = str(message)
            if "synchronizing CUDA operation" in text:
                # The warning names the innermost line, which is in the modes that watch.
                found.append(host_wait(users_line()))
            elif "debug mode" not in text:
                others.append((message, category, filename, lineno))

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            setattr(warnings, "showwarning", note)  # noqa: B010 - mypy knows its exact type
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with HostActivity(self, found):
                    yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in others:
            warnings.warn_explicit(*warning)

    @contextmanager
    def answering(self, query: CaptureQuery) -> Iterator[None]:
        # All of PyTorch's Python functions that answer this call that one name.
        graphs: Any = torch.cuda.graphs
        truth, thread = graphs._cuda_isCurrentStreamCapturing, threading.get_ident()

        def answer() -> bool:
            in_backward = torch._C._current_graph_task_id() != -1  # runs in a thread of its own
            is_ours = in_backward or threading.get_ident() == thread
            if truth() and not (is_ours and query.in_captures):
                return True
            return is_ours and query.ask()

        graphs._cuda_isCurrentStreamCapturing = answer
        try:
            yield
        finally:
            graphs._cuda_isCurrentStreamCapturing = truth

    def _raw_event(self, timing: bool) -> Any:
        # blocking: a waiting host sleeps, and does not spin on a core that the loader needs.
        # torch.Event(blocking=True) ignores the flag; torch.cuda.Event does not.
        return torch.cuda.Event(enable_timing=timing, blocking=True)
