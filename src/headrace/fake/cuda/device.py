"""`FakeCuda`: the fake device behind `torch.cuda`."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch

from headrace.fake.costs import Costs
from headrace.fake.cuda import state
from headrace.fake.cuda.fixes import missing_call
from headrace.fake.cuda.random import CudaGenerator, drawing_from
from headrace.fake.cuda.tensors import CudaFunctionMode
from headrace.fake.device import FakeDevice
from headrace.fake.streams import FakeStream
from headrace.races.frames import calling_site
from headrace.source_lines import Site

_SYNCHRONIZES = "called a synchronizing CUDA operation"


class FakeCuda(FakeDevice):
    """The device of a `fake_cuda()` block: `cuda:0` for every call of PyTorch's."""

    how_to_move = "move it with .cuda(), inside the fake_cuda() block"
    draws_apart = True
    function_mode = CudaFunctionMode

    def __init__(
        self,
        *,
        costs: Costs | None = None,
        check: bool = True,
        host_order: Literal["traced", "total"] = "traced",
        memory_bytes: int = 16 << 30,
        keep_timeline: bool = True,
    ) -> None:
        super().__init__(
            costs=costs,
            check=check,
            host_order=host_order,
            memory_bytes=memory_bytes,
            keep_timeline=keep_timeline,
        )
        self.torch_device = torch.device("cuda", 0)
        #: The `torch.cuda.Stream` of each stream.
        self.wrappers: dict[FakeStream, Any] = {}
        #: The line that made each stream.
        self.made_at: dict[FakeStream, Site] = {}
        self._names = Counter(["default"])
        self.checker.missing_call = partial(missing_call, self)
        #: What `torch.cuda.set_sync_debug_mode` has set: 0, or 1 to warn and 2 to raise.
        self.sync_debug_mode = 0
        #: The device's default generator. On a GPU it has the seed that the host's was given, too.
        self.generator = CudaGenerator()
        self.generator.manual_seed(torch.initial_seed())

    @staticmethod
    def in_use() -> FakeCuda | None:
        """The device of the `fake_cuda()` block that is running; None outside of one."""
        return state.device() if state.in_use() else None

    def new_stream(
        self, name: str | None, priority: int, made_at: Site | None = None
    ) -> FakeStream:
        """A new stream, as `torch.cuda.Stream()` makes it. CUDA has 32 for each priority and hands
        them out in turn, so two of a program's streams may be one: the checker assumes that they
        are not. `made_at` is the line that made it, if that is not the running one."""
        site = made_at or calling_site()
        name = name or "stream"
        with self.lock:
            self._names[name] += 1
            count = self._names[name]
            stream = FakeStream(self, name if count == 1 else f"{name} #{count}", priority)
            self.made_at[stream] = site
        return stream

    def stream_named(self, name: str) -> FakeStream | None:
        for stream in (self.default_stream, *self.made_at, *self._streams.values()):
            if stream.name == name:
                return stream
        return None

    def stream_sites(self) -> dict[str, Site]:
        return {stream.name: site for stream, site in self.made_at.items()}

    def stream_by_id(self, stream_id: int) -> FakeStream:
        """The stream that `torch.cuda.Stream(stream_id=…)` means."""
        if stream_id == 0:
            return self.default_stream
        for stream in self.made_at:
            if stream.state.number == stream_id:
                return stream
        raise RuntimeError(f"stream_id = {stream_id}: this fake device has no such stream")

    def is_named_by(self, target: object) -> bool:
        if target is None or isinstance(target, bool):
            return False
        if isinstance(target, int):
            state.check_index(target)
            return True
        named = torch.device(target)  # type: ignore[call-overload]
        if named.type != "cuda":
            return False
        state.check_index(named)
        return True

    def hidden_wait(self, stream: FakeStream, operation: str, *, orders: bool = True) -> None:
        if self.sync_debug_mode and orders and not self.call.checking_values:
            if self.sync_debug_mode == 2:
                raise RuntimeError(_SYNCHRONIZES)
            site = calling_site()
            warnings.warn_explicit(_SYNCHRONIZES, UserWarning, site.file, site.line)
        super().hidden_wait(stream, operation, orders=orders)

    def drawing(self) -> AbstractContextManager[None]:
        return drawing_from(self.generator)

    def random_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def description(self) -> str:
        return "a fake CUDA device on CPU tensors"

    def __str__(self) -> str:
        return "cuda:0"
