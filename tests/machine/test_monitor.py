"""The monitor: exact figures from counters that are given, and a thread that ends when told to."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import Device, SensorReading, Sensors, open_device
from headrace.errors import DeviceError
from headrace.machine import Monitor, UseSample
from headrace.machine.host_counters import HostCounterReader, HostCounters


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Gpu(Sensors):
    """Says what it is told to say."""

    def __init__(self, *readings: SensorReading) -> None:
        self.readings = list(readings)
        self.closed = False

    def read(self) -> SensorReading:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def close(self) -> None:
        self.closed = True


class Host:
    """Counters of a host on which one second of time uses so many of CPU time."""

    def __init__(self, clock: Clock, process: float, workers: float, cores: int = 4) -> None:
        self.clock, self.process, self.workers, self.cores = clock, process, workers, cores

    def __call__(self) -> HostCounters:
        now_s = self.clock()
        return HostCounters(
            process_s=self.process * now_s,
            workers_s=self.workers * now_s,
            machine_busy_s=(self.process + self.workers) * now_s,
            machine_s=self.cores * now_s,
            memory_bytes=8 << 30,
            process_memory_bytes=1 << 30,
        )


def ticking(clock: Clock, *readings: SensorReading, **options: Any) -> Monitor:
    """A monitor whose samples are taken by hand: its thread sleeps for ever."""
    monitor = Monitor(
        open_device("cpu"),
        1e6,
        host=Host(clock, process=1.0, workers=0.5),
        sensors=Gpu(*(readings or (SensorReading(),))),
        clock=clock,
        **options,
    )
    monitor.start()
    return monitor


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_shares_are_of_the_time_since_the_sample_before(clock: Clock) -> None:
    monitor = ticking(clock, SensorReading(0.5, 7 << 30, 300.0, 1980, 55))
    clock.now_s += 0.25
    found = monitor.sample()
    monitor.stop()
    assert found == UseSample(
        at_s=0.25,
        gpu_share=0.5,
        gpu_memory_bytes=7 << 30,
        power_w=300.0,
        sm_clock_mhz=1980,
        temperature_c=55,
        cpu_share=1.0,
        workers_cpu_share=0.5,
        machine_cpu_share=0.375,
        host_memory_bytes=8 << 30,
        process_memory_bytes=1 << 30,
    )
    first = monitor.samples()[0]
    assert (first.at_s, first.cpu_share) == (0.0, None)  # nothing before it to compare with


def test_means_are_by_time(clock: Clock) -> None:
    readings = [SensorReading(use_share=share) for share in (0.0, 0.2, 0.8, 0.8)]
    monitor = ticking(clock, *readings)
    for seconds in (1.0, 3.0):
        clock.now_s += seconds
        monitor.sample()
    monitor.stop()
    whole = monitor.summary()
    assert whole.mean.gpu_share == pytest.approx((0.2 * 1 + 0.8 * 3) / 4)
    assert (whole.peak.gpu_share, whole.seconds, whole.count) == (0.8, 4.0, 4)
    later = monitor.summary(since_s=1.0)
    assert (later.mean.gpu_share, later.seconds) == (pytest.approx(0.8), 3.0)
    assert monitor.summary(until_s=1.0).mean.gpu_share == pytest.approx(0.2)
    nothing = monitor.summary(since_s=50.0)
    assert (nothing.count, nothing.mean.gpu_share, nothing.peak.cpu_share) == (0, None, None)


def test_what_is_not_known_is_none(clock: Clock) -> None:
    monitor = ticking(clock, SensorReading(use_share=0.5), SensorReading(), SensorReading())
    clock.now_s += 1
    monitor.stop()
    assert monitor.samples()[-1].gpu_share is None
    assert monitor.summary().mean.gpu_share == 0.5  # over what is known
    assert monitor.summary().mean.power_w is None


def test_on_the_cpu_there_is_a_host_and_no_gpu() -> None:
    with Monitor(open_device("cpu")) as monitor:
        pass
    last = monitor.latest()
    assert last is not None
    assert (last.gpu_share, last.power_w) == (None, None)
    assert last.host_memory_bytes is not None
    assert last.host_memory_bytes > 0
    assert last.process_memory_bytes is not None
    assert last.process_memory_bytes > 1 << 20


@given(count=st.integers(0, 400), most=st.integers(4, 50))
def test_memory_is_bounded_and_means_stay(count: int, most: int) -> None:
    clock = Clock()
    monitor = ticking(clock, SensorReading(0.25, memory_bytes=5), most_samples=most)
    for _ in range(count):
        clock.now_s += 1.0
        monitor.sample()
    monitor.stop()
    samples = monitor.samples()
    assert len(samples) <= most
    assert [s.at_s for s in samples] == sorted(s.at_s for s in samples)
    assert samples[-1].at_s == count
    mean = monitor.summary().mean
    assert (mean.gpu_share, mean.gpu_memory_bytes) == (pytest.approx(0.25), 5)
    if count:
        assert mean.cpu_share == pytest.approx(1.0)


def test_thinning_keeps_the_most_memory(clock: Clock) -> None:
    readings = [SensorReading(memory_bytes=size) for size in (1, 9, 1, 1, 1, 1, 1)]
    monitor = ticking(clock, *readings, most_samples=4)
    for _ in range(4):
        clock.now_s += 1.0
        monitor.sample()
    monitor.stop()
    assert len(monitor.samples()) == 5 - 1
    assert monitor.summary().peak.gpu_memory_bytes == 9


class TestThread:
    def test_it_samples_and_ends_at_once(self, clock: Clock) -> None:
        enough, host, calls = threading.Event(), Host(clock, 1.0, 0.0), []

        def read() -> HostCounters:
            calls.append(threading.current_thread().name)
            if len(calls) == 5:
                enough.set()
            return host()

        monitor = Monitor(open_device("cpu"), 1e-4, host=read, clock=clock)
        with monitor:
            assert enough.wait(60)
        assert "headrace monitor" in calls
        after = len(calls)
        assert not any(thread.name == "headrace monitor" for thread in threading.enumerate())
        monitor.stop()  # once more: nothing
        assert len(calls) == after

    def test_a_long_pause_is_cut_short(self, clock: Clock) -> None:
        monitor = ticking(clock)  # pauses for eleven days
        monitor.stop()
        assert len(monitor.samples()) == 2

    def test_it_may_be_started_again(self, clock: Clock) -> None:
        monitor = ticking(clock)
        with pytest.raises(DeviceError, match="running already"):
            monitor.start()
        monitor.stop()
        clock.now_s += 2.0
        with monitor:
            pass
        assert [sample.at_s for sample in monitor.samples()] == [0.0, 0.0, 2.0, 2.0]

    def test_sensors_that_were_given_stay_open(self, clock: Clock) -> None:
        gpu = Gpu(SensorReading())
        with Monitor(open_device("cpu"), host=Host(clock, 0, 0), sensors=gpu, clock=clock):
            pass
        assert not gpu.closed

    def test_own_sensors_are_closed(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu, device = Gpu(SensorReading(power_w=1.0)), open_device("cpu")
        monkeypatch.setattr(device, "sensors", lambda: gpu)
        with Monitor(device, host=Host(clock, 0, 0), clock=clock) as monitor:
            pass
        assert gpu.closed
        last = monitor.latest()
        assert last is not None
        assert last.power_w == 1.0

    def test_a_dear_reading_is_made_more_seldom(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sample of 8 ms of CPU time each second is 0.8 % of a core: no more than that."""
        cpu_s, pauses = iter(x * 0.008 for x in range(100)), []
        monitor = Monitor(
            open_device("cpu"), 0.1, host=Host(clock, 0, 0), clock=clock,
            cpu_clock=lambda: next(cpu_s),
        )  # fmt: skip

        def wait(pause_s: float) -> bool:
            pauses.append(pause_s)
            return len(pauses) == 3

        monkeypatch.setattr(monitor._ended, "wait", wait)
        monitor._read_host, monitor._start_s = Host(clock, 0, 0), 0.0
        monitor._run()
        assert pauses == [0.1, pytest.approx(1.0), pytest.approx(1.0)]


