"""Timelines, and the fake device's virtual clock: overlap in exact numbers, without sleeping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import Span, Timeline, pack_spans, unpack_spans
from headrace.fake import Costs, FakeDevice

MS = 1_000_000
# A copy of any size takes 2 ms, the step's only kernel 10 ms, and everything else no time.
COSTS = Costs(kernel_us=0, query_us=0, by_name={"copy h2d": 2000, "aten::mm": 10_000})


def one_after_the_other(device: FakeDevice, steps: int) -> None:
    weight = torch.ones(4, 4, device=device.torch_device)
    slot = device.empty((4, 4), torch.float32)
    staging = torch.ones(4, 4).pin_memory()
    for _ in range(steps):
        device.copy(slot, staging)
        torch.mm(slot, weight)
        device.synchronize("every batch")


def in_two_slots(device: FakeDevice, steps: int) -> None:
    compute, transfer = device.current_stream(), device.stream("transfer")
    weight = torch.ones(4, 4, device=device.torch_device)
    slots = [device.empty((4, 4), torch.float32) for _ in range(2)]
    ready, done = ([device.event() for _ in slots] for _ in range(2))
    staging = torch.ones(4, 4).pin_memory()
    transfer.wait_stream(compute)
    for step in range(steps):
        at = step % 2
        if step >= 2:
            transfer.wait_event(done[at])
        with device.use(transfer):
            device.copy(slots[at], staging)
            ready[at].record()
        compute.wait_event(ready[at])
        torch.mm(slots[at], weight)
        done[at].record()
    device.synchronize("end")


def test_one_after_the_other_takes_the_sum() -> None:
    with FakeDevice(costs=COSTS) as device:
        one_after_the_other(device, 10)
    assert device.now_ms == 10 * 12.0
    assert device.timeline().length_ms == 120.0
    assert device.timeline().overlap_ms() == 0.0
    assert device.ledger.statistics()["every batch"].total_ms == 120.0


def test_two_slots_take_the_longer_of_the_two() -> None:
    with FakeDevice(costs=COSTS) as device:
        in_two_slots(device, 10)
    timeline = device.timeline()
    assert timeline.length_ms == 2.0 + 10 * 10.0
    assert timeline.busy_ms("default") == 100.0
    assert timeline.busy_ms("transfer") == 20.0
    assert timeline.overlap_ms() == 18.0  # all copies but the first
    assert timeline.device_busy_ms() == 102.0
    assert device.ledger.statistics().count == 1


def test_the_host_pays_for_launches_and_its_own_work() -> None:
    with FakeDevice(costs=Costs(kernel_us=5, launch_us=30)) as device:
        tensor = torch.ones(4, device=device.torch_device)
        for _ in range(9):
            tensor.add_(1)
        device.host_work(1.0, "load")
        device.synchronize("end")
    # Ten launches of 30 µs each: the kernels of 5 µs wait for the host, not the host for them.
    assert device.now_ms == pytest.approx(0.3 + 1.0)
    assert device.timeline().device_busy_ms() == pytest.approx(0.05)
    assert [span.name for span in device.timeline().on("host")] == ["load"]


def test_copies_cost_by_their_size() -> None:
    with FakeDevice(costs=Costs(copy_us=0, copy_gb_per_s=10)) as device:
        slot = device.empty((1_000_000,), torch.uint8)
        device.copy(slot, torch.ones(1_000_000, dtype=torch.uint8).pin_memory())
        device.synchronize("end")
    assert device.timeline().busy_ms("default") == 0.1


def test_event_times_are_the_virtual_clocks() -> None:
    with FakeDevice(costs=COSTS) as device:
        start, end = device.event(timing=True), device.event(timing=True)
        start.record()
        device.work(7.5)
        end.record()
        assert not end.query()
        device.wait(end, "test")
        assert start.elapsed_ms(end) == 7.5
        assert device.ledger.statistics()["test"].total_ms == 7.5


def test_backward_runs_on_its_forwards_stream() -> None:
    with FakeDevice() as device:
        forward, backward = device.stream("forward"), device.stream("backward")
        weight = torch.ones(4, device=device.torch_device, requires_grad=True)
        forward.wait_stream(device.current_stream())
        with device.use(forward):
            loss = (weight * 3).sum()
        backward.wait_stream(forward)
        with device.use(backward):
            loss.backward()
            assert weight.grad is not None
            weight.grad.mul_(2)
    on_backward = [span.name for span in device.timeline().on("backward")]
    on_forward = [span.name for span in device.timeline().on("forward")]
    # The root's gradient and what follows backward() are on its stream; the gradients are not.
    assert on_backward == ["aten::ones_like", "aten::mul_"]
    assert on_forward.count("aten::mul") == 2


def test_a_fixed_timeline() -> None:
    timeline = Timeline(
        [
            Span("b", "k2", "kernel", 5 * MS, 9 * MS),
            Span("a", "k1", "kernel", 0, 6 * MS, "x.py:3"),
            Span("host", "wait", "wait", 0, 20 * MS),
            Span("a", "k3", "copy", 8 * MS, 12 * MS),
        ]
    )
    assert timeline.lanes() == ["a", "host", "b"]
    assert timeline.busy_ms("a") == 10.0
    assert timeline.device_busy_ms() == 12.0
    assert timeline.overlap_ms() == 2.0
    assert timeline.length_ms == 20.0
    first = timeline.on("a")[0]
    assert (first.start_ms, first.end_ms, first.duration_ms) == (0.0, 6.0, 6.0)


def test_a_timeline_can_be_left_out() -> None:
    with FakeDevice(costs=COSTS, keep_timeline=False) as device:
        one_after_the_other(device, 2)
    assert device.timeline().spans == ()
    assert device.now_ms == 24.0


def test_copies_from_pageable_memory_block_the_host() -> None:
    with FakeDevice(costs=COSTS) as device:
        device.empty((4,), torch.float32).copy_(torch.ones(4), non_blocking=True)
        assert device.now_ms == 2.0


def test_an_empty_timeline() -> None:
    empty = Timeline([])
    assert (empty.length_ms, empty.overlap_ms(), empty.lanes()) == (0.0, 0.0, [])


def test_export_for_perfetto(tmp_path: Path) -> None:
    with FakeDevice(costs=COSTS) as device:
        in_two_slots(device, 3)
    path = tmp_path / "trace.json"
    device.timeline().save(path)
    trace = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    lanes = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    copies = [e for e in trace["traceEvents"] if e["name"] == "copy h2d"]
    assert [lanes[copy["tid"]] for copy in copies] == ["transfer"] * 3
    assert copies[0]["ts"] == 0
    assert copies[0]["dur"] == 2000
    assert copies[0]["args"]["where"].startswith(__file__)


spans = st.lists(
    st.fixed_dictionaries(
        {
            "lane": st.sampled_from(["host", "transfer", "default"]),
            "name": st.text(max_size=5),
            "kind": st.sampled_from(["kernel", "copy", "wait", "host"]),
            "start_ns": st.integers(0, 2**53),
            "end_ns": st.integers(0, 2**53),
        }
    ),
    max_size=20,
)


class TestPacked:
    @given(spans)
    def test_unpacking_restores_the_spans(self, spans: list[dict[str, Any]]) -> None:
        stored = json.loads(json.dumps({"steps": 3} | pack_spans(spans)))
        assert unpack_spans(stored)["spans"] == spans
        assert unpack_spans(stored)["steps"] == 3

    def test_unpacked_spans_stay_as_they_are(self) -> None:
        plain = {"steps": 1, "spans": [{"lane": "a", "name": "b", "kind": "host"}]}
        assert unpack_spans(plain) == plain

    @pytest.mark.parametrize(
        "row", [[0, 0, 9, 1, 2], [0, -1, 0, 1, 2], [0, 0, 0, 1], ["a", 0, 0, 1, 2], None, 7]
    )
    def test_unknown_rows_stay_as_they_are(self, row: object) -> None:
        stored = {"lanes": ["a"], "names": ["b"], "kinds": ["copy"], "spans": [row]}
        assert unpack_spans(stored)["spans"] == [row]
        assert unpack_spans({"spans": 5}) == {"spans": 5}

    def test_packed_spans_are_much_smaller(self) -> None:
        name = "vectorized_elementwise_kernel<8, bfloat16_copy_kernel_cuda>"
        spans = [
            {"lane": "default", "name": name, "kind": "kernel", "start_ns": n, "end_ns": n + 1}
            for n in range(1_000)
        ]
        assert len(json.dumps(pack_spans(spans))) * 5 < len(json.dumps(spans))
