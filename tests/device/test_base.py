"""The seam, the same on every device: streams, events, host waits, copies."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace.device import Device
from headrace.errors import (
    DeviceError,
    DeviceMismatchError,
    EventNotRecordedError,
)
from headrace.fake import FakeDevice


class TestStreams:
    def test_made_once(self, device: Device) -> None:
        assert device.stream("transfer") is device.stream("transfer")
        assert device.stream("transfer") is not device.stream("forward")

    def test_another_priority_for_a_known_name_is_an_error(self, device: Device) -> None:
        assert device.stream("urgent", priority=-1).priority == -1
        with pytest.raises(DeviceError, match="'urgent' was made with priority -1"):
            device.stream("urgent", priority=0)

    def test_current_stream_inside_and_after_the_block(self, device: Device) -> None:
        before, side = device.current_stream(), device.stream("side")
        with device.use(side) as used:
            assert used is side
            assert device.current_stream() is side
            with device.use(device.stream("inner")):
                assert device.current_stream() is device.stream("inner")
            assert device.current_stream() is side
        assert device.current_stream() is before

    def test_restored_after_an_exception(self, device: Device) -> None:
        before = device.current_stream()
        with pytest.raises(RuntimeError, match="broken"), device.use(device.stream("side")):
            raise RuntimeError("broken")
        assert device.current_stream() is before

    def test_each_thread_has_its_own(self, device: Device) -> None:
        default, seen = device.current_stream(), []

        def look() -> None:
            seen.append(device.current_stream())
            with device.use(device.stream("other")):
                seen.append(device.current_stream())
                inside.set()
                leave.wait()

        inside, leave = threading.Event(), threading.Event()
        with device.use(device.stream("side")):
            thread = threading.Thread(target=look)
            thread.start()
            inside.wait()
            assert device.current_stream() is device.stream("side")
            leave.set()
            thread.join()
        assert seen == [default, device.stream("other")]

    def test_streams_of_another_device_are_refused(self, device: Device) -> None:
        stranger = FakeDevice(index=7).stream("side")
        for call in (
            lambda: device.use(stranger).__enter__(),
            lambda: device.current_stream().wait_stream(stranger),
            lambda: device.event().record(stranger),
            lambda: device.synchronize("test", stranger),
            lambda: device.record_stream(torch.ones(1), stranger),
        ):
            with pytest.raises(DeviceMismatchError, match="a stream of fake:7 was given to"):
                call()


class TestEvents:
    def test_record_query_and_wait(self, device: Device) -> None:
        event, side = device.event(), device.stream("side")
        side.wait_stream(device.current_stream())
        with device.use(side):
            value = torch.ones(8, device=device.torch_device) * 2
            event.record()
        device.current_stream().wait_event(event)
        total = value.sum()
        device.record_stream(value, device.current_stream())
        device.wait(event, "test")
        assert event.query()
        assert device.ledger.statistics()["test"].count == 1
        assert float(total) == 16.0

    def test_never_recorded(self, device: Device) -> None:
        event = device.event(timing=True)
        for call in (
            event.query,
            lambda: device.wait(event, "test"),
            lambda: device.current_stream().wait_event(event),
            lambda: event.elapsed_ms(event),
        ):
            with pytest.raises(EventNotRecordedError, match="before anything recorded it"):
                call()

    def test_recorded_again(self, device: Device) -> None:
        event = device.event()
        for _ in range(3):
            event.record()
            device.wait(event, "test")
        assert event.query()
        assert device.ledger.statistics()["test"].count == 3

    def test_events_of_another_device_are_refused(self, device: Device) -> None:
        stranger = FakeDevice(index=7)
        event = stranger.event()
        event.record()
        with pytest.raises(DeviceMismatchError, match="an event of fake:7"):
            device.current_stream().wait_event(event)
        with pytest.raises(DeviceMismatchError, match="an event of fake:7"):
            device.wait(event, "test")

    def test_timing_is_on_request(self, device: Device) -> None:
        start, end, untimed = device.event(timing=True), device.event(timing=True), device.event()
        start.record()
        torch.ones(64, device=device.torch_device).mul_(3)
        end.record()
        untimed.record()
        device.wait(end, "test")
        assert start.elapsed_ms(end) >= 0
        with pytest.raises(DeviceMismatchError, match="timing=True"):
            start.elapsed_ms(untimed)

    def test_synchronize_stream_and_device(self, device: Device) -> None:
        side = device.stream("side")
        side.wait_stream(device.current_stream())
        with device.use(side):
            torch.ones(64, device=device.torch_device).mul_(3)
        device.synchronize("one stream", side)
        assert side.query()
        device.synchronize("all of it")
        counts = {w.reason: w.count for w in device.ledger.statistics().reasons}
        assert counts == {"one stream": 1, "all of it": 1}


class TestCopies:
    def test_copies_to_the_device_and_back(self, device: Device) -> None:
        outgoing, incoming = device.pinned.take(4000), device.pinned.take(4000)
        source = outgoing.view((1000,), torch.float32)
        source.copy_(torch.arange(1000.0))
        side, there, back = device.stream("side"), device.event(), device.event()
        slot = device.empty((1000,), torch.float32)
        side.wait_stream(device.current_stream())
        with device.use(side):
            device.copy(slot, source)
            there.record()
        device.current_stream().wait_event(there)
        doubled = slot * 2
        result = incoming.view((1000,), torch.float32)
        device.copy(result, doubled)
        back.record()
        device.wait(back, "test")
        assert torch.equal(result, torch.arange(1000.0) * 2)
        outgoing.release(after=there)
        incoming.release()
        assert device.pinned.lent == 0

    def test_pageable_memory_is_warned_of_once(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        slot = device.empty((4,), torch.float32)
        for _ in range(3):
            device.copy(slot, torch.ones(4))
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (1 if device.asynchronous else 0)
        assert all("pin_memory=True" in message for message in said)

    def test_holds_tells_where_a_tensor_is(self, device: Device) -> None:
        assert device.holds(torch.ones(1, device=device.torch_device))
        buffer = device.pinned.take(16)
        view = buffer.view((4,), torch.float32)
        assert device.is_pinned(view) is device.asynchronous
        assert not device.is_pinned(torch.ones(4))
        if device.asynchronous:
            assert not device.holds(view)

    def test_memory_figures(self, device: Device) -> None:
        before = device.memory()
        kept = device.empty((1 << 20,), torch.uint8)
        after = device.memory()
        assert after.total == before.total > 0
        if device.asynchronous:
            assert after.allocated - before.allocated == kept.numel()
            assert after.peak_allocated >= after.allocated
        assert device.description()
