"""Random stream programs, and a brute-force oracle that finds their races without vector clocks.

The oracle builds the graph of all events of a program: launches on host threads, operations on
streams, records, waits, hand-overs between threads, allocations and frees. It keeps for each event
the set of all events before it, and compares every pair of accesses byte by byte. It shares nothing
with the checker but the rules in docs/testing.md.
"""

from __future__ import annotations

import _thread
import collections
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headrace.fake import FakeDevice, patches
from headrace.fake.device import replacements

LENGTH, STREAMS, EVENTS, BUFFERS, MADE, WORKS, LOCKS = 24, 4, 3, 2, 4, 2, 2
Bytes = frozenset[int]
WHOLE: Bytes = frozenset(range(LENGTH))
#: The numbers in each index tensor, and the runs of elements that they name.
INDICES: tuple[tuple[tuple[int, ...], tuple[Bytes, ...]], ...] = (
    ((1, 5, 6, 20), (frozenset((1,)), frozenset((5, 6)), frozenset((20,)))),
    ((-1, 9, 2, 2, 10), (frozenset((2,)), frozenset((9, 10)), frozenset((23,)))),
)


# --- the oracle -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Memory:
    """One allocation. `stream` is the one it was allocated on; None for pinned memory."""

    line: int = 0
    stream: int | None = None
    #: The last kernel that its thread had put on that stream before, if any.
    earlier: int | None = None
    made: int | None = None
    recorded: set[int] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    #: Uses of freed memory that this may be a part of.
    previous: list[Access] = field(default_factory=list)
    #: How many collectives keep it, and whether nobody else does.
    kept: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Access:
    node: int
    line: int
    stream: int | None
    bytes: Bytes
    writes: bool
    #: All accesses to the same memory, until it is freed.
    among: list[Access] = field(repr=False)


@dataclass(frozen=True)
class Conflict:
    """Two unordered accesses. `first` is None if it is an allocation, `second` the access that
    shows the conflict, and `kind` how the checker names it."""

    kind: str
    lines: tuple[int, int]
    #: The stream that the memory was allocated on.
    owner: int | None
    first: Access | None
    second: Access


