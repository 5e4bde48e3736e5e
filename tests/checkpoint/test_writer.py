"""The background writer: saves a consistent state, does not wait, has no races."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    snapshot,
    tensor_file,
)
from headrace.device import Device, Event, PinnedBuffer, Stream
from headrace.errors import CheckpointError, ClosedError, EventNotRecordedError
from headrace.fake import Costs, FakeDevice
from support.storage.checkpoints import contents, names, on


def test_weights_may_be_overwritten_right_after_a_save(tmp_path: Path, device: Device) -> None:
    weight, count = on(device, 0.0, 50, 10), torch.zeros(())
    state = {"weight": weight, "again": weight, "t": weight.t(), "count": count, "none": weight[:0]}
    with CheckpointWriter(device, tmp_path, keep=9) as writer:
        for step in range(4):
            writer.save({**state, "step": step}, step)
            weight += 1
            count += 1
    for step in range(4):
        found = load_checkpoint(tmp_path / f"step-{step:08d}")
        assert found["step"] == step
        assert torch.equal(found["weight"], torch.full((50, 10), float(step)))
        assert torch.equal(found["t"], torch.full((10, 50), float(step)))
        assert torch.equal(found["count"], torch.tensor(float(step)))
        assert found["again"].data_ptr() == found["weight"].data_ptr()
        assert found["none"].shape == (0, 10)
    assert device.pinned.lent == 0


def test_background_and_foreground_write_the_same_bytes(tmp_path: Path, device: Device) -> None:
    state = {"a": on(device, 1.0, 3, 4).t(), "b": [on(device, 2.0), torch.ones(2)]}
    (tmp_path / "back").mkdir()
    (tmp_path / "fore").mkdir()
    with CheckpointWriter(device, tmp_path / "back") as writer:
        writer.save(state, 3, wait=True)
        assert latest_checkpoint(tmp_path / "back") is not None
    save_checkpoint(tmp_path / "fore", state, step=3, device=device)
    assert contents(tmp_path / "back") == contents(tmp_path / "fore")


def test_save_does_not_wait_and_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), os.write

    def write_later(*args: Any) -> int:
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(os, "write", write_later)
    with FakeDevice(costs=Costs(query_us=0)) as device:
        weight = on(device, 1.0, 4)
        writer = CheckpointWriter(device, tmp_path)
        device.work(50.0)
        began = device.now_ms
        writer.save({"weight": weight}, 1)
        assert device.now_ms == began
        assert device.ledger.statistics()["checkpoint"].count == 0
        assert latest_checkpoint(tmp_path) is None
        weight.fill_(2.0)
        may_write.set()
        writer.save({"weight": weight}, 2)
        assert device.ledger.statistics()["checkpoint"].count == 1
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        writer.close()
        waits = device.ledger.statistics()
        assert waits["checkpoint"].count == 2
        assert waits["checkpoint_copy"].count == 2
        assert waits["checkpoint_copy"].total_ms >= 50.0
        assert device.hidden_waits == []
    assert load_checkpoint(tmp_path / "step-00000001")["weight"][0] == 1.0
    assert load_checkpoint(tmp_path / "step-00000002")["weight"][0] == 2.0
    assert device.pinned.lent == 0
    assert not [thread for thread in threading.enumerate() if "headrace-ch" in thread.name]


def test_the_next_save_or_close_raises_an_error_of_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    state = {"weight": on(device, 1.0, 4)}
    broken = RuntimeError("broken")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise broken

    writer = CheckpointWriter(device, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        writer.save(state, 1)
        with pytest.raises(RuntimeError) as caught:
            writer.save(state, 2)
        assert caught.value is broken
        writer.save(state, 3)
        with pytest.raises(RuntimeError, match="broken"):
            writer.close()
    writer.close()
    assert names(tmp_path) == []
    assert device.pinned.lent == 0
    with pytest.raises(ClosedError, match="after its close"):
        writer.save(state, 4)
    with CheckpointWriter(device, tmp_path / "missing") as other:
        other.save(state, 1)
        with pytest.raises(CheckpointError, match=r"was not written to .*missing"):
            other.save(state, 2)
        other.save({}, 1, wait=False)
        with pytest.raises(CheckpointError):
            other.close()


def test_an_error_in_the_block_is_not_hidden_by_one_of_the_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_with_a_bad_folder(device: Device) -> None:
        with CheckpointWriter(device, tmp_path / "missing") as writer:
            writer.save({}, 1)
            raise ZeroDivisionError

    with FakeDevice() as device, pytest.raises(ZeroDivisionError):
        fail_with_a_bad_folder(device)
    (record,) = caplog.records
    assert record.message.startswith("the checkpoint of step 1 was not written to ")
    assert record.exc_info is None


def test_save_refuses_a_state_that_cannot_be_stored(tmp_path: Path, device: Device) -> None:
    with CheckpointWriter(device, tmp_path) as writer:
        with pytest.raises(CheckpointError, match=r"state\['a'\] is a set"):
            writer.save({"weight": on(device, 1.0), "a": {1}}, 1)
        with pytest.raises(CheckpointError, match="step = -1"):
            writer.save({}, -1)
        writer.save({"weight": on(device, 1.0)}, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert device.pinned.lent == 0


def test_no_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 64)  # a weight each
    with FakeDevice() as device, CheckpointWriter(device, tmp_path) as writer:
        taken: list[int] = []
        take = device.pinned.take

        def fail(nbytes: int) -> PinnedBuffer:
            taken.append(nbytes)
            if len(taken) == 2:
                raise MemoryError("pinned")
            return take(nbytes)

        monkeypatch.setattr(device.pinned, "take", fail)
        weights = [on(device, 1.0, 4), on(device, 2.0, 4)]
        writer.save(weights, 1)
        for weight in weights:
            weight.zero_()
        with pytest.raises(MemoryError, match="pinned"):
            writer.save(weights, 2)
        writer.save(weights, 3)
        writer.close()
        assert names(tmp_path) == ["step-00000003"]
        assert device.pinned.lent == 0
        take(16).view((4,), torch.float32).fill_(0)  # only once the copy has passed


def test_every_edge_is_load_bearing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def races(left_out: tuple[type, str] | None) -> bool:
        def nothing(*args: Any, **kwargs: Any) -> None:
            return None

        with monkeypatch.context() as patch, FakeDevice(check=False) as device:
            weight = on(device, 1.0, 400)
            if left_out is not None:
                patch.setattr(*left_out, nothing)
            try:
                with CheckpointWriter(device, tmp_path) as writer:
                    for step in range(3):
                        writer.save({"weight": weight}, step)
                        weight.mul_(2)
                        torch.ones(400, device=device.torch_device)
            except EventNotRecordedError:
                return True
        return bool(device.races)

    assert not races(None)
    assert races((Stream, "wait_event"))
    assert races((Event, "record"))
    assert races((FakeDevice, "wait"))


@pytest.mark.parametrize("fits", [True, False], ids=["cloned", "no memory for clones"])
@pytest.mark.parametrize("chunk_bytes", [64, 512, 16 << 20])
def test_chunks_use_buffers_that_were_pinned_when_the_writer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool, chunk_bytes: int
) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", chunk_bytes)
    with FakeDevice(memory_bytes=1 << 20 if fits else 12_000) as device:
        weights = {
            "a": on(device, 1.0, 1000),
            "turned": on(device, 1.0, 30).view(5, 6).t(),
            "whole": on(device, 1.0, 7).to(torch.int64),
            "none": on(device, 1.0, 0),
            "one": on(device, 1.0, 1).view(()),
        }
        with CheckpointWriter(device, tmp_path, keep=9) as writer:
            held = device.pinned.held_bytes
            for step in range(3):
                writer.save(weights, step)
                for weight in weights.values():
                    weight.add_(1)
                writer.save(weights, step, wait=True)
        assert held == device.pinned.held_bytes == 2 * max(512, chunk_bytes)
        assert device.pinned.lent == 0
        assert device.hidden_waits == []
    for step in range(3):
        found = load_checkpoint(tmp_path / f"step-{step:08d}")
        for name, weight in weights.items():
            assert torch.equal(found[name], torch.full(weight.shape, step + 2).to(weight.dtype))


@pytest.mark.parametrize("fits", [True, False], ids=["cloned", "no memory for clones"])
def test_every_dtype_is_restored_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 64)
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)  # includes signalling NaNs and -0.0
    dtypes = [*tensor_file.DTYPE_NAMES, torch.complex128]
    state = {str(dtype): raw.view(dtype) for dtype in dtypes if dtype is not torch.bool}
    state["flags"] = raw > 99
    with FakeDevice() as device, CheckpointWriter(device, tmp_path) as writer:
        there = {name: value.to(device.torch_device) for name, value in state.items()}
        there |= {f"{name} from 3": value[3:] for name, value in there.items()}
        device.limit_memory(None if fits else device.memory().allocated + 100)
        writer.save(there, 1, wait=True)
    found = load_checkpoint(tmp_path / "step-00000001")
    for name, value in state.items():
        for one, expected in ((found[name], value), (found[f"{name} from 3"], value[3:])):
            assert one.dtype == value.dtype
            assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fits", [True, False], ids=["cloned", "no memory for clones"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("what", ["wait", "copy"])
def test_ctrl_c_during_the_copy_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool, at: int, what: str
) -> None:
    """Every buffer is given back, and no memory is reused while a copy may still read it."""
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 512)
    with FakeDevice() as device:
        weight, calls = on(device, 1.0, 500), [0]
        original = getattr(device, what)

        def interrupted(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return original(*args, **options)

        device.limit_memory(None if fits else device.memory().allocated + 100)
        with monkeypatch.context() as patch:
            patch.setattr(device, what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, {"weight": weight}, step=1, device=device)
        assert device.pinned.lent == 0
        device.limit_memory(None)
        torch.zeros(500, device=device.torch_device).add_(1)
        device.pinned.take(512).view((512,), torch.uint8).fill_(0)
        assert not device.races


def test_nothing_is_written_if_the_check_raises(tmp_path: Path) -> None:
    with FakeDevice() as device:
        weight = on(device, 1.0, 4)

        def check() -> None:
            device.work(30.0)
            weight.mul_(2)  # after the clone
            device.synchronize("check")

        def fail() -> None:
            raise ZeroDivisionError

        with CheckpointWriter(device, tmp_path, keep=9) as writer:
            before = device.memory().allocated
            writer.save({"weight": weight}, 1, unless_raised=check)
            with pytest.raises(ZeroDivisionError) as caught:
                writer.save({"weight": weight}, 2, unless_raised=fail)
            assert device.memory().allocated == before
            del caught
            writer.save({"weight": weight}, 3)
        assert device.pinned.lent == 0
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert load_checkpoint(tmp_path / "step-00000001")["weight"][0] == 1.0


def test_a_free_buffer_is_available_while_another_is_being_pinned() -> None:
    with FakeDevice() as device:
        device.pinned.take(512).release()
        allocate, begun, may_end = device.pinned._allocate, threading.Event(), threading.Event()

        def slow(nbytes: int) -> torch.Tensor:
            begun.set()
            assert may_end.wait(60)
            return allocate(nbytes)

        device.pinned._allocate = slow  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: device.pinned.take(1 << 20).release())
        thread.start()
        assert begun.wait(60)
        device.pinned.take(512).release()  # does not wait for the other
        may_end.set()
        thread.join()
        assert device.pinned.held_bytes == 512 + (1 << 20)
        assert device.pinned.lent == 0


def test_close_does_not_hang_after_ctrl_c_in_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeDevice() as device:
        writer = CheckpointWriter(device, tmp_path)
        put = writer._queue.put

        def interrupted(job: Any) -> None:
            monkeypatch.setattr(writer._queue, "put", put)
            raise KeyboardInterrupt

        monkeypatch.setattr(writer._queue, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.save({"weight": on(device, 1.0, 4)}, 1)
        writer.close()
        assert device.pinned.lent == 0
    assert not [thread for thread in threading.enumerate() if "headrace-ch" in thread.name]
