"""One capture: the work put on its streams, and the memory to restore."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from headrace.fake.branches import Branches
from headrace.fake.graph_pools import GraphPool, fill_with_garbage
from headrace.fake.raw_memory import bytes_of, references, unobserved
from headrace.fake.tape_entries import Arithmetic, Mark
from headrace.races.operators import Operation, tensors
from headrace.races.race import Launch
from headrace.races.storages import storage_key

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeStream

_COPY = torch.ops.aten.copy_.default


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Tape:
    """One capture: the streams it covers, the work put on them, and the memory to restore."""

    device: FakeDevice
    origin: FakeStream
    pool: GraphPool
    #: Those that may draw random numbers in the capture, besides the device's own.
    generators: Sequence[torch.Generator] = ()
    launches: list[Launch] = field(default_factory=list)
    arithmetic: list[Arithmetic] = field(default_factory=list)
    over: bool = False
    #: Whether the work has drawn from the device's generator.
    draws: bool = False
    #: The order of the captured operations among themselves.
    branches: Branches = field(init=False)
    #: The captured streams, and how much was put on each.
    _counts: dict[FakeStream, int] = field(default_factory=dict)
    #: Those whose work no other captured stream waits for yet.
    _unjoined: set[FakeStream] = field(default_factory=set)
    #: What the capture made, and what was there before and is written: the memory and its content.
    _allocated: dict[int, torch.Tensor] = field(default_factory=dict)
    _before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _problem: RuntimeError | None = None
    #: Memory from outside the capture, and the first captured operation that uses it.
    _inputs: dict[int, tuple[torch.Tensor, Launch]] = field(default_factory=dict)
    #: How often this tape refers to each storage.
    _references: Counter[int] = field(default_factory=Counter)
    #: Its number among the captures of the pool.
    _number: int = field(init=False)

    def __post_init__(self) -> None:
        self.branches = Branches(self.device.checker)
        self._number = self.pool.enter(self)
        # A graph may end without `close()`. Its counts must not stay: other memory will have the
        # same keys.
        weakref.finalize(self, self.device.captured_references.subtract, self._references)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside the block. However the block ends, restore the memory."""
        self.device.graph_random_state.reset(self.origin)
        with unobserved():
            random_state = self.device.random_state()
            states = [generator.get_state() for generator in self.generators]
            # PyTorch computes with what earlier captures have left, and would complain about
            # indices that are garbage.
            for pool in self.device.graph_pools:
                for memory in pool.indices():
                    self.save_before_write([memory])
                    memory.zero_()
        self._add_stream(self.origin)
        try:
            with self.device.call.changed(tape=self):
                yield
            if self._problem is not None:
                raise self._problem  # the work caught the error, but the capture has failed
            if self._unjoined:
                names = ", ".join(sorted(stream.name for stream in self._unjoined))
                raise RuntimeError(f"capturing stream has unjoined work: on {names}")
        finally:
            self.over, self._problem = True, None
            for stream in self._counts:
                stream.joins_capture(None)
            with unobserved():
                self._restore()
                self.draws = not torch.equal(random_state, self.device.random_state())
                self.device.set_random_state(random_state)
                for generator, state in zip(self.generators, states, strict=True):
                    generator.set_state(state)

    def _restore(self) -> None:
        for memory, content in self._before.values():
            if memory.untyped_storage().nbytes() >= content.numel():  # not if it was resized
                memory.copy_(content)
        for memory in self._allocated.values():
            fill_with_garbage(memory)
        forgotten = Counter(self._before.keys())
        self._references.subtract(forgotten)
        self.device.captured_references.subtract(forgotten)
        self._before.clear()

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that this tape keeps: count that it refers to the memory."""
        key = storage_key(tensor)
        self._references[key] += 1
        self.device.captured_references[key] += 1
        return tensor

    def freed_inputs(self) -> list[tuple[torch.Tensor, Launch]]:
        """Memory from outside any pool that only captures refer to any more: on CUDA, where they
        refer to none, it is freed, and may belong to somebody else. That of a pool stays there."""
        kept = self.device.captured_references
        freed = [use for key, use in self._inputs.items() if references(key) <= kept[key]]
        storage_of = self.device.checker.storage_of
        return [
            (tensor, launch)
            for tensor, launch in freed
            if (tracked := storage_of(tensor)) is None
            or tracked.pool is None
            or not tracked.pool.is_open
        ]

    def overwrite_shared(self) -> None:
        """Do to the memory of the pool's other graphs what a replay of this one does on CUDA."""
        self.pool.replayed(self._number)

    def forget(self) -> None:
        """Free all memory."""
        self.pool.leave(self)
        self.device.captured_references.subtract(self._references)
        self._references.clear()
        self._inputs.clear()
        self.launches.clear()
        self.arithmetic.clear()
        self._allocated.clear()

    def refuse(self, what: str) -> NoReturn:
        """Raise CUDA's error. The capture has failed, even if the work catches it."""
        if self._problem is None:
            self._problem = RuntimeError(
                f"operation not permitted when stream is capturing: {what}"
            )
        raise self._problem

    # --- streams ----------------------------------------------------------------------------------

    def mark(self, stream: FakeStream) -> Mark:
        return Mark(self, stream, self._counts[stream], dict(self.branches.clock(stream)))

    def wait(self, stream: FakeStream, mark: Mark) -> None:
        """Let a stream wait for a captured one. It joins the capture, and a captured stream must
        wait for it before the capture ends."""
        if stream not in self._counts:
            if stream is self.device.default_stream:
                self.refuse("the default stream would depend on a capturing stream")
            self._add_stream(stream)
        self.branches.wait(stream, mark.clock)
        if self._counts[mark.stream] == mark.count:
            self._unjoined.discard(mark.stream)
        if stream is not self.origin:
            self._unjoined.add(stream)

    def _add_stream(self, stream: FakeStream) -> None:
        self._counts[stream] = 0
        stream.joins_capture(self)

    # --- what is recorded -------------------------------------------------------------------------

    def launched(self, stream: FakeStream, launch: Launch) -> None:
        """Record an operation for the checker and the clock, which see it at each replay."""
        self._counts[stream] += 1
        if stream is not self.origin:
            self._unjoined.add(stream)
        self.branches.launched(stream, launch)
        if launch.reads or launch.writes or launch.cost_ns:
            with unobserved():
                kept = launch.on(self._detached(launch.reads), self._detached(launch.writes))
                self.launches.append(kept)
                for tensor in (*kept.reads, *kept.writes):
                    key = storage_key(tensor)
                    if key not in self._allocated and self.device.checker.storage_of(tensor):
                        self._inputs.setdefault(key, (tensor, kept))

    def allocated(self, memory: Sequence[torch.Tensor]) -> None:
        """Take the memory of new tensors as the graph's."""
        with unobserved():
            for tensor in memory:
                key = storage_key(tensor)
                if key not in self._allocated:
                    self.pool.allocated(self._number, tensor)
                    self._allocated[key] = self._kept(bytes_of(tensor))

    def save_before_write(self, written: Sequence[torch.Tensor]) -> None:
        """Keep a copy of tensors that are about to be written."""
        with unobserved():
            for tensor in written:
                key = storage_key(tensor)
                if key not in self._allocated and key not in self._before:
                    memory = self._kept(bytes_of(tensor))
                    self._before[key] = memory, memory.clone()

    def before_operation(self, operation: Operation, written: Sequence[torch.Tensor]) -> None:
        for value in (*operation.args, *operation.kwargs.values()):
            if not isinstance(value, torch.Generator) or value is torch.default_generator:
                continue
            # The dispatcher may hand another object for the same generator.
            known = {one._cdata for one in self.generators}  # type: ignore[attr-defined]
            if value._cdata not in known:  # type: ignore[attr-defined]
                self.refuse("random numbers from a generator of the step's own")
        self.save_before_write(written)

    def after_operation(
        self, operation: Operation, result: Any, fresh: Sequence[torch.Tensor]
    ) -> None:
        """Record an operation's arithmetic. Host scalars keep the value they have now."""
        keys = {storage_key(tensor) for tensor in fresh}
        trains = torch.is_grad_enabled()
        with unobserved():
            outputs = [
                (position, self._kept(tensor.data))
                for position, tensor in enumerate(tensors(result))
                if storage_key(tensor) in keys
            ]
            args, kwargs = (
                self._detached(part, bake=True) for part in (operation.args, operation.kwargs)
            )
            self.arithmetic.append(Arithmetic(operation.func, args, kwargs, outputs, trains))

    def copied(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Record a copy. From pinned memory, a replay copies what is there at that time."""
        with unobserved():
            pair = self._detached((into, source))
            self.arithmetic.append(Arithmetic(_COPY, pair, {}))

    def _detached(self, value: Any, *, bake: bool = False) -> Any:
        """The same memory without autograd's history and version counter. Ordinary host memory, and
        with `bake` all host memory, is copied as it is now."""
        if isinstance(value, torch.Tensor):
            fixed = not self.device.holds(value) and (bake or not self.device.is_pinned(value))
            return value.detach().clone() if fixed else self._kept(value.data)
        if isinstance(value, (tuple, list)):
            return type(value)(self._detached(part, bake=bake) for part in value)
        if isinstance(value, dict):
            return {name: self._detached(part, bake=bake) for name, part in value.items()}
        return value
