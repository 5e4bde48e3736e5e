"""How busy a device was: exact on the fake device's clock, and on made-up activities of CUPTI."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import Device, Span, Timeline, Trace, open_device
from headrace.device.kineto import Activity, device_work
from headrace.fake import Costs, FakeDevice
from headrace.lifecycle import MetricsLog, UsageLog, read_metrics
from headrace.machine import BusyWindow
from headrace.machine.busy_time import BusyTracer
from headrace.translation import TrainSettings
from headrace.translation.observers import batches_left
from support.training.engines import data, make_engine

MS = 1_000_000


class TestFake:
    def test_a_window_in_exact_numbers(self) -> None:
        """10 ms of compute beside 4 ms of copy, 1 ms of which is after it; then 5 ms of nothing."""
        with FakeDevice() as device:
            device.work(100, "before")
            with device.trace() as trace:
                assert trace.timeline is None
                device.work(10, "gemm")
                with device.use(device.stream("transfer")):
                    device.host_work(7)
                    device.operation(device.current_stream(), "copy h2d", "copy", cost_ns=4 * MS)
                device.synchronize("test")
                device.host_work(4)
            device.work(100, "after")
        assert (trace.wall_ms, trace.missing, trace.launches) == (15.0, None, 2)
        assert trace.timeline is not None
        assert {span.name for span in trace.timeline.spans} >= {"gemm", "copy h2d"}
        assert not {span.name for span in trace.timeline.spans} & {"before", "after"}
        assert trace.timeline.spans[0].start_ns == 0
        window = BusyWindow.of(trace, steps=2)
        assert window is not None
        assert window.wall_ms_per_step == 7.5
        assert window.busy_ms_per_step == 5.5
        assert window.busy_share == pytest.approx(11 / 15)
        assert window.compute_share == pytest.approx(10 / 15)
        assert window.copy_share == pytest.approx(4 / 15)
        assert window.idle_share == pytest.approx(4 / 15)
        assert window.overlap_share == pytest.approx(3 / 15)
        assert window.launches_per_step == 1.0
        assert [stream.name for stream in window.streams] == ["default", "transfer"]
        assert window.streams[1].busy_share == pytest.approx(4 / 15)
        assert (window.streams[0].kernels_per_step, window.streams[1].copies_per_step) == (0.5, 0.5)
        assert json.loads(json.dumps(window.to_dict()))["streams"][0]["name"] == "default"
        assert str(window).startswith("busy 73.3% of the time")

    def test_baseline_idles_and_pipeline_does_not(self) -> None:
        """2 ms of copy and 10 ms of compute a step: 12 ms in turn, 10 ms side by side."""
        shares = {}
        for plan in ("baseline", "pipeline"):
            names = ("aten::addmm", "copy h2d")
            costs = Costs(kernel_us=0, copy_us=0, copy_gb_per_s=1e9, query_us=0, by_name=dict(
                zip(names, (5000, 1000), strict=True)
            ))  # fmt: skip
            with FakeDevice(costs=costs) as device:
                engine = make_engine(device, plan, model=None)
                batches = [tuple(p.pin_memory() for p in b) for b in data(30)]
                tracer, window = BusyTracer(device, after=10, steps=10), None
                for _ in engine.steps(batches):
                    window = tracer.on_step() or window
                assert tracer.is_over
            assert window is not None
            shares[plan] = window
        assert shares["pipeline"].wall_ms_per_step < shares["baseline"].wall_ms_per_step
        assert shares["pipeline"].compute_share > shares["baseline"].compute_share
        assert shares["pipeline"].overlap_share > 0 == shares["baseline"].overlap_share

    def test_losses_are_the_same_with_and_without_a_trace(self) -> None:
        found = []
        for traces in (False, True):
            with FakeDevice() as device:
                engine = make_engine(device, "graph")
                tracer = BusyTracer(device, after=3 if traces else 1000, steps=5)
                for _ in engine.steps(data()):
                    tracer.on_step()
                assert engine.last_result is not None
                found.append(engine.last_result.losses)
        assert found[0] == found[1]

    def test_without_a_timeline_it_says_so(self) -> None:
        with FakeDevice(keep_timeline=False) as device:
            with device.trace() as trace:
                device.work(1)
            assert "keep_timeline" in str(trace.missing)
            assert BusyWindow.of(trace, 1) is None


def test_on_the_cpu_it_cannot_be_seen() -> None:
    device = open_device("cpu")
    with device.trace() as trace:
        torch.ones(10).sum()
    assert "no separate device to trace" in str(trace.missing)
    assert trace.timeline is None
    assert trace.wall_ms > 0


def test_an_error_in_the_block_is_passed_on(device: Device) -> None:
    with pytest.raises(ZeroDivisionError), device.trace():
        1 / 0  # noqa: B018
    with device.trace() as trace:  # and the next one works
        pass
    assert isinstance(trace, Trace)


class TestProbe:
    def test_a_loop_that_ends_in_the_midst(self) -> None:
        with FakeDevice() as device:
            tracer = BusyTracer(device, after=2, steps=10)
            for _ in range(5):
                device.work(1)
                assert tracer.on_step() is None
            window = tracer.end()
            assert window is not None
            assert (window.steps, window.busy_share, tracer.is_over) == (3, 1.0, True)
            assert tracer.end() is None
            assert tracer.on_step() is None

    def test_a_trace_of_no_steps_is_followed_by_another(self) -> None:
        with FakeDevice() as device:
            tracer = BusyTracer(device, after=2, steps=3)
            tracer.on_step()
            tracer.on_step()
            assert tracer.end() is None
            assert not tracer.is_over
            windows = []
            for _ in range(4):
                windows.append(tracer.on_step())
                device.work(1)
            assert [window is None for window in windows] == [True, True, True, False]


spans = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["kernel", "copy", "wait"]),
        st.integers(0, 40),
        st.integers(1, 20),
    ),
    max_size=12,
)


@given(spans, st.integers(60, 100), st.integers(1, 5))
def test_shares_add_up(found: list[Any], wall_ms: int, steps: int) -> None:
    """Against a count of each millisecond."""
    timeline = Timeline(
        # A lane is a stream or a host thread, and only these wait.
        Span("host" if kind == "wait" else lane, "x", kind, start * MS, (start + length) * MS)
        for lane, kind, start, length in found
    )
    window = BusyWindow.from_timeline(timeline, wall_ms, steps)
    ran = [
        {(lane, kind) for lane, kind, s, n in found if kind != "wait" and s <= ms < s + n}
        for ms in range(wall_ms)
    ]
    assert window.busy_share * wall_ms == pytest.approx(sum(bool(now) for now in ran))
    for kind, share in (("kernel", window.compute_share), ("copy", window.copy_share)):
        expected = sum(any(k == kind for _, k in now) for now in ran)
        assert share * wall_ms == pytest.approx(expected)
    together = sum(len({lane for lane, _ in now}) >= 2 for now in ran)
    assert window.overlap_share * wall_ms == pytest.approx(together)
    assert window.idle_share == pytest.approx(1 - window.busy_share)


def test_a_device_is_never_fuller_than_full() -> None:
    timeline = Timeline([Span("a", "x", "kernel", 0, 10 * MS)])
    assert BusyWindow.from_timeline(timeline, 9.9, 1).busy_share == 1.0
    empty = BusyWindow.from_timeline(Timeline([]), 0.0, 1)
    assert (empty.busy_share, empty.idle_share, empty.streams) == (0.0, 1.0, ())
    with pytest.raises(ValueError, match="steps = 0"):
        BusyWindow.from_timeline(timeline, 1.0, 0)


class TestRecords:
    """The profiler numbers streams in its own way; markers in a known order tell which is which."""

    def activities(self) -> list[Activity]:
        spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
        return [
            Activity("cudaLaunchKernel", False, 0, 1, 5, 6),
            Activity("cudaLaunchKernel", False, 0, 1, 15, 16),
            Activity(spin, True, 0, 7, 10, 12, "kernel"),
            Activity(spin, True, 0, 20, 20, 22, "kernel"),
            Activity("cudaGraphLaunch", False, 0, 1, 25, 26),
            Activity("cudaMemcpyAsync", False, 0, 1, 25, 26),
            Activity("cudaStreamSynchronize", False, 0, 1, 25, 26),
            Activity("gemm", True, 0, 7, 30, 40, "kernel"),
            Activity("Memcpy HtoD (Pinned -> Device)", True, 0, 20, 35, 45, "gpu_memcpy"),
            Activity("Memset (Device)", True, 0, 24, 46, 47, "gpu_memset"),
            Activity("elsewhere", True, 1, 7, 30, 99, "kernel"),
            Activity("Stream Wait Event", True, 0, 20, 30, 99, "cuda_sync"),
        ]

    def test_streams_have_their_names(self) -> None:
        found = device_work(self.activities(), 0, ["default", "transfer"])
        assert found is not None
        assert found.from_ns == 22
        assert found.launches == 2
        assert [(span.lane, span.kind) for span in found.spans] == [
            ("default", "kernel"),
            ("transfer", "copy"),
            ("stream 24", "kernel"),
        ]
        trace = Trace()
        trace.set_spans(found.spans, found.launches, from_ns=found.from_ns)
        assert trace.timeline is not None
        assert [span.start_ns for span in trace.timeline.spans] == [8, 13, 24]

    def test_without_markers_nothing_is_believed(self) -> None:
        assert (
            device_work([r for r in self.activities() if not r.on_device], 0, ["default"]) is None
        )


class TestRun:
    def run(
        self, path: Path, device: FakeDevice, steps: int, more: int = 0, **options: Any
    ) -> None:
        """So many steps of a run, which has `more` of them after these."""
        with (
            MetricsLog(path) as metrics,
            UsageLog(device, metrics, path, **options) as monitor,
        ):
            for step in range(1, steps + 1):
                device.work(1)
                monitor.on_step(step, steps + more - step, steps - step)
            monitor.end_epoch(steps)

    def test_lines_of_use_and_one_of_business(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        with FakeDevice() as device:
            self.run(path, device, 40, more=40, uses_graphs=lambda: True)
            self.run(path, device, 40)  # a resumed run is not traced again
        lines = list(read_metrics(path))
        assert [line["kind"] for line in lines] == ["busy", "use", "use"]
        assert (lines[0]["step"], lines[0]["steps"], lines[0]["busy_share"]) == (30, 10, 1.0)
        assert set(lines[1]) >= {
            *("step", "at_s", "gpu_share", "gpu_memory_bytes", "power_w", "sm_clock_mhz"),
            *("temperature_c", "cpu_share", "workers_cpu_share", "machine_cpu_share"),
            "host_memory_bytes",
        }
        assert lines[2]["at_s"] > lines[1]["at_s"]  # seconds of the run, not of the process

    def test_steps_launched_one_by_one_are_traced_when_the_run_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        with FakeDevice() as device:
            self.run(path, device, 40, more=40)
            self.run(path, device, 40)
        assert [(line["kind"], line["step"]) for line in read_metrics(path)] == [
            ("use", 40),
            ("busy", 40),
            ("use", 40),
        ]

    @pytest.mark.parametrize(
        ("epochs", "each", "accumulate", "max_steps", "traced_at"),
        [
            (2, 200, 16, 20, 10),
            (2, 200, 1, None, 10),
            (2, 200, 3, 50, 10),
            (9, 100, 8, 30, 10),
            (60, 5, 1, None, 4),
            (60, 1, 1, None, None),
        ],
    )
    def test_the_last_steps_of_any_run(
        self,
        tmp_path: Path,
        epochs: int,
        each: int,
        accumulate: int,
        max_steps: int | None,
        traced_at: int | None,
    ) -> None:
        """At most one trace, and none in vain."""
        path, traces = tmp_path / "metrics.jsonl", 0
        settings = TrainSettings(epochs=epochs, accumulate=accumulate, max_steps=max_steps)
        with (
            FakeDevice() as device,
            MetricsLog(path) as metrics,
            UsageLog(device, metrics, path) as monitor,
        ):
            trace = device.trace

            def counted() -> Any:
                nonlocal traces
                traces += 1
                return trace()

            device.trace = counted  # type: ignore[method-assign]
            engine: Any = SimpleNamespace(updates=0)
            for engine.epochs in range(epochs):
                for batch in range(each):
                    if engine.updates == max_steps:
                        break
                    device.work(1)
                    engine.updates += (batch + 1) % accumulate == 0 or batch + 1 == each
                    left = batches_left(settings, engine, each, batch)
                    monitor.on_step(engine.updates, left, each - batch - 1)
                monitor.end_epoch(engine.updates)
        busy = [line["steps"] for line in read_metrics(path) if line["kind"] == "busy"]
        assert busy == ([] if traced_at is None else [traced_at])
        assert traces == len(busy)

    def test_short_of_the_window_and_switched_off(self, tmp_path: Path) -> None:
        with FakeDevice() as device:
            self.run(tmp_path / "short", device, 24)
            self.run(tmp_path / "off", device, 40, enabled=False)
        busy = next(read_metrics(tmp_path / "short"))
        assert (busy["kind"], busy["steps"]) == ("busy", 4)
        assert list(read_metrics(tmp_path / "off")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    @pytest.mark.unsanitized
    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph"])
    def test_the_profiler_sees_the_streams_by_name(self, plan: str) -> None:
        device = open_device("cuda")
        engine = make_engine(device, plan)
        batches = [tuple(part.pin_memory() for part in batch) for batch in data(20)]
        engine.epoch(batches)
        with device.trace() as trace:
            engine.epoch(batches)
        assert trace.missing is None
        window = BusyWindow.of(trace, steps=20)
        assert window is not None
        assert 0 < window.busy_share <= 1
        assert window.launches_per_step is not None
        assert window.launches_per_step >= 1
        names = {stream.name for stream in window.streams}
        if plan != "graph":  # a graph's branches have streams of the driver's own
            assert not any(name.startswith("stream ") for name in names), names
        if plan in ("streams4", "pipeline"):
            assert sum(stream.copies_per_step for stream in window.streams) >= 2
            assert len(names) > 1
        assert not any("spin_kernel" in span.name for span in trace.timeline.spans)  # type: ignore[union-attr]

    @pytest.mark.unsanitized
    def test_another_profiler_is_left_alone(self) -> None:
        device = open_device("cuda")
        with torch.profiler.profile() as profile, device.trace() as trace:
            torch.ones(10, device="cuda").sum()
        assert "another profiler" in str(trace.missing)
        assert len(profile.events()) > 0

    @pytest.mark.unsanitized
    def test_a_long_kernel_is_seen_in_full(self) -> None:
        device = open_device("cuda")
        matrix = torch.randn(4096, 4096, device="cuda")
        (matrix @ matrix).sum()
        with device.trace() as trace:
            for _ in range(50):
                matrix @ matrix
        window = BusyWindow.of(trace, steps=50)
        assert window is not None
        assert window.compute_share > 0.8
        assert window.streams[0].kernels_per_step >= 1


def test_ctrl_c_while_a_profiler_starts_or_runs_leaves_nothing_behind(tmp_path: Path) -> None:
    """The interrupt comes out as itself, and neither a trace nor a thread is left."""
    path = tmp_path / "metrics.jsonl"
    with FakeDevice() as device, MetricsLog(path) as metrics:
        for stage in ("starting", "running"):
            ended: list[str] = []

            @contextmanager
            def trace(stage: str = stage, ended: list[str] = ended) -> Iterator[Trace]:
                if stage == "starting":
                    raise KeyboardInterrupt
                try:
                    yield Trace()
                finally:
                    ended.append(stage)

            def run(trace: Any = trace) -> None:
                with UsageLog(device, metrics, path, trace_after=1) as monitor:
                    monitor._device.trace = trace  # type: ignore[method-assign]
                    monitor.on_step(1, 5, 5)
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                run()
            assert ended == (["running"] if stage == "running" else [])
            assert not [one for one in threading.enumerate() if one.name == "headrace monitor"]
