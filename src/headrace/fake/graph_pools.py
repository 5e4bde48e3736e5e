"""The memory that the graphs of a pool share, and what a replay of one does to that of the others.

Memory that is freed during a capture, or after it, goes back to the pool, and a later capture may
get it. From then on two graphs write the same bytes: a replay of either overwrites what the other
keeps there. So graphs of a pool are right in the order of their captures, and in another one only
as far as none of them needs what an earlier replay left in such memory.

The fake device gives each tensor memory of its own, and shows the worst that the allocator could
do. After each replay it fills with garbage all memory of other graphs that the replayed graph may
share: where one was freed before the other was allocated, on the same stream and of the same size
class. What lived at the same time cannot be shared, whatever the order of the replays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.fake.raw_memory import bytes_of, references, unobserved
from headrace.races.frames import calling_site

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeStream
    from headrace.fake.tape import Tape

# All bits set: no number in any floating type, -1 in the others.
_GARBAGE = 0xFF
#: Memory is handed out again on the stream that freed it only, and in its size class.
_Kind = tuple[int, str]


def fill_with_garbage(memory: torch.Tensor) -> None:
    """Make bytes what nobody can take for a result."""
    memory.fill_(_GARBAGE)


@dataclass(slots=True)
class _PoolBlock:
    """Memory that a capture allocated. Times are counted in allocations of the pool."""

    storage: weakref.ref[torch.UntypedStorage]
    capture: int
    kind: _Kind
    is_floating: bool
    allocated: int
    #: The first allocation that could have got it. None while somebody holds it.
    freed: int | None = None


class GraphRandomState:
    """Where graphs that draw find the random seed and offset. There is one for all graphs of a
    device: each of their replays writes it, and each capture begins by writing it on its own
    stream, which must not happen while a replay is still under way."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.memory = self._new()

    def _new(self) -> torch.Tensor:
        with unobserved():
            memory = torch.zeros(1, dtype=torch.uint8, device="cpu")
            with self._device.lock:
                host = self._device.host()
                self._device.checker.track(memory, "random state", host, calling_site())
        return memory

    def reset(self, stream: FakeStream) -> None:
        """Write it, as a capture does that begins. The write is long over when a replay can come:
        nothing has to wait for it."""
        self._device.write_on(stream, "a capture begins", self.memory)
        self.memory = self._new()


class GraphPool:
    """Memory that several graphs share, so they may not run at the same time: every replay writes
    `memory`, and two replays without an order between them race on it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        with unobserved():
            self.memory = torch.zeros(1, dtype=torch.uint8, device="cpu")
            with device.lock:
                device.checker.track(self.memory, "pool", device.host(), calling_site())
        self._graphs: weakref.WeakSet[Tape] = weakref.WeakSet()
        self._captures = 0
        self._allocations = 0
        self._blocks: dict[int, _PoolBlock] = {}
        #: Those of them that somebody holds.
        self._held: dict[int, _PoolBlock] = {}
        # By capture: its last allocation, and the first time that memory of it was freed.
        self._last_allocated: dict[tuple[int, _Kind], int] = {}
        self._first_freed: dict[tuple[int, _Kind], int] = {}

    def enter(self, tape: Tape) -> int:
        """Add a capture, and return its number."""
        self._graphs.add(tape)
        self._captures += 1
        return self._captures

    def leave(self, tape: Tape) -> None:
        self._graphs.discard(tape)

    @property
    def is_open(self) -> bool:
        """Whether the pool keeps its memory: the device gets it back after the last graph."""
        return bool(self._graphs)

    def allocated(self, capture: int, memory: torch.Tensor) -> None:
        """Count an allocation of a capture that is under way. It may get what was freed before."""
        tracked = self.device.checker.storage_of(memory)
        if tracked is None or not tracked.nbytes:
            return
        self._allocations += 1
        self._find_freed(capture)
        storage, kind = memory.untyped_storage(), (tracked.owner.stream_number, tracked.size_class)
        block = _PoolBlock(
            *(weakref.ref(storage), capture, kind, tracked.dtype.is_floating_point),
            self._allocations,
        )
        self._blocks[storage._cdata] = self._held[storage._cdata] = block
        self._last_allocated[capture, kind] = self._allocations

    def _find_freed(self, capture: int) -> None:
        """Find the memory of other captures that nobody but graphs refers to any more. When a
        capture's own memory is freed makes no difference until a later one allocates."""
        kept = self.device.captured_references
        for key, block in list(self._held.items()):
            if block.capture == capture:
                continue
            storage = block.storage()
            if storage is None:
                del self._held[key]
            elif references(key) <= kept[key]:
                del self._held[key]
                block.freed = self._allocations
                self._first_freed.setdefault((block.capture, block.kind), block.freed)

    def indices(self) -> Iterator[torch.Tensor]:
        """The memory of tensors that may be indices: those that hold no floating-point numbers."""
        for block in self._blocks.values():
            storage = block.storage()
            if storage is not None and not block.is_floating:
                yield bytes_of(storage)

    def replayed(self, capture: int) -> None:
        """Fill with garbage what a replay of a graph may have overwritten of the others."""
        for key, block in list(self._blocks.items()):
            storage = block.storage()
            if storage is None:
                del self._blocks[key]
            elif block.capture != capture and self._may_share(block, capture):
                fill_with_garbage(bytes_of(storage))

    def _may_share(self, block: _PoolBlock, capture: int) -> bool:
        """Whether a block and some memory of a capture can have been the same bytes."""
        last = self._last_allocated.get((capture, block.kind))
        if last is not None and block.freed is not None and block.freed <= last:
            return True
        first = self._first_freed.get((capture, block.kind))
        return first is not None and first <= block.allocated
