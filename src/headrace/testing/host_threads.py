"""Orders host threads as their program does, by `start`, `join`, locks and queues.

While a fake device is in use, `Thread.start` and `join` and the locks behind Python's queues,
events, conditions and pools join the threads' clocks: a thread that takes a lock is ordered after
all that the last holder was ordered after. New threads are watched like the one that starts them.
"""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from typing import Any

import torch

from headrace.device import Device, Ledger
from headrace.testing import patches
from headrace.testing.checker import Actor, Checker, Clock, join

# Locks made by these packages hand nothing over between the user's threads.
_UNTRACED_CALLERS = ("headrace.device", "headrace.testing", "logging", "torch")

untraced_rlock = _thread.RLock


class Hosts(Device):
    """The part of a fake device that keeps an actor for each host thread."""

    def __init__(self, torch_device: torch.device, host_order: str) -> None:
        super().__init__(torch_device, Ledger(lambda: self.host().time_ns))
        self.checker = Checker(self.known_host)
        self.lock = untraced_rlock()
        self._host_order = host_order
        self._thread = threading.local()
        self._thread.host = self.checker.new_actor("host", is_host=True)

    def host(self) -> Actor:
        """The actor of this host thread."""
        host = self.known_host()
        if host is None:
            # Nobody saw this thread start: order it after all host threads.
            name = threading.current_thread().name
            host = self.adopt_thread(f"host thread {name!r}", self.all_hosts())
        if self._host_order == "total":
            join(host.clock, self.all_hosts())
        return host

    def known_host(self) -> Actor | None:
        """The actor of this host thread; None in a thread that is just starting."""
        host: Actor | None = getattr(self._thread, "host", None)
        return host

    def adopt_thread(self, name: str, knows: Clock, time_ns: int = 0) -> Actor:
        """Make an actor for the calling thread, ordered after `knows`."""
        with self.lock:
            host: Actor
            host = self._thread.host = self.checker.new_actor(name, is_host=True)
            join(host.clock, knows)
            host.time_ns = time_ns
        return host

    def all_hosts(self) -> Clock:
        with self.lock:
            everyone: Clock = {}
            for actor in self.checker.actors():
                if actor.is_host:
                    join(everyone, actor.clock)
            return everyone

    def launch(self, actor: Actor) -> None:
        """Order a stream's next operation after what this host thread is ordered after."""
        join(actor.clock, self.host().clock)


def _start(thread: threading.Thread) -> None:
    begin = [
        (device, dict(device.host().clock), device.host().time_ns) for device in patches.devices
    ]
    run = thread.run

    def run_watched() -> None:
        hosts = []
        for device, clock, time_ns in begin:
            hosts.append(device.adopt_thread(f"host thread {thread.name!r}", clock, time_ns))
            device.enter_modes()
        try:
            run()
        finally:
            for device, _, _ in reversed(begin):
                device.exit_modes()
            thread._headrace_hosts = hosts  # type: ignore[attr-defined]

    thread.run = run_watched  # type: ignore[method-assign]
    patches.originals["start"](thread)


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    patches.originals["join"](thread, timeout)
    if not thread.is_alive():
        ended = getattr(thread, "_headrace_hosts", [])
        for device in patches.devices:
            for host in ended:
                if host in device.checker.actors():
                    mine = device.host()
                    join(mine.clock, host.clock)
                    mine.time_ns = max(mine.time_ns, host.time_ns)


class _TracedLock:
    """A lock that orders its next holder after its last one."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._knowledge: dict[int, Clock] = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._lock.acquire(blocking, timeout))
        if taken:
            self._learn()
        return taken

    def release(self) -> None:
        self._publish()
        self._lock.release()

    def _learn(self) -> None:
        for device in patches.devices:
            host = device.known_host()
            if host is not None:
                join(host.clock, self._knowledge.get(id(device), {}))

    def _publish(self) -> None:
        for device in patches.devices:
            host = device.known_host()
            if host is not None:
                join(self._knowledge.setdefault(id(device), {}), host.clock)

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


patches.patch(threading.Thread, "start", _start)
patches.patch(threading.Thread, "join", _join)
patches.patch(threading, "Lock", _lock)
patches.patch(threading, "RLock", _rlock)
# The C queue has no lock to trace; the standard library's Python version has.
patches.patch(queue, "SimpleQueue", queue._PySimpleQueue)  # type: ignore[attr-defined]
