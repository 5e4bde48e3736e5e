"""Happens-before over streams and host threads, by vector clocks.

Each *actor* counts its operations, and its clock says up to which operation of every other actor it
is ordered after. An actor is a host thread, or a stream as one host thread uses it: two threads
that enqueue on one stream without an order between them have no order there either. Events,
launches and host waits join clocks. Two accesses to the same bytes race if neither actor's clock
has reached the other's access.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace.races.actors import Actor, Clock, Host, StreamState, StreamView, join
from headrace.races.entries import Entry
from headrace.races.frames import Frames
from headrace.races.layout import Layout
from headrace.races.operators import memory_of
from headrace.races.race import Access, Freed, Race, missing_call, race_key
from headrace.races.source import accepted_because
from headrace.races.storages import Storage
from headrace.source_lines import Site

if TYPE_CHECKING:
    from headrace.fake.graph_pools import GraphPool


# Without it, a wait of one stream for another may come before the work that it should wait for.
_THREADS_FIRST = "a lock, queue or join between the threads that launch the two, and then "


class Checker:
    """Records the accesses to all tracked storages and finds the races among them.

    It is not thread-safe: the fake device calls it under its lock.
    """

    def __init__(
        self, this_host: Callable[[], Host | None], lock: AbstractContextManager[Any]
    ) -> None:
        self._this_host = this_host
        self._lock = lock
        self.races: list[Race] = []
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self.limit_bytes = sys.maxsize
        self.streams: list[StreamState] = []
        self.hosts: list[Host] = []
        self._actors: dict[int, Actor] = {}
        self._numbers = 0
        self._storages: dict[int, Storage] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: For storages that share another one's memory: how many bytes after its start they begin.
        self._offsets: dict[int, int] = {}
        # By the stream that owned it and the pool: uses of freed memory by other streams that may
        # still be running, the newest of each line.
        self._freed: dict[tuple[int, str], dict[tuple[object, ...], Entry]] = {}
        #: How often each race was seen.
        self._reported: dict[tuple[object, ...], int] = {}
        #: The races that a comment says are ordered.
        self.accepted: set[tuple[object, ...]] = set()
        #: Names the call that would remove a race.
        self.missing_call: Callable[[str, Access, Access, Freed | None, bool], str] = missing_call
        # A first use with the stream that is not ordered after it. If that stream gets the memory
        # of the use, too, the cause is the same.
        self._unordered: set[tuple[object, ...]] = set()

    def new_host(self, name: str) -> Host:
        if len(self.hosts) == 1:  # from now on, threads tell each other what is on their streams
            for view in self.hosts[0].views.values():
                view.queued()
        host = Host(self._new_number(), name, self)
        self._actors[host.number] = host
        self.hosts.append(host)
        return host

    def new_stream(self, name: str) -> StreamState:
        stream = StreamState(len(self.streams), name)
        self.streams.append(stream)
        return stream

    def new_view(self, stream: StreamState, host: Host) -> StreamView:
        view = StreamView(self._new_number(), self._new_number(), stream, host)
        self._actors[view.number] = view
        stream.views.append(view)
        return view

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers

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

    def held(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the tensors that lie in device memory. Each must have a storage."""
        get = self._storages.get
        found = []
        for tensor in tensors:
            tracked = get(tensor.untyped_storage()._cdata)
            if tracked is not None and tracked.home == "device":
                found.append(tensor)
        return found

    def track(
        self,
        tensor: torch.Tensor,
        home: str,
        owner: Actor,
        site: Site,
        frames: Frames = (),
        *,
        pool: GraphPool | None = None,
    ) -> Storage:
        """Track a storage from its allocation on `owner` until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None:
            return known
        nbytes = storage.nbytes()
        if home == "device":
            self._count(nbytes)
        # The rows of a nested tensor differ in shape.
        shape = torch.Size((tensor.numel(),)) if tensor.is_nested else tensor.shape
        tracked = self._storages[key] = Storage(
            *(home, owner, site, frames, shape, tensor.dtype, nbytes, storage.data_ptr()),
            pool=pool,
        )
        self._watch_end(storage, key)
        if home == "device" and pool is None:
            self._allocate(tracked)
        return tracked

    def made(self, tensor: torch.Tensor, host: Host) -> None:
        """Notice that the operation that makes a tensor is on its stream. Whoever has the tensor
        comes after that, however it was handed over."""
        if len(self.hosts) > 1:
            tracked = self.storage_of(tensor)
            if tracked is not None:
                tracked.was_made(host)

    def learn_of_making(self, tensors: Sequence[torch.Tensor], host: Host) -> None:
        """Order a host thread after the making of tensors that it uses."""
        for tensor in tensors:
            tracked = self.storage_of(tensor)
            if tracked is None or tracked.made is None or tracked.made[0] is host:
                continue
            join(host.clock, tracked.made[1])

    def alias(self, tensor: torch.Tensor) -> None:
        """Follow a tensor that PyTorch made of memory it was handed, as `from_dlpack` and
        `from_numpy` do, if it is a tracked storage's."""
        storage = tensor.untyped_storage()
        address, key = storage.data_ptr(), storage._cdata
        for tracked in [] if key in self._storages else list(self._storages.values()):
            if tracked.address <= address < tracked.address + tracked.nbytes:
                self._storages[key] = tracked
                self._offsets[key] = address - tracked.address
                self._watch_end(storage, key)
                return

    def _count(self, nbytes: int) -> None:
        if self.device_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"fake out of memory: tried to allocate {nbytes:,} bytes; {self.device_bytes:,} of "
                f"{self.limit_bytes:,} are in use"
            )
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def unpin(self, address: int) -> None:
        """Track the pinned memory at an address no longer."""
        for key, tracked in list(self._storages.items()):
            if tracked.home == "pinned" and tracked.address == address:
                self._forget(key)

    def _watch_end(self, storage: torch.UntypedStorage, key: int) -> None:
        # Not `weakref.finalize`, which takes three times as long: every result is tracked.
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        with self._lock:  # any thread may drop the last reference, at any moment
            del self._alive[key]
            tracked = self._storages.pop(key)
            if self._offsets.pop(key, None) is None and tracked.home == "device":
                self.device_bytes -= tracked.nbytes
                self._free(tracked)

    # --- the allocator ----------------------------------------------------------------------------

    def _allocate(self, tracked: Storage) -> None:
        """Give a storage memory, in the worst way that the real allocator could: memory that was
        freed on this stream while other streams may still use it."""
        owner, whole = tracked.owner, Layout.whole(tracked.nbytes)
        tracked.forget_entries()
        uses = self._freed.get((owner.stream_number, tracked.size_class))
        for key, use in list(uses.items()) if uses and tracked.nbytes else ():
            known = owner.knows(use.actor, use.tick)
            if not known:
                entry = Entry(use.actor, use.tick, whole, use.access, of_previous_owner=True)
                entry.freed = use.freed
                tracked.entries.add(entry)
            if (known and len(self.hosts) == 1) or (
                (use.access.site, use.access.where, owner.name) in self._unordered
            ):
                uses.pop(key, None)  # type: ignore[union-attr]
        # New memory is safe for the stream it was allocated on. For other streams it is not:
        # earlier work of the owner may still use these bytes.
        allocation = tracked.allocation()
        tick = owner.clock[owner.number]
        tracked.entries.add(Entry(owner.number, tick, whole, allocation, is_allocation=True))

    def _free(self, tracked: Storage) -> None:
        """Take a storage's memory back. It is safe for its owner at once, and after
        `record_stream` when those streams have done what is on them now."""
        if tracked.pool is not None or not tracked.nbytes:
            return
        host = self._this_host()
        done: list[Clock] = []
        if host is not None:  # work that this thread has waited for is over
            done.append(host.clock)
            for number in (tracked.owner.stream_number, *tracked.recorded_streams):
                view = host.view(self.streams[number])
                view.refresh()
                done.append(view.clock)
        safe = {tracked.owner.stream_number, *tracked.recorded_streams}
        for entry in tracked.entries.all():
            if entry.of_previous_owner or self._actors[entry.actor].stream_number in safe:
                continue
            if any(clock.get(entry.actor, 0) >= entry.tick for clock in done):
                continue
            if (entry.access.site, entry.access.where, tracked.owner.name) in self._unordered:
                continue
            pool = tracked.owner.stream_number, tracked.size_class
            line = entry.actor, entry.access.site, entry.access.writes
            uses = self._freed.setdefault(pool, {})
            known = uses.get(line)
            if known is None or known.tick < entry.tick:
                entry.freed = Freed(str(tracked), tracked.allocated_by)
                uses[line] = entry

    def resized(self, tensor: torch.Tensor, actor: Actor, site: Site, frames: Frames) -> None:
        """Notice that PyTorch has changed a storage's size in place: it has allocated memory on the
        current stream, copied what was there, and freed the old memory."""
        storage = tensor.untyped_storage()
        tracked = self._storages.get(storage._cdata)
        if tracked is not None and storage.nbytes() != tracked.nbytes:
            self._resize(tracked, storage, actor, site, frames)

    def _resize(
        self,
        tracked: Storage,
        storage: torch.UntypedStorage,
        actor: Actor,
        site: Site,
        frames: Frames,
    ) -> None:
        before, after = tracked.nbytes, storage.nbytes()
        if tracked.home != "device" or tracked.pool is not None:
            if tracked.home == "device":
                self._count(after - before)
            tracked.moves(after, storage.data_ptr())
            return
        copied = min(before, after)
        if copied:
            actor.advance()
            read = Access(site, actor.name, "resize_", writes=False)
            self._check(tracked, Layout.whole(copied), actor, read)
        self._count(after - before)
        old = replace(tracked)
        tracked.moves(after, storage.data_ptr())
        tracked.is_allocated(actor, site, frames)
        self._allocate(tracked)
        self._free(old)  # after the allocation, which cannot get this memory
        if copied:
            write = Access(site, actor.name, "resize_", writes=True)
            self._check(tracked, Layout.whole(copied), actor, write)

    # --- accesses ---------------------------------------------------------------------------------

    def place(self, tensor: torch.Tensor) -> tuple[Storage, Layout] | None:
        """The tracked storage of a tensor, and its bytes there; None for ordinary host memory."""
        key = tensor.untyped_storage()._cdata
        tracked = self._storages.get(key)
        if tracked is None:
            return None
        layout = Layout.of(tensor)
        return tracked, layout.moved(self._offsets[key]) if key in self._offsets else layout

    def touch(self, tensor: torch.Tensor, actor: Actor, access: Access) -> None:
        """Check one access against all earlier ones to the same bytes, and record it."""
        place = self.place(tensor)
        if place is None:
            return
        tracked, layout = place
        storage = tensor.untyped_storage()
        if storage.nbytes() != tracked.nbytes and storage._cdata not in self._offsets:  # by `out=`
            self._resize(tracked, storage, actor, access.site, access.frames)
        self._check(tracked, layout, actor, access)

    def _check(self, tracked: Storage, layout: Layout, actor: Actor, access: Access) -> None:
        new = Entry(actor.number, actor.clock[actor.number], layout, access)
        for entry in tracked.entries.record(new, actor.clock):
            if not self._same_queue(entry, actor) and not actor.knows(entry.actor, entry.tick):
                self._report(tracked, entry, access, actor)

    def _same_queue(self, entry: Entry, actor: Actor) -> bool:
        """Whether the allocator itself orders `actor` after an entry of an allocation: it handed
        the memory out after what is on the same stream."""
        if not (entry.is_allocation or entry.of_previous_owner):
            return False
        return self._actors[entry.actor].stream_number == actor.stream_number

    def _report(self, tracked: Storage, entry: Entry, access: Access, actor: Actor) -> None:
        first, second = entry.access, access
        ordered = [actor]
        if entry.of_previous_owner:
            kind = "reuse"
            second = tracked.allocation()
            ordered.append(tracked.owner)
            if (first.site, first.where, second.where) in self._unordered:
                return  # every later allocation could get this memory: the first is enough
        else:
            kind = _kind(first, second)
        if accepted_because(first, second) is not None:
            # The comment says that there is an order: all that follows is after it, too.
            self.accepted.add(race_key(kind, first, second))
            for one in ordered:
                join(one.clock, {entry.actor: entry.tick})
            return
        self._unordered.add((first.site, first.where, second.where))
        known = self._knows_of(entry, ordered[-1])
        self._add_race(kind, tracked, first, second, entry.freed, known)

    def _knows_of(self, entry: Entry, actor: Actor) -> bool:
        """Whether the thread of `actor` comes after the launch of an entry on another stream."""
        first = self._actors[entry.actor]
        if not isinstance(first, StreamView) or first.stream_number == actor.stream_number:
            return True
        if first.host is actor.host:
            return True
        known = actor.host.clock.get(first.queue_number, 0)
        return first.clock_at(known).get(first.number, 0) >= entry.tick

    def report(self, tracked: Storage, first: Access, second: Access) -> None:
        """Report two accesses without an order between them."""
        kind = _kind(first, second)
        if accepted_because(first, second) is not None:
            self.accepted.add(race_key(kind, first, second))
        else:
            self._add_race(kind, tracked, first, second)

    def report_freed(self, tensor: torch.Tensor, captured: Access, replayed: Access) -> None:
        """Report that a graph uses memory that was freed after the capture."""
        tracked = self.storage_of(tensor)
        if tracked is None:
            return
        if accepted_because(captured, replayed) is not None:
            self.accepted.add(race_key("freed", captured, replayed))
        else:
            self._add_race("freed", tracked, captured, replayed)

    def _add_race(
        self,
        kind: str,
        tracked: Storage,
        first: Access,
        second: Access,
        freed: Freed | None = None,
        known: bool = True,
    ) -> None:
        """Add a race. `known` says whether the thread of the second access knows that the first is
        launched."""
        # A loop repeats the same race at every step: report it once.
        key = race_key(kind, first, second)
        times = self._reported.get(key, 0)
        self._reported[key] = times + 1
        if times == 0:
            missing = self.missing_call(kind, first, second, freed, known)
            if not known and kind != "reuse":
                missing = _THREADS_FIRST + missing
            self.races.append(Race(kind, str(tracked), first, second, missing, freed))

    def times(self, race: Race) -> int:
        """How often a race was seen."""
        return self._reported[race.key]


def _kind(first: Access, second: Access) -> str:
    return "-".join("write" if one.writes else "read" for one in (first, second))
