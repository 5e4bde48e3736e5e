"""The part of a fake device that keeps an actor for each host thread."""

from __future__ import annotations

import _thread
import itertools
import threading

import torch

from headrace.device import Device, Ledger
from headrace.fake import patches
from headrace.races.actors import Clock, Host, StreamView, join
from headrace.races.checker import Checker

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


class HandOver:
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
