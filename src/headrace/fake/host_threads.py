"""Orders host threads as their program does, by `start`, `join`, locks, queues and deques.

While a fake device is in use, `Thread.start` and `join` and the locks behind Python's queues,
events, conditions and pools join the threads' clocks: a thread that takes a lock is ordered after
all that the last holder was ordered after. Queues, events and conditions that are older than the
block have locks that nobody watches, so their methods do it. New threads are watched like the one
that starts them.
"""

from __future__ import annotations

import _thread
import collections
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from headrace.device import Device, Ledger
from headrace.fake import patches
from headrace.fake.patches import Replacement
from headrace.races.checker import Checker, Clock, Host, StreamView, join

# Locks made by these packages hand nothing over between the user's threads.
_UNTRACED_CALLERS = ("headrace.device", "headrace.fake", "headrace.races", "logging", "torch")

untraced_rlock = _thread.RLock


_serials = itertools.count()


class Hosts(Device):
    """The part of a fake device that keeps an actor for each host thread."""

    def __init__(self, torch_device: torch.device, host_order: str) -> None:
        super().__init__(torch_device, Ledger(lambda: self.host().time_ns))
        self.lock = untraced_rlock()
        #: Tells this device from all others of the process.
        self.serial = next(_serials)
        self.checker = Checker(self.known_host, self.lock)
        self._host_order = host_order
        self._thread = threading.local()
        self._thread.host = self.checker.new_host("host")
        self._ended: list[Host] = []

    def host(self) -> Host:
        """The actor of this host thread."""
        host = self.known_host()
        if host is None:
            # Nobody saw this thread start: order it after all host threads.
            with self.lock:
                host = self.next_host(threading.current_thread().name, {})
                self.begin_thread(host, self.all_hosts())
        if self._host_order == "total" and len(self.checker.hosts) > 1:
            join(host.clock, self.all_hosts())
        return host

    def known_host(self) -> Host | None:
        """The actor of this host thread; None in a thread that is just starting."""
        host: Host | None = getattr(self._thread, "host", None)
        return host

    def next_host(self, thread_name: str, knows: Clock) -> Host:
        """An actor for a thread that starts after `knows`. It is that of a thread that had ended by
        then, if there is one: a program may start a thread at every step, and each actor makes all
        clocks longer."""
        with self.lock:
            for host in self._ended:
                if knows.get(host.number, 0) >= host.clock[host.number]:
                    self._ended.remove(host)
                    break
            else:
                host = self.checker.new_host("")
            host.name = f"host thread {thread_name!r}"
            return host

    def begin_thread(self, host: Host, knows: Clock, time_ns: int = 0) -> None:
        """Make `host` the actor of the calling thread, ordered after `knows`."""
        with self.lock:
            self._thread.host = host
            join(host.clock, knows)
            host.time_ns = time_ns

    def end_thread(self, host: Host) -> Clock:
        """Let a later thread go on as this one's actor. Returns what it knows at its end."""
        with self.lock:
            host.advance()
            self._ended.append(host)
            return dict(host.clock)

    def all_hosts(self) -> Clock:
        with self.lock:
            everyone: Clock = {}
            for host in self.checker.hosts:
                join(everyone, host.clock)
            return everyone

    def launch(self, view: StreamView) -> None:
        """Order a stream's next operation after what this host thread is ordered after."""
        view.refresh()
        join(view.clock, view.host.clock)

    def queued(self, view: StreamView) -> None:
        """Count that something is on the stream, for other threads that use it."""
        if len(self.checker.hosts) > 1:
            view.queued()


def _start(thread: threading.Thread) -> None:
    begin = []
    for device in patches.devices:
        parent = device.host()
        child = device.next_host(thread.name, parent.clock)
        begin.append((device, child, dict(parent.clock), parent.time_ns))
    run = thread.run

    def run_watched() -> None:
        for device, child, clock, time_ns in begin:
            device.begin_thread(child, clock, time_ns)
            device.enter_modes()
        try:
            run()
        finally:
            for device, *_ in reversed(begin):
                device.exit_modes()
            thread._headrace_ends = [  # type: ignore[attr-defined]
                (device, child.time_ns, device.end_thread(child)) for device, child, *_ in begin
            ]

    thread.run = run_watched  # type: ignore[method-assign]
    patches.originals["start"](thread)


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    patches.original(threading.Thread, "join")(thread, timeout)
    if not thread.is_alive():
        for device, time_ns, clock in getattr(thread, "_headrace_ends", []):
            if device in patches.devices:
                mine = device.host()
                join(mine.clock, clock)
                mine.time_ns = max(mine.time_ns, time_ns)