@pytest.mark.parametrize("options", [{"every_s": 0}, {"every_s": -1.0}, {"most_samples": 3}])
def test_senseless_options(options: dict[str, Any]) -> None:
    with pytest.raises(DeviceError, match="expected"):
        Monitor(open_device("cpu"), **options)


class TestHostCounterReader:
    @pytest.fixture
    def child(self) -> Iterator[Callable[[], None]]:
        """A child process that has used some CPU time, and a way to end it."""
        program = (
            "import sys, time\nwhile time.process_time() < 0.1: pass\n"
            "print(flush=True); sys.stdin.readline()"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
            process.stdout.readline()
            yield process.communicate

    def test_children_are_found_and_remembered(
        self, child: Callable[[], None], clock: Clock
    ) -> None:
        meter = HostCounterReader(clock)
        before = meter.read()
        assert before.workers_s >= 0.09
        child()
        clock.now_s += 10
        after = meter.read()
        assert after.workers_s >= before.workers_s  # it has ended; what it used stays
        assert after.process_memory_bytes < before.process_memory_bytes

    def test_children_are_looked_for_once_a_second(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meter, scans = HostCounterReader(clock), []
        meter._process = types.SimpleNamespace(  # type: ignore[assignment]
            children=lambda recursive: scans.append(recursive) or [],
            memory_info=lambda: types.SimpleNamespace(rss=0),
        )
        for _ in range(20):
            meter.read()
            clock.now_s += 0.1
        assert len(scans) == 2

    def test_the_machine_was_busy_for_part_of_its_time(self, clock: Clock) -> None:
        found = HostCounterReader(clock).read()
        assert 0 < found.machine_busy_s < found.machine_s
        assert found.process_s > 0


def test_every_device_can_be_monitored(device: Device) -> None:
    with Monitor(device) as monitor:
        pass
    last = monitor.latest()
    assert last is not None
    if device.torch_device.type == "cuda":
        assert last.gpu_memory_bytes is not None
        assert last.gpu_memory_bytes > 0
        assert last.power_w is not None
        assert 0 <= (last.gpu_share or 0.0) <= 1
    else:
        assert last.gpu_share is None
