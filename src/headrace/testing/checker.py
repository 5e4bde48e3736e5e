"""Happens-before over streams and host threads, by vector clocks.

Each *actor* (a stream or a host thread) counts its operations, and its clock says up to which
operation of every other actor it is ordered after. Events, launches and host waits join clocks. Two
accesses to the same bytes race if neither actor's clock has reached the other's access.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.source_lines import Site
from headrace.testing.entries import Entries, Entry
from headrace.testing.layout import Layout
from headrace.testing.operators import memory_of
from headrace.testing.races import Access, Race, missing_call

Clock = dict[int, int]

# PyTorch's allocator serves requests up to 1 MiB and larger ones from separate pools, and rounds
# to 512 bytes: memory freed in one pool is never handed out in the other.
_SMALL_POOL_BYTES = 1 << 20
_ROUNDING_BYTES = 512
# A program that never orders its streams leaves freed blocks pending forever. The newest are
# enough to report it.
_MAX_FREED = 1000


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor."""
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else id(tensor)


def join(into: Clock, other: Clock) -> None:
    """Order `into` after everything that `other` is ordered after."""
    for actor, tick in other.items():
        if into.get(actor, 0) < tick:
            into[actor] = tick


class Actor:
    """A stream or a host thread, with its vector clock."""

    def __init__(self, number: int, name: str, is_host: bool) -> None:
        self.number = number
        self.name = name
        self.is_host = is_host
        self.clock: Clock = {number: 0}
        #: Virtual time: now for a host; for a stream, when it will have done all its work.
        self.time_ns = 0

    def advance(self) -> None:
        """Count one more operation of this actor."""
        self.clock[self.number] += 1

    def knows(self, actor: int, tick: int) -> bool:
        return self.clock.get(actor, 0) >= tick


@dataclass(slots=True)
class Storage:
    """A tracked tensor storage. `home` is "device", "pinned", or "pool" for the tensor that
    represents a graph pool's memory. `recorded_streams` are those of `record_stream`."""

    home: str
    owner: Actor
    allocated_at: Site
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    entries: Entries = field(default_factory=Entries)
    recorded_streams: set[int] = field(default_factory=set)
    #: Allocated in a capture: any stream may use it first, and it is never handed out again.
    pooled: bool = False

    def __str__(self) -> str:
        if self.home == "pool":
            return f"a graph pool in device memory, allocated at {self.allocated_at}"
        place = "pinned host memory" if self.home == "pinned" else "device memory"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"a {tuple(self.shape)} {dtype} tensor in {place}, allocated at {self.allocated_at}"


@dataclass(slots=True)
class _FreedBlock:
    nbytes: int
    entries: list[Entry]