class _HandOver:
    """What the threads that publish here know, for those that learn here."""

    def __init__(self) -> None:
        # By the device's number: a hand-over may outlive a device, and its memory address.
        self._knowledge: dict[int, Clock] = {}

    def learn(self) -> None:
        for device in patches.devices:
            host = device.known_host()
            if host is not None:
                # A copy: another thread may be publishing.
                join(host.clock, dict(self._knowledge.get(device.serial, {})))

    def publish(self) -> None:
        for device in patches.devices:
            host = device.known_host()
            if host is not None:
                join(self._knowledge.setdefault(device.serial, {}), host.clock)


class _TracedLock:
    """A lock that orders its next holder after its last one."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        hand_over = _HandOver()
        self._learn, self._publish = hand_over.learn, hand_over.publish

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._lock.acquire(blocking, timeout))
        if taken:
            self._learn()
        return taken

    def release(self) -> None:
        self._publish()
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)  # what fork handlers ask of a lock


class _TracedRLock(_TracedLock):
    """A reentrant lock, with the three methods by which a condition releases and retakes it."""

    def _release_save(self) -> Any:
        self._publish()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._learn()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


class _Deque(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is _TracedDeque and _called_from_untraced():
            return _deque(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        if cls is _TracedDeque:
            return isinstance(value, _deque)  # also one from before the block
        return super().__instancecheck__(value)


_deque = collections.deque


class _TracedDeque(_deque, metaclass=_Deque):  # type: ignore[type-arg]
    """A deque that orders a thread that takes an item after the thread that put it there."""

    _hand_over: _HandOver

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, *args, **kwargs)
        made._hand_over = _HandOver()
        return made


def _putting(name: str) -> Any:
    method = getattr(_deque, name)

    def put(self: Any, *args: Any) -> Any:
        self._hand_over.publish()
        return method(self, *args)

    return put


def _taking(name: str) -> Any:
    method = getattr(_deque, name)

    def take(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        self._hand_over.learn()
        return result

    return take


_TracedDeque.__name__ = "deque"  # as it is printed
for _name in ("append", "appendleft", "extend", "extendleft", "insert", "__setitem__", "__iadd__"):
    setattr(_TracedDeque, _name, _putting(_name))
for _name in ("pop", "popleft", "__getitem__", "__iter__"):
    setattr(_TracedDeque, _name, _taking(_name))


# --- queues, events and conditions, also those from before the block ------------------------------

_hand_overs: weakref.WeakKeyDictionary[Any, _HandOver] = weakref.WeakKeyDictionary()


def _of(owner: Any) -> _HandOver:
    return _hand_overs.setdefault(owner, _HandOver())


def _publishes(kind: Any, name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _of(self).publish()
        return patches.original(kind, name)(self, *args, **kwargs)

    return call


def _learns(kind: Any, name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = patches.original(kind, name)(self, *args, **kwargs)
        if result:  # a wait that timed out has learned nothing
            _of(self).learn()
        return result

    return call


def _learns_always(kind: Any, name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = patches.original(kind, name)(self, *args, **kwargs)
        _of(self).learn()
        return result

    return call


_HANDING_OVER = (
    (threading.Event, "set", _publishes),
    (threading.Event, "is_set", _learns),
    (threading.Event, "wait", _learns),
    (threading.Condition, "notify", _publishes),
    (threading.Condition, "wait", _learns),
    (threading.Condition, "__enter__", _learns_always),
    (threading.Condition, "__exit__", _publishes),
    (queue.Queue, "put", _publishes),
    (queue.Queue, "get", _learns_always),
    (queue.Queue, "task_done", _publishes),
    (queue.Queue, "join", _learns_always),
)


def traced_lock() -> Any:
    """A lock that orders its holders, whichever module makes it."""
    return _TracedLock(_thread.allocate_lock())


def _lock() -> Any:
    lock = _thread.allocate_lock()
    return lock if _called_from_untraced() else _TracedLock(lock)


def _rlock() -> Any:
    lock = _thread.RLock()
    return lock if _called_from_untraced() else _TracedRLock(lock)


def _called_from_untraced() -> bool:
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return any(caller == name or caller.startswith(f"{name}.") for name in _UNTRACED_CALLERS)


def replacements() -> Iterator[Replacement]:
    yield Replacement(threading.Thread, "start", _start)
    yield Replacement(threading.Thread, "join", _join)
    yield Replacement(threading, "Lock", _lock)
    yield Replacement(threading, "RLock", _rlock)
    yield Replacement(collections, "deque", _TracedDeque)
    # The C queue has no lock to trace; the standard library's Python version has.
    yield Replacement(queue, "SimpleQueue", queue._PySimpleQueue)  # type: ignore[attr-defined]
    for kind, name, wrapper in _HANDING_OVER:
        yield Replacement(kind, name, wrapper(kind, name))
