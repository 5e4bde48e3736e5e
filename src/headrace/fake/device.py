"""`FakeDevice`: a `Device` on CPU tensors, whose streams are checked instead of run.

PyTorch does the arithmetic at once, on the CPU. The fake decides *when* each operation would have
run: it puts the operation on the current stream, orders it by the same calls as on a GPU, checks it
for races, and gives it a place on a virtual clock.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from headrace.device import (
    CaptureQuery,
    Device,
    Graph,
    Kind,
    MemoryFigures,
    Obstacle,
    Result,
    Span,
    Stream,
    Timeline,
    Trace,
    host_wait,
)
from headrace.errors import DeviceError, DeviceMismatchError, RaceError
from headrace.fake import (
    autograd,
    collectives,
    faults,
    function_mode,
    graphs,
    host_threads,
    numpy_views,
    patches,
)
from headrace.fake.costs import Costs
from headrace.fake.dispatch_mode import DispatchMode
from headrace.fake.function_mode import FunctionMode
from headrace.fake.graph_pools import GraphPool, GraphRandomState
from headrace.fake.hosts import Hosts
from headrace.fake.mode_call import ModeCall
from headrace.fake.streams import FakeEvent, FakeStream
from headrace.races.actors import Actor, Clock, StreamView, join
from headrace.races.findings import Finding, find, race_report
from headrace.races.frames import calling_site, calling_site_and_frames
from headrace.races.history import History, Picture
from headrace.races.operators import dispatches_itself, inner_tensors
from headrace.races.pages import race_page
from headrace.races.race import Access, HiddenWait, Launch, Race
from headrace.source_lines import Site, users_line

_NS_PER_US = 1_000


def replacements() -> list[patches.Replacement]:
    """What is replaced in PyTorch and the standard library while a fake device is in use."""
    parts = (host_threads, autograd, graphs, numpy_views, function_mode, collectives)
    return [one for part in parts for one in part.replacements()]


class FakeDevice(Hosts):
    """A device for tests that needs no GPU.

        with FakeDevice() as device:             # raises RaceError on the way out if it saw any
            model.to(device.torch_device)
            ...                                  # any code written against `headrace.device`

    Inside the block, tensors made on or moved to `device.torch_device` are device memory,
    `pin_memory()` works, and new threads are watched, too.

    - `costs`: how long operations take on the virtual clock.
    - `check=False`: do not raise at the end; look at `races` instead.
    - `host_order`: "traced" orders host threads by `Thread.start` and `join`, and by locks,
      conditions, events and queues made inside the block; "total" orders all host threads.
    - `memory_bytes`: allocating more raises PyTorch's `OutOfMemoryError`, as on a GPU.
    - `keep_timeline=False`: keep no spans; a very long run needs less memory then.

    `device.hang = Hang()` stops the device.

    Not seen: what C++ does with a raw pointer, and threads that were started before the block
    (unless they enter `with device:`).
    """

    captures = True
    #: What an error advises about a tensor that lies on the host.
    how_to_move = "move it with .to(device.torch_device), inside the `with device:` block"
    #: Whether it has a random generator of its own. Otherwise its generator is the host's.
    draws_apart = False
    #: The mode that makes this device's name work in PyTorch's calls.
    function_mode: type[FunctionMode] = FunctionMode

    def __init__(
        self,
        *,
        costs: Costs | None = None,
        index: int = 1,
        check: bool = True,
        host_order: Literal["traced", "total"] = "traced",
        memory_bytes: int = 16 << 30,
        keep_timeline: bool = True,
    ) -> None:
        if index < 1:
            raise DeviceError(f"index = {index}: expected 1 or more")
        if host_order not in ("traced", "total"):
            raise DeviceError(f"host_order = {host_order!r}: expected 'traced' or 'total'")
        # cpu:1 computes like cpu, but a call that names it differs from one that means the host.
        super().__init__(torch.device("cpu", index), host_order)
        self.costs = costs or Costs()
        # The pool hands buffers from thread to thread, even if it was made before the block.
        self.pinned._lock = host_threads.traced_lock()
        self.hidden_waits: list[HiddenWait] = []
        #: Called with the operation of each hidden wait, while it happens.
        self.on_hidden_wait: Callable[[str], object] | None = None
        self._check = check
        self._memory_bytes = self.checker.limit_bytes = memory_bytes
        self._keep_timeline = keep_timeline
        self._spans: list[Span] = []
        #: Operations so far.
        self.launches = 0
        self.call = ModeCall()
        self.hang: faults.Hang | None = None
        self.history = History()
        self._pictures: list[Picture] = []
        self._entered = 0
        #: How often captures refer to each storage.
        self.captured_references: Counter[int] = Counter()
        self.graph_pools: weakref.WeakSet[GraphPool] = weakref.WeakSet()
        self._streams: dict[str, FakeStream] = {}
        #: Host memory that was pinned after its allocation: the number of bytes, by address.
        self.registered_memory: dict[int, int] = {}
        self.default_stream = FakeStream(self, "default")
        self.graph_random_state = GraphRandomState(self)

    # --- the block --------------------------------------------------------------------------------

    def __enter__(self) -> FakeDevice:
        """Watch the operations of this thread, and of threads it starts, until `__exit__`."""
        if self._entered == 0:
            patches.install(self, replacements())
        self._entered += 1
        self.enter_modes()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.exit_modes()
        self._entered -= 1
        if self._entered == 0:
            patches.remove(self)
            if self._check and kind is None:
                self.check()

    def enter_modes(self) -> None:
        """Watch the calling thread: PyTorch's modes hold for one thread each."""
        modes = (self.function_mode(self), DispatchMode(self))
        for mode in modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        self._thread.modes = [*getattr(self._thread, "modes", []), modes]

    def is_named_by(self, target: object) -> bool:
        """Whether `target`, the argument of a `device=` or `.to(…)`, means this device."""
        if target is None or isinstance(target, int):
            return False
        return torch.device(target) == self.torch_device  # type: ignore[call-overload, no-any-return]

    def watches_this_thread(self) -> bool:
        return bool(getattr(self._thread, "modes", None))

    def exit_modes(self) -> None:
        for mode in reversed(self._thread.modes.pop()):
            mode.__exit__(None, None, None)

    @property
    def races(self) -> list[Race]:
        """All races so far, each pair of lines once, without those that a comment `# headrace:
        ordered-by …` at one of the lines accepts."""
        return list(self.checker.races)

    def findings(self) -> list[Finding]:
        """The races so far with all that a report shows: one finding for each two lines."""
        with self.lock:
            self._picture_new_races()
            return find(self.checker, self._pictures, self.stream_sites())

    def stream_sites(self) -> dict[str, Site]:
        """The line that made each stream, by its name, where that is not the name itself."""
        return {}

    def check(self) -> None:
        """Raise `RaceError` if there were any races, with all of them in its message."""
        if self.races:
            raise RaceError(race_report(self.findings()))

    def write_report(self, path: str | Path) -> None:
        """Write the races as one HTML file, with a picture of each."""
        Path(path).write_text(race_page(self.findings()), encoding="utf-8")

    def timeline(self) -> Timeline:
        """What ran when on the virtual clock, without operations that cost nothing."""
        with self.lock:
            return Timeline(self._spans)

    @property
    def now_ms(self) -> float:
        """Virtual time of this host thread."""
        return self.host().time_ns / 1e6

    # --- made-up work -----------------------------------------------------------------------------

    def host_work(self, ms: float, name: str = "host work") -> None:
        """Keep this host thread busy for `ms` on the virtual clock, like a slow loader."""
        with self.lock:
            host = self.host()
            start_ns = host.time_ns
            host.time_ns += round(ms * 1e6)
            self._span(host, name, "host", start_ns, host.time_ns, calling_site())

    def work(
        self,
        ms: float,
        name: str = "work",
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Put a made-up kernel of `ms` on the current stream."""
        self.operation(
            self.current_stream(),
            name,
            "kernel",
            reads=reads,
            writes=writes,
            cost_ns=round(ms * 1e6),
        )

    # --- the seam ---------------------------------------------------------------------------------

    def stream(self, name: str, *, priority: int = 0) -> FakeStream:
        with self.lock:
            if name not in self._streams:
                self._streams[name] = FakeStream(self, name, priority)
        stream = self._streams[name]
        self._require_priority(name, stream.priority, priority)
        return stream

    def current_stream(self) -> FakeStream:
        chosen: FakeStream | None = getattr(self._thread, "chosen", None)
        return chosen or autograd.stream_in_run(self) or self.default_stream

    def event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent(self, timing)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            tracked = self.checker.storage_of(tensor)
            if tracked is None and self.registered_memory and torch._C._has_storage(tensor):
                start = tensor.untyped_storage().data_ptr()
                if tensor.untyped_storage().nbytes() <= self.registered_memory.get(start, 0):
                    self.mark_pinned(tensor)
                    return True
        return tracked is not None and tracked.home == "pinned"

    def holds(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            if dispatches_itself(type(tensor)):
                # The first is its content; others may be lengths or scales.
                return any(map(self.holds, inner_tensors(tensor)[:1]))
            return self.checker.on_device(tensor)

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, FakeStream)
        with torch._C.DisableTorchFunction(), self.lock:
            tracked = self.checker.storage_of(tensor)
            if tracked is None or tracked.home != "device":
                raise DeviceError(f"record_stream: the tensor is not on {self}")
            tracked.recorded_streams.add(stream.state.number)

    def memory(self) -> MemoryFigures:
        used, peak = self.checker.device_bytes, self.checker.peak_device_bytes
        return MemoryFigures(self._memory_bytes, self._memory_bytes - used, used, used, peak, peak)

    def peak_memory(self) -> int:
        return self.checker.peak_device_bytes

    def reset_peak_memory(self) -> None:
        self.checker.peak_device_bytes = self.checker.device_bytes

    def limit_memory(self, nbytes: int | None) -> None:
        self.checker.limit_bytes = min(self._memory_bytes, nbytes or self._memory_bytes)

    def description(self) -> str:
        return "a fake device on CPU tensors"

    def _switch(self, stream: Stream) -> object:
        assert isinstance(stream, FakeStream)
        self.current_stream()  # in a backward node: begin the node before its hook switches
        return self.choose(stream)

    def switch_back(self, before: object) -> None:
        assert before is None or isinstance(before, FakeStream)
        self.choose(before)

    def require_own(self, what: str, device: Device) -> None:
        # Two fakes can have the same index, and their streams are still separate.
        if device is not self:
            other = ", another device of that number" if str(device) == str(self) else ""
            raise DeviceMismatchError(f"{what} of {device} was given to {self}{other}")

    def _synchronize(self, stream: Stream | None) -> None:
        assert stream is None or isinstance(stream, FakeStream)
        graphs.refuse(self, "device.synchronize()", stream)
        self.wait_while_hung()
        with self.lock:
            site, host = calling_site(), self.host().name
            for one in self.checker.streams if stream is None else [stream]:
                last = self.history.last_on(one.name)
                if last is not None:
                    self.history.add(host, "wait", "synchronize", site, last)
            name = "synchronize device" if stream is None else "synchronize"
            states = self.checker.streams if stream is None else [stream.state]
            views = [self.host().view(state) for state in states]
            for view in views:  # all before the first wait, from which the host learns
                view.refresh()
            for view in views:
                self.host_waits(dict(view.clock), view.time_ns, name)

    def graph_pool(self) -> object:
        pool = GraphPool(self)
        self.graph_pools.add(pool)
        return pool

    def _capture(
        self, work: Callable[[], Result], pool: object, stream: Stream
    ) -> tuple[Graph, Result]:
        assert isinstance(stream, FakeStream)
        return graphs.capture(self, work, pool, stream)

    def is_capturing(self) -> bool:
        return self.current_stream().tape is not None

    def watch(self) -> AbstractContextManager[list[Obstacle]]:
        return graphs.watch(self)

    def answering(self, query: CaptureQuery) -> AbstractContextManager[None]:
        return self.call.changed(capture_query=query)

    def _allocate_pinned(self, nbytes: int) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.mark_pinned(memory)
        return memory

    def wait_while_hung(self) -> None:
        """Block this thread while the device hangs."""
        if self.hang is not None:
            self.hang.wait()

    def stream_states(self) -> dict[str, bool]:
        with self.lock:
            streams = [self.default_stream, *self._streams.values()]
        return {stream.name: stream.query() for stream in streams}

    # --- for the modes and autograd ---------------------------------------------------------------

    def host_queries(self, clock: Clock, passes_ns: int) -> bool:
        """Query whether work is done. If so, this host is ordered after it, as by a wait."""
        host = self.host()
        host.time_ns += round(self.costs.query_us * _NS_PER_US)
        if passes_ns > host.time_ns or self.hang is not None:
            return False
        join(host.clock, clock)
        return True

    def host_waits(self, clock: Clock, until_ns: int, name: str) -> None:
        host = self.host()
        if until_ns > host.time_ns:
            self._span(host, name, "wait", host.time_ns, until_ns, calling_site())
            host.time_ns = until_ns
        join(host.clock, clock)

    def hidden_wait(self, stream: FakeStream, operation: str, *, orders: bool = True) -> None:
        """Let the host wait for a stream because of a call that does not look like a wait. With
        `orders=False` it loses the time but is not ordered after the stream's work."""
        if self.call.checking_values:
            return
        graphs.refuse(self, operation, stream)
        self.note_obstacle(partial(host_wait, operation=operation))
        if self.on_hidden_wait is not None:
            self.on_hidden_wait(operation)
        with self.lock:
            self.hidden_waits.append(HiddenWait(calling_site(), operation))
            if orders:
                self.note_wait(self.host().name, operation, self.history.last_on(stream.name))
            actor = stream.actor
            self.host_waits(dict(actor.clock) if orders else {}, actor.time_ns, operation)

    def note_wait(self, lane: str, call: str, after: int | None) -> None:
        """Remember that `lane`, a stream or host thread, waits for a moment of the history."""
        self.history.add(lane, "wait", call, calling_site(), after)

    def note_obstacle(self, describe: Callable[[Site], Obstacle]) -> None:
        """In a block of `watch`: add the obstacle that `describe` makes of the user's line."""
        if self.call.obstacles is not None:
            self.call.obstacles.append(describe(users_line()))

    def choose(self, stream: FakeStream | None) -> FakeStream | None:
        """Make `stream` this thread's current one; None: autograd's, or else the default stream.
        Returns the last choice."""
        before: FakeStream | None = getattr(self._thread, "chosen", None)
        self._thread.chosen = stream
        return before

    @contextmanager
    def autograd_runs(self) -> Iterator[None]:
        """While autograd's engine runs in this thread, let each node choose its stream."""
        before = self.choose(None)
        try:
            with self.user_callback():
                yield
        finally:
            self.choose(before)

    @contextmanager
    def user_callback(self) -> Iterator[None]:
        """Watch user code, such as a hook, that PyTorch runs in the middle of a call as if it ran
        outside of any call."""
        fresh = self.call.changed(
            named=None, inside=None, moving=None, storing_number=False, checking_values=False
        )
        with fresh:
            if self.watches_this_thread() and not FunctionMode.is_on(self):
                with self.function_mode(self):
                    yield
            else:
                yield

    def drawing(self) -> AbstractContextManager[None]:
        """Inside the block, PyTorch draws from the device's random generator."""
        return nullcontext()

    def mark_pinned(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction(), self.lock:
            self.checker.track(tensor, "pinned", self.host(), calling_site())

    def unregister_memory(self, address: int) -> None:
        """Take host memory that was pinned after its allocation as ordinary memory again."""
        with self.lock:
            if self.registered_memory.pop(address, None) is not None:
                self.checker.unpin(address)

    def made(self, tensor: torch.Tensor) -> None:
        """Notice that all operations that make a tensor are launched."""
        with torch._C.DisableTorchFunction(), self.lock:
            self.checker.made(tensor, self.host())

    def learn_of_making(self, tensors: Sequence[torch.Tensor]) -> None:
        """Order this thread after the making of tensors that it uses."""
        with torch._C.DisableTorchFunction(), self.lock:
            if len(self.checker.hosts) > 1:
                self.checker.learn_of_making(tensors, self.host())

    def shares(self, tensor: torch.Tensor) -> None:
        """Watch a tensor that was made of memory from elsewhere, if that memory is watched."""
        with torch._C.DisableTorchFunction(), self.lock:
            self.checker.alias(tensor)

    def resized(self, tensor: torch.Tensor) -> None:
        """Notice that a storage has changed its size in place."""
        site, frames = calling_site_and_frames()
        with torch._C.DisableTorchFunction(), self.lock:
            actor = self.current_stream().actor
            self.launch(actor)
            self.checker.resized(tensor, actor, site, frames)
            self.queued(actor)

    def operation(
        self,
        stream: FakeStream | None,
        name: str,
        kind: Kind,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        allocates: Sequence[torch.Tensor] = (),
        cost_ns: int | None = None,
    ) -> None:
        """Run one operation on a stream, or on this host thread if `stream` is None."""
        site, frames = calling_site_and_frames()
        forward_site = autograd.forward_site()
        launch = Launch(name, kind, reads, writes, cost_ns, site, forward_site, frames)
        with torch._C.DisableTorchFunction(), self.lock:
            if stream is None:
                self._run(self.host(), launch)
                return
            tape, actor = stream.tape, stream.actor
            self._pay_launch()
            if tape is None:
                self.launch(actor)
            pool = None if tape is None else tape.pool
            for tensor in allocates:
                self.checker.track(tensor, "device", actor, site, frames, pool=pool)
            if tape is None:
                self._run(actor, launch)
                self.queued(actor)
                for tensor in allocates:
                    self.checker.made(tensor, actor.host)
            else:  # a capture: nothing runs
                tape.allocated(allocates)
                tape.launched(stream, launch)

    def write_on(self, stream: FakeStream, what: str, memory: torch.Tensor) -> None:
        """Let a stream write memory that no tensor of the program has, at no cost."""
        with torch._C.DisableTorchFunction(), self.lock:
            launch = Launch(what, "kernel", (), (memory,), 0, users_line(), None)
            self.launch(stream.actor)
            self._run(stream.actor, launch)

    def replay(self, launches: Sequence[Launch], shared: Sequence[torch.Tensor]) -> None:
        """Put a graph's operations on the current stream, at the cost of one launch. `shared` is
        the memory that replays of other graphs write, too."""
        actor, site = self.current_stream().actor, users_line()
        with torch._C.DisableTorchFunction(), self.lock:
            self._pay_launch()
            self.launch(actor)
            self._run(actor, Launch("graph replay", "kernel", (), shared, 0, site, None))
            for launch in launches:
                self._run(actor, launch, replayed_at=site)
            self.queued(actor)

    def replays_freed(self, tensor: torch.Tensor, launch: Launch) -> None:
        """Report that a graph is replayed whose input was freed."""
        stream, site = self.current_stream(), users_line()
        captured = Access(launch.site, "capture", launch.name, writes=False)
        replayed = Access(site, stream.name, "graph replay", writes=False, captured_at=launch.site)
        with torch._C.DisableTorchFunction(), self.lock:
            self.checker.report_freed(tensor, captured, replayed)

    @contextmanager
    def _watch_work(self, trace: Trace) -> Iterator[None]:
        self.synchronize("trace")
        first, launches, from_ns = len(self._spans), self.launches, self.host().time_ns
        yield
        if self._keep_timeline:
            trace.set_spans(self._spans[first:], self.launches - launches, from_ns=from_ns)
        else:
            trace.give_up("the fake device was made with keep_timeline=False")

    def _pay_launch(self) -> None:
        self.launches += 1
        self.host().time_ns += round(self.costs.launch_us * _NS_PER_US)

    def _run(self, actor: Actor, launch: Launch, replayed_at: Site | None = None) -> None:
        """Check an operation for races and, on a stream, add its time."""
        cost_ns = launch.cost_ns
        if len(self.checker.hosts) > 1:
            self.checker.learn_of_making((*launch.reads, *launch.writes), actor.host)
            if isinstance(actor, StreamView):
                self.launch(actor)
        moment = None
        if launch.reads or launch.writes:  # an allocation alone puts nothing on the stream
            actor.advance()
            site = replayed_at or launch.site
            moment = self.history.add(actor.name, "operation", launch.name, site)
        for tensor, access in launch.accesses(actor.name, actor.is_host, replayed_at, moment):
            self.checker.touch(tensor, actor, access)
        self._picture_new_races()
        if actor.is_host:
            return
        if cost_ns is None:
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in launch.writes)
            cost_ns = self.costs.of(launch.name, launch.kind, nbytes)
        start_ns = max(actor.time_ns, self.host().time_ns)
        actor.time_ns = start_ns + cost_ns
        self._span(actor, launch.name, launch.kind, start_ns, actor.time_ns, launch.site)

    def _picture_new_races(self) -> None:
        """Keep what happened around a race as soon as it is found: the history forgets it."""
        for race in self.checker.races[len(self._pictures) :]:
            self._pictures.append(self.history.around(race))

    def _span(
        self, actor: Actor, name: str, kind: Kind, start_ns: int, end_ns: int, site: Site
    ) -> None:
        if self._keep_timeline and end_ns > start_ns:
            self._spans.append(Span(actor.name, name, kind, start_ns, end_ns, str(site)))

    def __str__(self) -> str:
        assert self.torch_device.index is not None
        return f"fake:{self.torch_device.index}"
