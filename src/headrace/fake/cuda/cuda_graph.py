"""`torch.cuda.CUDAGraph` on the fake device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import DeviceError
from headrace.fake import graphs
from headrace.fake.cuda import state
from headrace.fake.graph_pools import GraphPool
from headrace.fake.tape import Tape

if TYPE_CHECKING:
    from headrace.fake.cuda.device import FakeCuda

# The class that user code may test for.
_RealGraph = torch.cuda.CUDAGraph


class CUDAGraph:
    """`torch.cuda.CUDAGraph`. PyTorch's own `torch.cuda.graph` and `make_graphed_callables` work
    with it."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._device: FakeCuda = state.device()
        self._graph: graphs.FakeGraph | None = None
        self._tape: Tape | None = None
        self._recording: AbstractContextManager[None] | None = None
        self._generators: list[torch.Generator] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _RealGraph

    def capture_begin(
        self,
        pool: object = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        device, stream = self._device, self._device.current_stream()
        if stream is device.default_stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        if stream.tape is not None:
            raise RuntimeError(f"stream {stream.name!r} is capturing already")
        pool = device.graph_pool() if pool is None else pool
        if not isinstance(pool, GraphPool):
            raise DeviceError(
                f"pool = {pool!r}: expected torch.cuda.graph_pool_handle() or graph.pool()"
            )
        self._tape = Tape(device, stream, pool, tuple(self._generators))
        self._recording = self._tape.recording()
        self._recording.__enter__()

    def capture_end(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None or self._tape is None:
            raise RuntimeError("capture_end() without capture_begin()")
        try:
            recording.__exit__(None, None, None)
        except BaseException:
            self._tape.forget()
            raise
        self._graph = graphs.FakeGraph(self._tape)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    def instantiate(self) -> None:
        """Does nothing: a fake graph is ready after its capture."""

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._graph.replay()

    def reset(self) -> None:
        if self._graph is not None:
            self._graph.close()
        self._graph = None

    def pool(self) -> object:
        if self._tape is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._tape.pool

    def enable_debug_mode(self) -> None:
        """Does nothing: there is no CUDA graph to debug."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise state.not_emulated(f"CUDAGraph.{name}")