class Oracle:
    def __init__(self, threads: int) -> None:
        self.before: list[int] = []  # for each node: a bit for each node before it, and its own
        self.conflicts: list[Conflict] = []
        start = self._node([])
        self._hosts = [start] * threads
        self._streams: dict[int, list[tuple[int, int]]] = {}  # (node, its launch) in queue order
        self._kernels: dict[tuple[int, int], int] = {}
        self._records: dict[int, int] = {}
        self._released: dict[object, list[int]] = {}
        self._freed: dict[int, list[Access]] = {}
        #: The memory that each collective keeps.
        self._works: dict[int, Memory] = {}

    # Nodes.

    def _node(self, after: Iterable[int]) -> int:
        number = len(self.before)
        bits = 1 << number
        for node in after:
            bits |= self.before[node]
        self.before.append(bits)
        return number

    def reaches(self, one: int, other: int) -> bool:
        return bool(self.before[other] >> one & 1)

    def host(self, thread: int, *after: int) -> int:
        self._hosts[thread] = self._node((self._hosts[thread], *after))
        return self._hosts[thread]

    def _known(self, stream: int, launch: int) -> list[int]:
        """What is on a stream for sure when a host thread is at `launch`."""
        queue = self._streams.get(stream, [])
        return [node for node, launched in queue if self.reaches(launched, launch)]

    def queue(self, thread: int, stream: int, *after: int) -> int:
        launch = self.host(thread)
        node = self._node((launch, *self._known(stream, launch), *after))
        self._streams.setdefault(stream, []).append((node, launch))
        return node

    # What programs do.

    def kernel(
        self,
        thread: int,
        stream: int,
        line: int,
        reads: list[tuple[Memory, Bytes]],
        writes: list[tuple[Memory, Bytes]],
    ) -> int:
        self.learn_of_making(thread, [memory for memory, _ in (*reads, *writes)])
        node = self.queue(thread, stream)
        self._touch(node, line, stream, reads, writes)
        self._kernels[stream, thread] = node
        return node

    def host_access(
        self,
        thread: int,
        line: int,
        reads: list[tuple[Memory, Bytes]],
        writes: list[tuple[Memory, Bytes]],
    ) -> None:
        self.learn_of_making(thread, [memory for memory, _ in (*reads, *writes)])
        self._touch(self.host(thread), line, None, reads, writes)

    def record(self, thread: int, stream: int, event: int) -> None:
        self._records[event] = self.queue(thread, stream)

    def wait_event(self, thread: int, stream: int, event: int) -> None:
        self.queue(thread, stream, self._records[event])

    def wait_stream(self, thread: int, stream: int, other: int) -> None:
        self.queue(thread, stream, self.queue(thread, other))

    def host_waits(self, thread: int, event: int) -> None:
        self.host(thread, self._records[event])

    def synchronize(self, thread: int, streams: Iterable[int]) -> None:
        now = self.host(thread)
        self.host(thread, *(node for stream in streams for node in self._known(stream, now)))

    def release(self, thread: int, lock: object) -> None:
        self._released.setdefault(lock, []).append(self.host(thread))

    def acquire(self, thread: int, lock: object) -> None:
        self.host(thread, *self._released.get(lock, ()))

    def allocate(self, thread: int, stream: int, line: int, memory: Memory) -> None:
        launch = self.host(thread)
        memory.line, memory.stream = line, stream
        memory.earlier = self._kernels.get((stream, thread))
        memory.recorded, memory.accesses = set(), []
        queued = [launch, *self._known(stream, launch)]
        memory.previous = [
            use
            for use in self._freed.get(stream, [])
            if not any(self.reaches(use.node, node) for node in queued)
        ]

    def made(self, thread: int, memory: Memory) -> None:
        memory.made = self.host(thread)

    def drop(self, thread: int, memory: Memory) -> None:
        """The program's last reference goes. A collective may keep the memory."""
        memory.dropped = True
        if not memory.kept:
            self.free(thread, memory)

    def keep(self, thread: int, work: int, memory: Memory) -> None:
        """Let a collective keep its memory until `release`, or until its `Work` is replaced: then
        the memory is free when the collective is done."""
        memory.kept += 1
        replaced = self._works.get(work)
        if replaced is not None:
            replaced.recorded.add(COLLECTIVES)
            self.release_work(thread, work)
        self._works[work] = memory

    def release_work(self, thread: int, work: int) -> None:
        memory = self._works.pop(work, None)
        if memory is not None:
            memory.kept -= 1
            if memory.dropped and not memory.kept:
                self.free(thread, memory)

    def free(self, thread: int, memory: Memory) -> None:
        assert memory.stream is not None
        now = self.host(thread)
        safe = {memory.stream, *memory.recorded}
        over = [now, *(node for stream in safe for node in self._known(stream, now))]
        for use in memory.accesses:
            if use.stream in safe or any(self.reaches(use.node, node) for node in over):
                continue
            self._freed.setdefault(memory.stream, []).append(use)

    # Accesses.

    def learn_of_making(self, thread: int, memories: list[Memory]) -> None:
        for memory in memories:
            if memory.made is not None:
                self.host(thread, memory.made)

    def _touch(
        self,
        node: int,
        line: int,
        stream: int | None,
        reads: list[tuple[Memory, Bytes]],
        writes: list[tuple[Memory, Bytes]],
    ) -> None:
        for touched, does_write in ((reads, False), (writes, True)):
            for memory, part in touched:
                access = Access(node, line, stream, part, does_write, memory.accesses)
                self._compare(memory, access)
                memory.accesses.append(access)

    def _compare(self, memory: Memory, access: Access) -> None:
        for earlier in memory.accesses:
            if (
                (earlier.writes or access.writes)
                and earlier.bytes & access.bytes
                and not self.reaches(earlier.node, access.node)
            ):
                self._add("use", (earlier.line, access.line), memory, earlier, access)
        if (
            memory.earlier is not None
            and access.stream != memory.stream
            and not self.reaches(memory.earlier, access.node)
        ):
            self._add("allocation", (memory.line, access.line), memory, None, access)
        for use in memory.previous:
            if (
                (use.writes or access.writes)
                and use.stream != access.stream
                and not self.reaches(use.node, access.node)
            ):
                self._add("reuse", (use.line, memory.line), memory, use, access)

    def _add(
        self, kind: str, lines: tuple[int, int], memory: Memory, one: Access | None, two: Access
    ) -> None:
        self.conflicts.append(Conflict(kind, lines, memory.stream, one, two))

    # Comparison.

    def differences(self, reported: set[tuple[int, int]], owners: dict[int, int]) -> list[str]:
        """What is wrong with a checker's report. `owners` has the stream of each line."""
        found = [
            f"false alarm: lines {lines}"
            for lines in reported - {conflict.lines for conflict in self.conflicts}
        ]
        for conflict in self.conflicts:
            if conflict.lines not in reported and not self._follows(conflict, reported, owners):
                found.append(f"missed: {conflict.kind} of lines {conflict.lines}")
        return found

    def _follows(
        self, conflict: Conflict, reported: set[tuple[int, int]], owners: dict[int, int]
    ) -> bool:
        """Whether a conflict need not be reported because another one is.

        An access need not be kept once another one has taken its place: who is ordered after that
        one is ordered after both, or there is a conflict with it to report. And a use of freed
        memory is reported once for the stream that may get it.
        """
        first, second = conflict.first, conflict.second
        if conflict.kind == "reuse":
            assert first is not None
            if any(
                one == first.line and owners.get(other) == conflict.owner for one, other in reported
            ):
                return True
            if self._is_replaced(first, first.among, None):
                return True
        if conflict.kind == "use":
            return self._is_replaced(first, second.among, second)
        # Other uses of the new memory have taken the place of its allocation.
        return self._is_replaced(None, second.among, second) or (
            first is not None and self._is_read_again(first, second)
        )

    def _is_read_again(self, use: Access, before: Access) -> bool:
        """Whether a read of the new memory has taken the place of a read of the freed memory."""
        return not use.writes and any(
            other.bytes == WHOLE and self.reaches(use.node, other.node)
            for other in before.among
            if other.node < before.node
        )

    def _is_replaced(
        self, access: Access | None, among: list[Access], before: Access | None
    ) -> bool:
        """Whether another access has taken the place of one, or of the memory's allocation."""
        for other in among:
            if before is not None and other.node >= before.node:
                return False
            if access is None:
                if other.writes and other.bytes == WHOLE:
                    return True
                continue
            if other.node <= access.node or not access.bytes <= other.bytes:
                continue
            if other.writes or (not access.writes and self.reaches(access.node, other.node)):
                return True
        return False


