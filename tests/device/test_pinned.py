"""Pinned memory: reused, but not before its event has passed; arguments are checked."""

from __future__ import annotations

import pytest
import torch

from headrace.device import Device
from headrace.errors import ClosedError, DeviceError, EventNotRecordedError
from headrace.fake import FakeDevice


class TestPinnedPool:
    def test_memory_is_reused(self, device: Device) -> None:
        first = device.pinned.take(1000)
        address = first.view((1,), torch.uint8).data_ptr()
        first.release()
        second = device.pinned.take(700)  # the same power of two
        assert second.view((1,), torch.uint8).data_ptr() == address
        assert device.pinned.held_bytes == second.nbytes == 1024

    def test_not_reused_before_its_event(self) -> None:
        with FakeDevice() as device:
            event = device.event()
            device.work(5.0)
            event.record()
            first = device.pinned.take(1000)
            first.release(after=event)
            second = device.pinned.take(1000)
            assert device.pinned.held_bytes == 2048  # the first still waits for its event
            device.wait(event, "test")
            third = device.pinned.take(1000)
            assert device.pinned.held_bytes == 2048
            assert device.pinned.lent == 2
            second.release()
            third.release()

    def test_misuse(self, device: Device) -> None:
        buffer = device.pinned.take(512)
        with pytest.raises(DeviceError, match=r"needs 516 bytes; the pinned buffer has 512"):
            buffer.view((129,), torch.float32)
        with pytest.raises(DeviceError, match="offset_bytes = 2: expected a multiple of 4"):
            buffer.view((1,), torch.float32, offset_bytes=2)
        for shape in ((-1,), (-2, -2), (1.5,), ("4",)):
            with pytest.raises(
                DeviceError, match=r"shape\[\d\] = .*: expected a whole number, 0 or"
            ):
                buffer.view(shape, torch.float32)  # type: ignore[arg-type]
        for offset in (-8, 1.0, None):
            with pytest.raises(DeviceError, match=r"offset_bytes = .*: expected a whole number"):
                buffer.view((1,), torch.float32, offset_bytes=offset)  # type: ignore[arg-type]
        with pytest.raises(EventNotRecordedError):
            buffer.release(after=device.event())
        assert device.pinned.lent == 1  # the failed calls have not released it
        buffer.view((1,), torch.uint8)
        buffer.release()
        assert device.pinned.lent == 0
        with pytest.raises(ClosedError, match="released twice"):
            buffer.release()
        with pytest.raises(ClosedError, match="after its release"):
            buffer.view((1,), torch.uint8)
        with pytest.raises(DeviceError, match="nbytes = -1"):
            device.pinned.take(-1)
        for nbytes in (1.5, "4", None, True):
            with pytest.raises(
                DeviceError, match=r"nbytes = .*: expected a whole number, 0 or more"
            ):
                device.pinned.take(nbytes)  # type: ignore[arg-type]

    def test_close_frees_the_buffers(self, device: Device) -> None:
        device.pinned.take(512).release()
        device.pinned.close()
        assert device.pinned.held_bytes == 0

    def test_views_at_an_offset_share_the_buffer(self, device: Device) -> None:
        buffer = device.pinned.take(64)
        buffer.view((64,), torch.uint8).fill_(0)
        buffer.view((2, 2), torch.int32, offset_bytes=16).fill_(-1)
        assert int(buffer.view((64,), torch.uint8).sum()) == 16 * 255
        buffer.release()
