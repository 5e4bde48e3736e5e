"""Host threads as the checker sees them: who handed what to whom.

While a fake device is in use, `Thread.start` and `join`, and the locks that Python's queues,
events, conditions and pools are built on, carry knowledge from thread to thread: what a thread
knew when it released a lock is known to the next one that takes it. Threads that are started are
followed like the one that starts them.
"""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any

from headrace.testing.checker import Clock, join

if TYPE_CHECKING:
    from headrace.testing.fake import FakeDevice

_devices: list[FakeDevice] = []
_originals: dict[str, Any] = {}
# Locks made by these are no hand-over between the user's threads.
_UNTRACED_CALLERS = ("headrace.ledger", "headrace.device", "headrace.testing", "logging", "torch")

untraced_rlock = _thread.RLock


def follow(device: FakeDevice) -> None:
    """Begin to trace threads and locks for `device`."""
    if not _devices:
        for owner, name, traced in _TRACED:
            _originals[name] = getattr(owner, name)
            setattr(owner, name, traced)
    _devices.append(device)


def unfollow(device: FakeDevice) -> None:
    """Stop tracing for `device`; after the last one, everything is as it was."""
    _devices.remove(device)
    if not _devices:
        for owner, name, _ in _TRACED:
            setattr(owner, name, _originals.pop(name))


def _start(thread: threading.Thread) -> None:
    followed = [(device, dict(device.host().clock), device.host().time_ns) for device in _devices]
    run = thread.run

    def run_followed() -> None:
        hosts = []
        for device, clock, time_ns in followed:
            hosts.append(device.adopt_thread(f"host thread {thread.name!r}", clock, time_ns))
            device.enter_modes()
        try:
            run()
        finally:
            for device, _, _ in reversed(followed):
                device.exit_modes()
            thread._headrace_hosts = hosts  # type: ignore[attr-defined]

    thread.run = run_followed  # type: ignore[method-assign]
    _originals["start"](thread)


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    _originals["join"](thread, timeout)
    if not thread.is_alive():
        ended = getattr(thread, "_headrace_hosts", [])
        for device in _devices:
            for host in ended:
                if host in device.checker.actors():
                    mine = device.host()
                    join(mine.clock, host.clock)
                    mine.time_ns = max(mine.time_ns, host.time_ns)


class _TracedLock:
    """A lock that hands its last holder's knowledge to its next one."""

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
        for device in _devices:
            host = device.known_host()
            if host is not None:
                join(host.clock, self._knowledge.get(id(device), {}))

    def _publish(self) -> None:
        for device in _devices:
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
    """With the three methods by which a condition lets go of a reentrant lock and takes it back."""

    def _release_save(self) -> Any:
        self._publish()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._learn()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


def _lock() -> Any:
    lock = _thread.allocate_lock()
    return lock if _called_from_untraced() else _TracedLock(lock)


def _rlock() -> Any:
    lock = _thread.RLock()
    return lock if _called_from_untraced() else _TracedRLock(lock)


def _called_from_untraced() -> bool:
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith(_UNTRACED_CALLERS)


_TRACED: list[tuple[Any, str, Any]] = [
    (threading.Thread, "start", _start),
    (threading.Thread, "join", _join),
    (threading, "Lock", _lock),
    (threading, "RLock", _rlock),
    # The C queue has no lock to trace; the standard library's own Python twin has.
    (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
]
