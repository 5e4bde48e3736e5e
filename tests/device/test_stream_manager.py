"""`StreamManager`: by index and by role, events between streams, and misuse."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace.device import Device, StreamManager, open_device
from headrace.errors import (
    ClosedError,
    DeviceError,
    DeviceMismatchError,
    EventNotRecordedError,
    StreamIndexError,
)
from headrace.fake import FakeDevice


@pytest.mark.parametrize("count", range(2, 9))
def test_two_to_eight_streams(device: Device, count: int) -> None:
    manager = StreamManager(device, count)
    assert len(manager) == count
    assert len({manager.get_stream(index) for index in range(count)}) == count


def test_four_by_default(device: Device) -> None:
    manager = StreamManager(device)
    assert [manager.get_stream(index).name for index in range(4)] == [
        "transfer",
        "forward",
        "backward",
        "transfer_next",
    ]


@pytest.mark.parametrize("count", [-1, 0, 1, 9, True, 4.0, "4", None])
def test_other_numbers_are_refused(count: object) -> None:
    with pytest.raises(DeviceError, match=r"streams = .*: expected"):
        StreamManager(open_device("cpu"), count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "roles"),
    [
        (2, {"transfer": 0, "forward": 1, "backward": 1, "transfer_next": 0}),
        (3, {"transfer": 0, "forward": 1, "backward": 2, "transfer_next": 0}),
        (4, {"transfer": 0, "forward": 1, "backward": 2, "transfer_next": 3}),
        (8, {"transfer": 0, "forward": 1, "backward": 2, "transfer_next": 3}),
    ],
)
def test_with_fewer_streams_roles_share(count: int, roles: dict[str, int]) -> None:
    manager = StreamManager(open_device("cpu"), count)
    assert {role: manager.index_of(role) for role in manager.roles} == roles
    for role, index in roles.items():
        assert manager.get_stream(role) is manager.get_stream(index)


def test_managers_on_one_device_share_streams(device: Device) -> None:
    assert StreamManager(device, 2).get_stream(0) is StreamManager(device, 4).get_stream(0)


@pytest.mark.parametrize("which", [4, -1, 100])
def test_an_index_out_of_range(device: Device, which: int) -> None:
    manager = StreamManager(device)
    event = manager.create_event()
    for call in (
        lambda: manager.get_stream(which),
        lambda: manager.set_current_stream(which),
        lambda: manager.use(which).__enter__(),
        lambda: manager.record_event(event, which),
        lambda: manager.synchronize(which),
    ):
        with pytest.raises(StreamIndexError, match=f"no stream {which}: this manager has 4, 0 to"):
            call()
    with pytest.raises(IndexError):
        manager.get_stream(which)


@pytest.mark.parametrize("which", [1.0, None, True])
def test_an_index_of_the_wrong_type(which: object) -> None:
    with pytest.raises(StreamIndexError, match="expected an index or the name of a role"):
        StreamManager(open_device("cpu")).get_stream(which)  # type: ignore[arg-type]


def test_an_unknown_role_lists_the_roles() -> None:
    with pytest.raises(StreamIndexError, match=r"the role 'optimizer'; roles: transfer, forward"):
        StreamManager(open_device("cpu")).get_stream("optimizer")


def test_the_four_stream_pipeline_in_order(device: Device) -> None:
    manager = StreamManager(device)
    arrived, forwarded, updated = (manager.create_event() for _ in range(3))
    weight = torch.ones(64, device=device.torch_device, requires_grad=True)
    slot = device.empty((64,), torch.float32)
    buffer = device.pinned.take(256)
    staging = buffer.view((64,), torch.float32)
    manager.get_stream("transfer").wait_stream(device.current_stream())
    manager.record_event(updated, "backward")
    losses = []
    for step in range(3):
        staging.fill_(step + 1)
        manager.wait_event("transfer", updated)
        with manager.use("transfer"):
            device.copy(slot, staging)
        manager.record_event(arrived, "transfer")
        manager.wait_event("forward", arrived)
        manager.wait_event("forward", updated)
        if step == 0:
            manager.get_stream("forward").wait_stream(device.current_stream())
        with manager.use("forward"):
            loss = (weight * slot).sum()
        manager.record_event(forwarded, "forward")
        manager.wait_event("backward", forwarded)
        with manager.use("backward"), torch.no_grad():
            loss.backward()
            assert weight.grad is not None
            weight -= 0.5 * weight.grad
            weight.grad.zero_()
        manager.record_event(updated, "backward")
        manager.synchronize_event(updated)
        losses.append(float(loss.detach()))
    assert losses == [64.0, 64.0, -96.0]
    assert device.ledger.statistics()["synchronize_event"].count == 3


def test_set_and_restore_the_current_stream(device: Device) -> None:
    manager, before = StreamManager(device), device.current_stream()
    manager.set_current_stream("forward")
    manager.set_current_stream("backward")
    assert device.current_stream() is manager.get_stream(2)
    manager.restore_current_stream()
    assert device.current_stream() is before
    with pytest.raises(DeviceError, match="without a set_current_stream"):
        manager.restore_current_stream()


def test_each_thread_has_its_own_current_stream(device: Device) -> None:
    manager = StreamManager(device)
    manager.set_current_stream("forward")
    refused = []

    def restore() -> None:
        try:
            manager.restore_current_stream()
        except DeviceError as problem:
            refused.append(problem)

    thread = threading.Thread(target=restore)
    thread.start()
    thread.join()
    assert len(refused) == 1
    manager.restore_current_stream()


def test_restored_after_an_exception(device: Device) -> None:
    manager, before = StreamManager(device), device.current_stream()
    with pytest.raises(RuntimeError, match="broken"), manager.use("forward"):
        raise RuntimeError("broken")
    assert device.current_stream() is before


def test_query_does_not_block() -> None:
    with FakeDevice() as device:
        manager = StreamManager(device)
        event = manager.create_event()
        with manager.use("forward"):
            device.work(5.0)
        manager.record_event(event, "forward")
        assert not manager.query_event(event)
        manager.synchronize_event(event)
        assert manager.query_event(event)
        assert device.ledger.statistics()["synchronize_event"].max_ms == pytest.approx(5, abs=0.01)


def test_synchronize_is_in_the_ledger_by_its_reason(device: Device) -> None:
    manager = StreamManager(device)
    manager.synchronize(1, reason="every batch")
    manager.synchronize_all()
    waits = device.ledger.statistics()
    assert (waits["every batch"].count, waits["synchronize"].count) == (1, 4)


def test_an_event_never_recorded(device: Device) -> None:
    manager = StreamManager(device)
    event = manager.create_event()
    with pytest.raises(EventNotRecordedError):
        manager.query_event(event)
    with pytest.raises(EventNotRecordedError):
        manager.wait_event("forward", event)
    with pytest.raises(EventNotRecordedError):
        manager.synchronize_event(event)


def test_an_event_of_another_device(device: Device) -> None:
    manager, stranger = StreamManager(device), FakeDevice(index=9)
    event = stranger.event()
    event.record()
    for call in (
        lambda: manager.record_event(event, 0),
        lambda: manager.query_event(event),
        lambda: manager.wait_event(0, event),
        lambda: manager.synchronize_event(event),
    ):
        with pytest.raises(DeviceMismatchError, match="an event of fake:9 was given to"):
            call()


def test_arguments_that_are_no_event_and_no_device(device: Device) -> None:
    manager = StreamManager(device)
    for call in (
        lambda: manager.record_event(None, 0),  # type: ignore[arg-type]
        lambda: manager.query_event("mine"),  # type: ignore[arg-type]
        lambda: manager.wait_event(0, None),  # type: ignore[arg-type]
        lambda: manager.synchronize_event(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(DeviceError, match=r"expected an Event; create_event\(\) makes one"):
            call()
    with pytest.raises(DeviceError, match=r"no device 'no such device' on this machine; here: "):
        StreamManager("no such device")


def test_close_waits_and_later_use_raises(device: Device) -> None:
    with StreamManager(device) as manager:
        event = manager.create_event()
        manager.record_event(event, 0)
    assert device.ledger.statistics()["close"].count == 4
    manager.close()  # twice is fine
    for call in (
        lambda: manager.get_stream(0),
        manager.create_event,
        lambda: manager.record_event(event, 0),
        lambda: manager.query_event(event),
        lambda: manager.wait_event(0, event),
        lambda: manager.synchronize(0),
        manager.synchronize_all,
        lambda: manager.synchronize_event(event),
        lambda: manager.set_current_stream(0),
        manager.__enter__,
    ):
        with pytest.raises(ClosedError, match=r"used after close\(\)"):
            call()