class Checker:
    """Records the accesses to all tracked storages and finds the races among them.

    It is not thread-safe: the fake device calls it under its lock.
    """

    def __init__(self, this_host: Callable[[], Actor | None]) -> None:
        self._this_host = this_host
        self.races: list[Race] = []
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self.limit_bytes = sys.maxsize
        self._actors: list[Actor] = []
        self._storages: dict[int, Storage] = {}
        self._freed: dict[int, list[_FreedBlock]] = {}
        self._reported: set[tuple[object, ...]] = set()

    def new_actor(self, name: str, *, is_host: bool) -> Actor:
        actor = Actor(len(self._actors), name, is_host)
        self._actors.append(actor)
        return actor

    def actors(self) -> list[Actor]:
        return list(self._actors)

    # --- storages ---------------------------------------------------------------------------------

    def storage_of(self, tensor: torch.Tensor) -> Storage | None:
        """The tracked storage of a tensor; None for ordinary host memory."""
        if not torch._C._has_storage(tensor):
            memory = memory_of(tensor)
            return self.storage_of(memory[-1]) if memory else None
        return self._storages.get(tensor.untyped_storage()._cdata)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in device memory."""
        tracked = self.storage_of(tensor)
        return tracked is not None and tracked.home == "device"

    def track(
        self, tensor: torch.Tensor, home: str, owner: Actor, site: Site, *, pooled: bool = False
    ) -> Storage:
        """Track a storage from its allocation on `owner` until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None:
            return known
        nbytes = storage.nbytes()
        if home == "device" and self.device_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"fake out of memory: tried to allocate {nbytes:,} bytes; {self.device_bytes:,} of "
                f"{self.limit_bytes:,} are in use"
            )
        tracked = Storage(home, owner, site, tensor.shape, tensor.dtype, nbytes, pooled=pooled)
        self._storages[key] = tracked
        weakref.finalize(storage, self._freed_storage, key).atexit = False
        if home == "device":
            self.device_bytes += nbytes
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        if home == "device" and not pooled:
            whole = Layout.whole(nbytes)
            tracked.entries = Entries(self._take_freed(owner, nbytes, whole))
            # New memory is safe for the stream it was allocated on. For other streams it is not:
            # earlier work of the owner may still use these bytes.
            allocation = Access(site, owner.name, "allocation", writes=True)
            tick = owner.clock[owner.number]
            tracked.entries.add(Entry(owner.number, tick, whole, allocation))
        return tracked

    def _freed_storage(self, key: int) -> None:
        tracked = self._storages.pop(key)
        if tracked.home != "device":
            return
        self.device_bytes -= tracked.nbytes
        if tracked.pooled:
            return
        pending = [
            entry
            for entry in self._unknown(tracked.owner, tracked.entries.all())
            if entry.actor != tracked.owner.number and entry.actor not in tracked.recorded_streams
        ]
        host = self._this_host()
        if host is not None:  # work that this thread has waited for is over
            pending = self._unknown(host, pending)
        if pending:
            blocks = self._freed.setdefault(tracked.owner.number, [])
            blocks.append(_FreedBlock(tracked.nbytes, pending))
            del blocks[:-_MAX_FREED]

    def _take_freed(self, owner: Actor, nbytes: int, whole: Layout) -> list[Entry]:
        """Hand out the newest freed block of this stream that fits and that other streams may still
        use. The real allocator might pick another; a checker assumes the worst."""
        blocks = self._freed.get(owner.number, [])
        # Drop blocks whose last uses the owner is ordered after by now.
        blocks[:] = [block for block in blocks if self._unknown(owner, block.entries)]
        for index in reversed(range(len(blocks) if nbytes else 0)):
            block = blocks[index]
            if _rounded(block.nbytes) >= _rounded(nbytes) and _pool(block.nbytes) == _pool(nbytes):
                del blocks[index]
                return [
                    Entry(entry.actor, entry.tick, whole, entry.access, of_previous_owner=True)
                    for entry in self._unknown(owner, block.entries)
                ]
        return []

    @staticmethod
    def _unknown(actor: Actor, entries: list[Entry]) -> list[Entry]:
        return [entry for entry in entries if not actor.knows(entry.actor, entry.tick)]

    # --- accesses ---------------------------------------------------------------------------------

    def touch(self, tensor: torch.Tensor, actor: Actor, access: Access) -> None:
        """Check one access against all earlier ones to the same bytes, and record it."""
        storage = tensor.untyped_storage()
        tracked = self._storages.get(storage._cdata)
        if tracked is None:
            return
        if storage.nbytes() != tracked.nbytes:
            self._count_resized(tracked, storage.nbytes())
        layout, clock = Layout.of(tensor), actor.clock
        for entry in tracked.entries.near(layout):
            ordered = clock.get(entry.actor, 0) >= entry.tick
            conflict = access.writes or entry.access.writes
            if conflict and not ordered and layout.overlaps(entry.layout):
                self._report(tracked, entry, access)
            # Later accesses need only be ordered after this one: drop `entry`.
            if (access.writes or (ordered and not entry.access.writes)) and layout.covers(
                entry.layout
            ):
                tracked.entries.remove(entry)
        tracked.entries.add(Entry(actor.number, clock[actor.number], layout, access))

    def _count_resized(self, tracked: Storage, nbytes: int) -> None:
        """`out=` and `resize_` change a storage's size in place."""
        if tracked.home == "device":
            self.device_bytes += nbytes - tracked.nbytes
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        tracked.nbytes = nbytes

    def _report(self, tracked: Storage, entry: Entry, access: Access) -> None:
        first, second = entry.access, access
        if entry.of_previous_owner:
            kind = "reuse"
            second = Access(tracked.allocated_at, tracked.owner.name, "allocation", writes=True)
        else:
            kind = "-".join("write" if one.writes else "read" for one in (first, second))
        # A loop repeats the same race at every step: report it once.
        key = (kind, first.site, first.where, second.site, second.where)
        if key not in self._reported:
            self._reported.add(key)
            missing = missing_call(kind, first, second)
            self.races.append(Race(kind, str(tracked), first, second, missing))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUNDING_BYTES) * _ROUNDING_BYTES


def _pool(nbytes: int) -> str:
    return "small" if nbytes <= _SMALL_POOL_BYTES else "large"