# --- programs -------------------------------------------------------------------------------------

COLLECTIVES = STREAMS  # the number of the stream of collectives
Rule = Callable[[Oracle, int, int], object]


@dataclass
class Program:
    """Lines of Python, each run by one of the threads, in this order. The rule of each tells the
    oracle what the line does, given its number and thread."""

    threads: int
    lines: list[tuple[int, str, Rule]] = field(default_factory=list)
    #: The stream that each line, by number, works on.
    streams: dict[int, int] = field(default_factory=dict)
    #: What queries have answered when the program ran.
    answers: dict[int, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(
            f"{number:3d} thread {thread}: {code}"
            for number, (thread, code, _) in enumerate(self.lines, 1)
        )

    def differences(self) -> list[str]:
        """Run it, and compare the checker's report with the oracle's."""
        reported = run(self)
        oracle = Oracle(self.threads)
        for number, (thread, _, rule) in enumerate(self.lines, 1):
            rule(oracle, number, thread)
        self.is_racy = bool(oracle.conflicts)
        return oracle.differences(reported, self.streams)

    is_racy = False


def _is_one_piece(part: Bytes) -> bool:
    """Whether PyTorch copies between these bytes and the device without a copy on the host."""
    return max(part) - min(part) == len(part) - 1


class Writer:
    """Writes one random program."""

    WEIGHTS = (
        *(("in_place", 6), ("sum", 3), ("d2d", 2), ("d2h", 1), ("h2d", 1), ("blocking", 0.4)),
        *(("host_write", 1), ("host_read", 1), ("numpy", 0.6), ("item", 0.4), ("replay", 0.6)),
        *(("record", 4), ("wait_event", 4), ("wait_stream", 3), ("wait", 0.5), ("query", 0.5)),
        *(("synchronize", 0.5), ("synchronize_all", 0.2)),
        *(("empty", 2), ("zeros", 1), ("to_device", 1), ("to_host", 0.7), ("delete", 2.5)),
        *(("record_stream", 1.5), ("shrink", 0.6), ("grow", 1)),
        *(("index_put", 1), ("index", 1)),
    )
    COLLECTIVE_WEIGHTS = (("collective", 1.5), ("work_wait", 1.5))
    THREAD_WEIGHTS = (("lock", 2), ("append", 1), ("popleft", 1), ("set", 0.7), ("is_set", 0.7))

    def __init__(self, rng: random.Random, length: int, *, collectives: bool) -> None:
        self._rng = rng
        self.program = Program(rng.choice((1, 1, 2, 3)))
        self._buffers = [Memory() for _ in range(BUFFERS)]
        self._pinned, self._pool = Memory(), Memory()
        self._made: dict[int, Memory] = {}
        self._freed: dict[int, Memory] = {}  # made, but of size 0 now
        self._on_host: dict[int, Memory] = {}
        self._recorded: set[int] = set()
        self._works: dict[int, int] = {}  # the number of the event at its end
        self._appended = 0
        kinds = dict(self.WEIGHTS)
        if collectives:
            kinds.update(self.COLLECTIVE_WEIGHTS)
        if self.program.threads > 1:
            kinds.update(self.THREAD_WEIGHTS)
        names, weights = list(kinds), list(kinds.values())
        while len(self.program.lines) < length:
            (kind,) = rng.choices(names, weights)
            getattr(self, kind)()

    def _add(self, code: str, rule: Rule, stream: int | None = None) -> None:
        if stream is not None:
            code = f"with d.use(S[{stream}]): {code}"
            self.program.streams[len(self.program.lines) + 1] = stream
        self.program.lines.append((self._rng.randrange(self.program.threads), code, rule))

    def _stream(self) -> int:
        return self._rng.randrange(STREAMS)

    def _slice(self, size: int | None = None) -> tuple[str, Bytes]:
        while True:
            if self._rng.random() < 0.15:
                start, end, step = 0, LENGTH, 1
            else:
                start = self._rng.randrange(LENGTH - 1)
                end = self._rng.randrange(start + 1, LENGTH + 1)
                step = self._rng.choice((1, 1, 2, 3))
            part = frozenset(range(start, end, step))
            if size is None or len(part) == size:
                return f"[{start}:{end}:{step}]", part

    def _tensor(self) -> tuple[str, Memory]:
        """A device tensor: a buffer, its alias, or one that the program made."""
        if self._made and self._rng.random() < 0.5:
            key = self._rng.choice(sorted(self._made))
            return f"X[{key}]", self._made[key]
        buffer = self._rng.randrange(BUFFERS)
        return f"{self._rng.choice('BBBA')}[{buffer}]", self._buffers[buffer]

    def _kernel(
        self,
        code: str,
        stream: int,
        reads: list[tuple[Memory, Bytes]],
        writes: list[tuple[Memory, Bytes]],
        *,
        blocking: bool = False,
    ) -> None:
        def rule(oracle: Oracle, line: int, thread: int) -> None:
            node = oracle.kernel(thread, stream, line, reads, writes)
            if blocking:
                oracle.host(thread, node)

        self._add(code, rule, stream)

    # Kernels and copies.

    def in_place(self) -> None:
        (name, memory), (text, part) = self._tensor(), self._slice()
        call = self._rng.choice((".add_(1)", ".fill_(1)", ".mul_(2)"))
        self._kernel(f"{name}{text}{call}", self._stream(), [], [(memory, part)])

    def sum(self) -> None:
        text, part = self._slice()
        name, memory = self._tensor()
        self._read(f"{name}{text}.sum()", memory, [part])

    def index(self) -> None:
        (name, memory), number = self._tensor(), self._rng.randrange(len(INDICES))
        self._read(f"{name}[I[{number}]]", memory, INDICES[number][1])

    def index_put(self) -> None:
        (name, memory), number = self._tensor(), self._rng.randrange(len(INDICES))
        writes = [(memory, part) for part in INDICES[number][1]]
        self._kernel(f"{name}[I[{number}]] = V", self._stream(), [], writes)

    def _read(self, code: str, memory: Memory, parts: Sequence[Bytes]) -> None:
        """A kernel whose result is dropped at once."""
        stream = self._stream()

        def rule(oracle: Oracle, line: int, thread: int) -> None:
            result = Memory()
            oracle.learn_of_making(thread, [memory])
            oracle.allocate(thread, stream, line, result)
            reads = [(memory, part) for part in parts]
            oracle.kernel(thread, stream, line, reads, [(result, WHOLE)])
            oracle.free(thread, result)

        self._add(code, rule, stream)

    def d2d(self) -> None:
        (name, memory), (text, part) = self._tensor(), self._slice()
        other_name, other = self._tensor()
        if other is not memory:
            other_text, other_part = self._slice(len(part))
            code = f"{name}{text}.copy_({other_name}{other_text})"
            self._kernel(code, self._stream(), [(other, other_part)], [(memory, part)])

    def d2h(self, blocking: bool = False) -> None:
        (name, memory), (text, part) = self._tensor(), self._slice()
        code = f"P{text}.copy_({name}{text}, non_blocking={not blocking})"
        device, pinned, stream = [(memory, part)], [(self._pinned, part)], self._stream()

        def by_host(oracle: Oracle, line: int, thread: int) -> None:
            oracle.host(thread, oracle.kernel(thread, stream, line, device, []))
            oracle.host_access(thread, line, [], pinned)

        if _is_one_piece(part):
            self._kernel(code, stream, device, pinned, blocking=blocking)
        else:
            self._add(code, by_host, stream)

    def h2d(self, blocking: bool = False) -> None:
        (name, memory), (text, part) = self._tensor(), self._slice()
        code = f"{name}{text}.copy_(P{text}, non_blocking={not blocking})"
        device, pinned, stream = [(memory, part)], [(self._pinned, part)], self._stream()

        def by_host(oracle: Oracle, line: int, thread: int) -> None:
            oracle.host_access(thread, line, pinned, [])
            node = oracle.kernel(thread, stream, line, [], device)
            if blocking:
                oracle.host(thread, node)

        if _is_one_piece(part):
            self._kernel(code, stream, pinned, device, blocking=blocking)
        else:
            self._add(code, by_host, stream)

    def blocking(self) -> None:
        self._rng.choice((self.d2h, self.h2d))(blocking=True)

    def item(self) -> None:
        (name, memory), index = self._tensor(), self._rng.randrange(LENGTH)
        read = [(memory, frozenset((index,)))]
        self._kernel(f"{name}[{index}].item()", self._stream(), read, [], blocking=True)

    def replay(self) -> None:
        pool, (one, two) = (self._pool, WHOLE), self._buffers
        if self._rng.random() < 0.5:
            writes = [pool, (one, frozenset(range(2, 10))), (one, frozenset(range(6)))]
            self._kernel("G[0].replay()", self._stream(), [], writes)
        else:
            reads = [(one, frozenset(range(8, 16)))]
            writes = [pool, (two, frozenset(range(8)))]
            self._kernel("G[1].replay()", self._stream(), reads, writes)

    # The host.

    def _host(self, code: str, memory: Memory, part: Bytes, *, writes: bool) -> None:
        access = [(memory, part)]
        reads_and_writes = ([], access) if writes else (access, [])
        self._add(code, lambda o, line, t: o.host_access(t, line, *reads_and_writes))

    def host_write(self) -> None:
        text, part = self._slice()
        self._host(f"P{text}.fill_(2)", self._pinned, part, writes=True)

    def host_read(self) -> None:
        text, part = self._slice()
        if self._on_host and self._rng.random() < 0.5:
            key = self._rng.choice(sorted(self._on_host))
            self._host(f"H[{key}]{text}.tolist()", self._on_host[key], part, writes=False)
        else:
            self._host(f"P{text}.sum()", self._pinned, part, writes=False)

    def numpy(self) -> None:
        text, part = self._slice()
        if self._rng.random() < 0.5:
            self._host(f"N{text} = 3", self._pinned, part, writes=True)
        else:
            self._host(f"N{text}.sum()", self._pinned, part, writes=False)

    # Events and waits.

    def record(self) -> None:
        event, stream = self._rng.randrange(EVENTS), self._stream()
        self._recorded.add(event)
        self._add(f"E[{event}].record(S[{stream}])", lambda o, _, t: o.record(t, stream, event))

    def wait_event(self) -> None:
        if self._recorded:
            event, stream = self._rng.choice(sorted(self._recorded)), self._stream()
            code = f"S[{stream}].wait_event(E[{event}])"
            self._add(code, lambda o, _, t: o.wait_event(t, stream, event))

    def wait_stream(self) -> None:
        stream, other = self._stream(), self._stream()
        code = f"S[{stream}].wait_stream(S[{other}])"
        self._add(code, lambda o, _, t: o.wait_stream(t, stream, other))

    def wait(self) -> None:
        if self._recorded:
            event = self._rng.choice(sorted(self._recorded))
            self._add(f"d.wait(E[{event}], 'test')", lambda o, _, t: o.host_waits(t, event))

    def query(self) -> None:
        if not self._recorded:
            return
        event = self._rng.choice(sorted(self._recorded))
        answers, number = self.program.answers, len(self.program.lines)

        def rule(oracle: Oracle, line: int, thread: int) -> None:
            if answers[number]:
                oracle.host_waits(thread, event)

        self._add(f"answers[{number}] = E[{event}].query()", rule)

    def synchronize(self) -> None:
        stream = self._stream()
        code = f"d.synchronize('test', S[{stream}])"
        self._add(code, lambda o, _, t: o.synchronize(t, [stream]))

    def synchronize_all(self) -> None:
        streams = range(COLLECTIVES + 1)
        self._add("d.synchronize('test')", lambda o, _, t: o.synchronize(t, streams))

    # Memory.

    def _make(self, code: str, reads: Bytes | None, *, writes: bool) -> None:
        key, stream, memory = self._rng.randrange(MADE), self._stream(), Memory()
        if key in self._made or key in self._freed:
            self._delete(key)
        self._made[key] = memory

        def rule(oracle: Oracle, line: int, thread: int) -> None:
            oracle.allocate(thread, stream, line, memory)
            if writes:
                read = [(self._pinned, reads)] if reads else []
                oracle.kernel(thread, stream, line, read, [(memory, WHOLE)])
            oracle.made(thread, memory)

        self._add(f"X[{key}] = {code}", rule, stream)

    def empty(self) -> None:
        self._make(f"torch.empty({LENGTH}, device=D)", None, writes=False)

    def zeros(self) -> None:
        self._make(f"torch.zeros({LENGTH}, device=D)", None, writes=True)

    def to_device(self) -> None:
        self._make("P.to(D, non_blocking=True)", WHOLE, writes=True)

    def to_host(self) -> None:
        (name, memory), stream, key = self._tensor(), self._stream(), self._rng.randrange(MADE)
        copy = self._on_host[key] = Memory()

        def rule(oracle: Oracle, line: int, thread: int) -> None:
            oracle.kernel(thread, stream, line, [(memory, WHOLE)], [(copy, WHOLE)])
            oracle.made(thread, copy)

        self._add(f"H[{key}] = {name}.to('cpu', non_blocking=True)", rule, stream)

    def delete(self) -> None:
        if self._made or self._freed:
            self._delete(self._rng.choice(sorted({*self._made, *self._freed})))

    def _delete(self, key: int) -> None:
        memory = self._made.pop(key, None)
        self._freed.pop(key, None)
        self._add(f"del X[{key}]", lambda o, _, t: None if memory is None else o.drop(t, memory))

    def record_stream(self) -> None:
        if self._made:
            key, stream = self._rng.choice(sorted(self._made)), self._stream()
            memory = self._made[key]
            code = f"d.record_stream(X[{key}], S[{stream}])"
            self._add(code, lambda o, _, t: memory.recorded.add(stream))

    def shrink(self) -> None:
        if self._made:
            key = self._rng.choice(sorted(self._made))
            memory = self._freed[key] = self._made.pop(key)
            code = f"X[{key}].untyped_storage().resize_(0)"
            self._add(code, lambda o, _, t: o.free(t, memory), self._stream())

    def grow(self) -> None:
        if self._freed:
            key, stream = self._rng.choice(sorted(self._freed)), self._stream()
            memory = self._made[key] = self._freed.pop(key)
            code = f"X[{key}].untyped_storage().resize_({4 * LENGTH})"
            self._add(code, lambda o, line, t: o.allocate(t, stream, line, memory), stream)

    # Collectives. Their events have numbers after those of the program.

    def collective(self) -> None:
        (name, memory), stream, key = self._tensor(), self._stream(), self._rng.randrange(WORKS)
        start = self._rng.randrange(LENGTH - 1)
        end = self._rng.randrange(start + 1, LENGTH + 1)
        part, event = frozenset(range(start, end)), EVENTS + len(self.program.lines)
        self._works[key] = event

        def rule(oracle: Oracle, line: int, thread: int) -> None:
            oracle.learn_of_making(thread, [memory])
            oracle.wait_stream(thread, COLLECTIVES, stream)
            oracle.kernel(thread, COLLECTIVES, line, [], [(memory, part)])
            oracle.record(thread, COLLECTIVES, event)
            oracle.keep(thread, key, memory)

        code = f"W[{key}] = all_reduce({name}[{start}:{end}], async_op=True)"
        self._add(code, rule, stream)
        self.program.streams[len(self.program.lines)] = COLLECTIVES

    def work_wait(self) -> None:
        if self._works:
            key, stream = self._rng.choice(sorted(self._works)), self._stream()
            event = self._works[key]

            def rule(oracle: Oracle, line: int, thread: int) -> None:
                oracle.wait_event(thread, stream, event)
                oracle.release_work(thread, key)

            self._add(f"W[{key}].wait()", rule, stream)

    # Threads.

    def lock(self) -> None:
        number = self._rng.randrange(LOCKS)
        code = self._rng.choice((f"with L[{number}]: pass", f"Q[{number}].put(0)"))

        def rule(oracle: Oracle, line: int, thread: int) -> None:
            oracle.acquire(thread, code)
            oracle.release(thread, code)

        self._add(code, rule)

    def append(self) -> None:
        self._appended += 1
        self._add("items.append(0)", lambda o, _, t: o.release(t, "items"))

    def popleft(self) -> None:
        if self._appended:
            self._appended -= 1
            self._add("items.popleft()", lambda o, _, t: o.acquire(t, "items"))

    def set(self) -> None:
        def rule(oracle: Oracle, line: int, thread: int) -> None:
            oracle.acquire(thread, "flag")
            oracle.release(thread, "flag")

        self._add("flag.set()", rule)

    def is_set(self) -> None:
        self._add("flag.is_set()", lambda o, _, t: o.acquire(t, "flag"))


# --- running --------------------------------------------------------------------------------------


def run(program: Program) -> set[tuple[int, int]]:
    """The lines of all races that the checker reports."""
    with FakeDevice(check=False, keep_timeline=False) as device:
        names = _names(device, program)
        _run_lines(program, names)
        names.clear()
    return {(race.first.site.line, race.second.site.line) for race in device.checker.races}


def _names(device: FakeDevice, program: Program) -> dict[str, Any]:
    streams = [device.default_stream, *(device.stream(f"s{n}") for n in range(1, STREAMS))]
    place = device.torch_device
    buffers = [torch.zeros(LENGTH, device=place) for _ in range(BUFFERS)]
    pinned = torch.zeros(LENGTH).pin_memory()
    indices = [torch.tensor(numbers, device=place) for numbers, _ in INDICES]
    value = torch.ones(1, device=place)
    replays = any("replay" in code for _, code, _ in program.lines)
    graphs = _graphs(device, *buffers) if replays else []  # they take longer than a program
    for stream in streams:
        stream.wait_stream(device.default_stream)
    device.synchronize("start")
    return {
        "d": device,
        "D": place,
        "S": streams,
        "B": buffers,
        "P": pinned,
        "G": graphs,
        "I": indices,
        "V": value,
        "A": [torch.from_dlpack(buffer) for buffer in buffers],
        "N": pinned.numpy(),
        "E": [device.event() for _ in range(EVENTS)],
        "X": {},
        "H": {},
        "W": {},
        "L": [threading.Lock() for _ in range(LOCKS)],
        "flag": threading.Event(),
        "Q": [queue.Queue() for _ in range(LOCKS)],
        "items": collections.deque(),
        "torch": torch,
        "answers": program.answers,
        "all_reduce": dist.all_reduce,
    }


def _graphs(device: FakeDevice, one: torch.Tensor, two: torch.Tensor) -> list[Any]:
    """The graphs that `Writer.replay` describes."""

    def first() -> None:
        one[2:10].add_(1)
        one[0:6].fill_(2)

    pool = device.graph_pool()
    return [device.capture(work, pool)[0] for work in (first, lambda: two[0:8].copy_(one[8:16]))]


def _run_lines(program: Program, names: dict[str, Any]) -> None:
    codes = [
        compile("\n" * number + code, "program", "exec")
        for number, (_, code, _) in enumerate(program.lines)
    ]
    if program.threads == 1:
        for code in codes:
            exec(code, names)
        return
    turns = [_thread.allocate_lock() for _ in range(program.threads)]  # the checker sees none
    done = _thread.allocate_lock()
    todo: list[Any] = []
    problems: list[BaseException] = []
    for lock in (*turns, done):
        lock.acquire()

    def work(turn: Any) -> None:
        while True:
            turn.acquire()
            if not todo:
                break
            try:
                exec(todo.pop(), names)
            except BaseException as problem:  # reported by the thread that runs the program
                problems.append(problem)
            done.release()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in turns[1:]]
    for thread in threads:
        thread.start()
    for code, (thread_number, _, _) in zip(codes, program.lines, strict=True):
        if thread_number == 0:
            exec(code, names)
        else:
            todo.append(code)
            turns[thread_number].release()
            done.acquire()
    for turn, thread in zip(turns[1:], threads, strict=True):
        turn.release()
        thread.join()
    if problems:
        raise problems[0]


class _Anchor(FakeDevice):
    """Keeps PyTorch patched, and watches nothing."""

    def enter_modes(self) -> None:
        return

    def exit_modes(self) -> None:
        return


@contextmanager
def patched_once() -> Iterator[None]:
    """Run many programs in the block: to patch PyTorch takes longer than one of them."""
    anchor = _Anchor(index=2)
    patches.install(anchor, replacements())
    try:
        yield
    finally:
        patches.remove(anchor)


def random_program(seed: int, *, collectives: bool) -> Program:
    rng = random.Random(seed)
    return Writer(rng, rng.randrange(4, 32), collectives=collectives).program
