"""Where segments begin, and what the device's work on them takes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.device import open_device
from headrace.device.cpu import CpuDevice
from headrace.diagnosis.segments import (
    COMMUNICATION,
    WAIT,
    DeviceEdges,
    HostEdges,
)

US = 1000


class Clocked(CpuDevice):
    """A device that does what it is given in turn, each at once if it is idle, by a host's clock
    that the test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = self.free_ns = 0

    def run(self, ns: int) -> None:
        self.free_ns = max(self.free_ns, self.now_ns) + ns

    def delay(self, ns: int) -> bool:
        self.run(ns)
        return True

    def event(self, *, timing: bool = False) -> Any:
        return _Moment(self)


class _Moment:
    def __init__(self, device: Clocked) -> None:
        self._device = device
        self.at_ns = 0

    def record(self) -> None:
        self._device.run(0)
        self.at_ns = self._device.free_ns

    def query(self) -> bool:
        return self.at_ns <= self._device.now_ns

    def elapsed_ms(self, end: _Moment) -> float:
        return (end.at_ns - self.at_ns) / 1e6


def launched(device: Clocked, kernels: int, kernel: int, host: int) -> None:
    for _ in range(kernels):
        device.now_ns += host
        device.run(kernel)


def test_the_work_is_timed_without_the_gaps_between_launches() -> None:
    device = Clocked()
    edges = DeviceEdges(device, {("forward", 0): 300 * US}, {})
    for _ in range(2):
        edges.edge("forward")
        launched(device, 20, kernel=3 * US, host=10 * US)  # the device would be idle for 7 of 10
        edges.end_step()
        launched(device, 1, kernel=50 * US, host=10 * US)
    found = edges.work_ns()
    assert found["forward", 0] == pytest.approx(60 * US)
    assert found["step", 0] == pytest.approx(50 * US)  # the last one has not ended
    assert edges.late_share() == 0


def test_a_segment_that_was_launched_late_does_not_count_if_others_were_not() -> None:
    device = Clocked()
    edges = DeviceEdges(device, {("forward", 0): 100 * US}, {})
    for host in (10 * US, 2 * US):
        edges.edge("forward")
        launched(device, 20, kernel=3 * US, host=host)
        edges.end_step()
    assert edges.work_ns()["forward", 0] == pytest.approx(60 * US)
    assert edges.late_share() == pytest.approx(103 / 163)


def test_after_a_wait_the_device_is_kept_busy_anew() -> None:
    device = Clocked()
    edges = DeviceEdges(device, {}, {})
    edges.edge("forward")
    launched(device, 3, kernel=5 * US, host=US)
    edges.pause()
    device.now_ns = device.free_ns  # the host waits
    edges.resume()
    launched(device, 4, kernel=5 * US, host=20 * US)
    edges.edge("backward")
    edges.edge("after backward")
    found = edges.work_ns()
    assert found["forward", 0] == pytest.approx(15 * US)
    assert found[WAIT, 0] == pytest.approx(20 * US)
    assert found["backward", 0] == 0


def test_what_another_thread_does_begins_no_segment() -> None:
    edges = HostEdges(open_device("cpu"))
    thread = threading.Thread(target=lambda: edges.edge("forward"))
    thread.start()
    thread.join()
    assert edges.edges == []


def test_what_the_host_does_after_a_wait_is_no_work() -> None:
    """The end of such a segment is noted when the host has gone on."""
    device = Clocked()
    edges = DeviceEdges(device, {}, {("forward", 0): 30 * US})
    for _ in range(2):
        edges.edge("forward")
        launched(device, 3, kernel=5 * US, host=20 * US)
        device.now_ns = device.free_ns + 30 * US  # until the host goes on
        edges.waited()
        launched(device, 4, kernel=5 * US, host=20 * US)
        edges.end_step()
    found = edges.work_ns()
    assert found["forward", 0] == pytest.approx(15 * US)
    assert found[WAIT, 0] == pytest.approx(20 * US)
    assert edges.late_share() == 0


def test_communication_is_timed_where_nothing_delays_it() -> None:
    device = Clocked()
    noted = HostEdges(device)
    for reduces in (40 * US, 60 * US):
        noted.edge("backward")
        launched(device, 1, kernel=5 * US, host=US)
        noted.edge(COMMUNICATION)
        device.run(reduces)
        noted.edge("after communication")
        noted.end_step()
    assert noted.communication_ns() == {(COMMUNICATION, 0): pytest.approx(50 * US)}
    edges = DeviceEdges(device, {}, {})
    edges.edge("backward")
    edges.edge(COMMUNICATION)
    device.run(40 * US)
    edges.edge("after communication")
    edges.end_step()
    assert COMMUNICATION not in {kind for kind, _ in edges.work_ns()}


def test_autograds_thread_may_begin_a_segment_while_the_other_waits() -> None:
    edges = HostEdges(open_device("cpu"))
    thread = threading.Thread(target=lambda: edges.edge(COMMUNICATION, from_autograd=True))
    thread.start()
    thread.join()
    assert [edge.key for edge in edges.edges] == [(COMMUNICATION, 0)]
