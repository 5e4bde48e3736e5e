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
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from headrace.fake import patches
from headrace.fake.hosts import HandOver
from headrace.fake.patches import Replacement
from headrace.races.actors import join

# Locks made by these packages hand nothing over between the user's threads.
_UNTRACED_CALLERS = ("headrace.device", "headrace.fake", "headrace.races", "logging", "torch")


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


class _TracedLock:
    """A lock that orders its next holder after its last one."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        hand_over = HandOver()
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

    _hand_over: HandOver

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, *args, **kwargs)
        made._hand_over = HandOver()
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

_hand_overs: weakref.WeakKeyDictionary[Any, HandOver] = weakref.WeakKeyDictionary()


def _of(owner: Any) -> HandOver:
    return _hand_overs.setdefault(owner, HandOver())


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
