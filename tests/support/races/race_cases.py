"""Stream bugs, each with its correct twin.

A case runs with `bug=True`, where the checker must report exactly the race between the lines
marked FIRST and SECOND, and with `bug=False`, where it must report nothing. If the bug is a missing
call, the twin has the call.
"""

from __future__ import annotations

import contextlib
import functools
import io
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from headrace.device import Device
from headrace.fake import FakeDevice, FakeStream

Case = Callable[[FakeDevice, bool], object]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def pinned(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).pin_memory()


def on(device: Device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device.torch_device)


def split(device: FakeDevice, *names: str) -> list[FakeStream]:
    """Streams that have waited for the current one."""
    streams = [device.stream(name) for name in names]
    for stream in streams:
        stream.wait_stream(device.current_stream())
    return streams


# --- copies and slots -----------------------------------------------------------------------------


@case
def slot_read_before_its_copy_is_done(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.current_stream(), device.stream("transfer")
    slot, staging, ready = device.empty((64,), torch.float32), pinned(64), device.event()
    transfer.wait_stream(compute)
    with device.use(transfer):
        device.copy(slot, staging)  # FIRST
        ready.record()
    if not bug:
        compute.wait_event(ready)
    return slot * 2  # SECOND


@case
def slot_refilled_while_it_is_read(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.current_stream(), device.stream("transfer")
    slot, ready, done = device.empty((64,), torch.float32), device.event(), device.event()
    transfer.wait_stream(compute)
    with device.use(transfer):
        device.copy(slot, pinned(64))
        ready.record()
    compute.wait_event(ready)
    result = slot * 2  # FIRST
    done.record()
    if not bug:
        transfer.wait_event(done)
    with device.use(transfer):
        device.copy(slot, pinned(64))  # SECOND
    return result


@case
def two_streams_fill_one_slot(device: FakeDevice, bug: bool) -> object:
    one, two = device.stream("transfer"), device.stream("transfer_next")
    slot = device.empty((64,), torch.float32)
    with device.use(one):
        device.copy(slot, pinned(64))  # FIRST
    if not bug:
        two.wait_stream(one)
    with device.use(two):
        device.copy(slot, pinned(64))  # SECOND
    return slot


@case
def slot_filled_before_its_owner_is_done(device: FakeDevice, bug: bool) -> object:
    # Fresh memory belongs to the stream it was allocated on, which may still use what was there.
    compute, transfer = device.current_stream(), device.stream("transfer")
    (on(device, 64) * 2).sum()
    slot = device.empty((64,), torch.float32)  # FIRST
    if not bug:
        transfer.wait_stream(compute)
    with device.use(transfer):
        device.copy(slot, pinned(64))  # SECOND
    return slot


@case
def slot_copied_on_the_device_too_early(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.current_stream(), device.stream("transfer")
    slot, static = device.empty((64,), torch.float32), device.empty((64,), torch.float32)
    transfer.wait_stream(compute)
    with device.use(transfer):
        device.copy(slot, pinned(64))  # FIRST
    if not bug:
        compute.wait_stream(transfer)
    device.copy(static, slot)  # SECOND
    return static


@case
def static_output_overwritten_while_it_is_read_back(device: FakeDevice, bug: bool) -> object:
    compute, losses = device.current_stream(), device.stream("losses")
    loss, host, copied = on(device, 1), pinned(4), device.event()
    losses.wait_stream(compute)
    with device.use(losses):
        device.copy(host[0:1], loss)  # FIRST
        copied.record()
    if not bug:
        compute.wait_event(copied)
    loss.copy_(on(device, 1))  # SECOND
    return loss


@case
def ordinary_memory_is_only_staged(device: FakeDevice, bug: bool) -> object:
    # The host waits while the driver reads the bytes, but they need not have arrived yet.
    compute, transfer = device.current_stream(), device.stream("transfer")
    slot, ready = device.empty((64,), torch.float32), device.event()
    transfer.wait_stream(compute)
    with device.use(transfer):
        slot.copy_(torch.ones(64), non_blocking=True)  # FIRST
        ready.record()
    if not bug:
        compute.wait_event(ready)
    return slot * 2  # SECOND


@case
def slot_filled_by_deterministic_mode_after_its_copy(device: FakeDevice, bug: bool) -> object:
    # With deterministic algorithms `empty` fills its memory, by a kernel on the allocating stream.
    compute, transfer = device.current_stream(), device.stream("transfer")
    idle = device.event()
    torch.use_deterministic_algorithms(True)
    try:
        if bug:
            idle.record(compute)
        slot = device.empty((64,), torch.float32)  # FIRST
        if not bug:
            idle.record(compute)
        transfer.wait_event(idle)
        with device.use(transfer):
            device.copy(slot, pinned(64))  # SECOND
    finally:
        torch.use_deterministic_algorithms(False)
    return slot


# --- byte ranges ----------------------------------------------------------------------------------


@case
def race_through_an_offset_view(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    buffer = torch.zeros(64, device=device.torch_device)
    side.wait_stream(compute)
    with device.use(side):
        buffer[8:].fill_(1)  # FIRST
    return (buffer if bug else buffer[:8]) + 1  # SECOND


@case
def race_between_columns(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    table = torch.zeros(8, 8, device=device.torch_device)
    side.wait_stream(compute)
    with device.use(side):
        table[:, 4:].fill_(1)  # FIRST
    return table[:, : 5 if bug else 4] + 1  # SECOND


@case
def race_through_a_transposed_view(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    table = torch.zeros(8, 8, device=device.torch_device)
    side.wait_stream(compute)
    with device.use(side):
        table.t()[2].mul_(2)  # FIRST
    return table[:, 2 if bug else 3].sum()  # SECOND


@case
def race_through_scattered_writes(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    counts = torch.zeros(16, device=device.torch_device)
    rows = torch.zeros(4, dtype=torch.int64, device=device.torch_device)
    side.wait_stream(compute)
    with device.use(side):
        counts.index_add_(0, rows, torch.ones(4, device=device.torch_device))  # FIRST
    if not bug:
        compute.wait_stream(side)
    return counts.sum()  # SECOND


@case
def race_in_a_column_of_a_tall_matrix(device: FakeDevice, bug: bool) -> object:
    # More pieces than the checker compares. The other column's write must not hide this one's.
    compute, side = device.current_stream(), device.stream("side")
    table = torch.zeros(200_000, 2, device=device.torch_device)
    side.wait_stream(compute)
    with device.use(side):
        table[:, 1].fill_(1)  # FIRST
        if not bug:
            compute.wait_stream(side)
        table[:, 0].fill_(1)
    return table[5:6, 1] + 1  # SECOND


# --- events ---------------------------------------------------------------------------------------


@case
def event_recorded_before_the_work(device: FakeDevice, bug: bool) -> object:
    compute, side, event = device.current_stream(), device.stream("side"), device.event()
    value = on(device, 8)
    side.wait_stream(compute)
    with device.use(side):
        if bug:
            event.record()
        value.mul_(2)  # FIRST
        if not bug:
            event.record()
    compute.wait_event(event)
    return value + 1  # SECOND


@case
def event_recorded_again_after_the_wait(device: FakeDevice, bug: bool) -> object:
    compute, side, event = device.current_stream(), device.stream("side"), device.event()
    value = on(device, 8)
    side.wait_stream(compute)
    event.record(side)
    if bug:
        compute.wait_event(event)  # sees the record above, not the one to come
    with device.use(side):
        value.mul_(2)  # FIRST
    event.record(side)
    if not bug:
        compute.wait_event(event)
    return value + 1  # SECOND


@case
def event_of_the_wrong_stream(device: FakeDevice, bug: bool) -> object:
    compute, one, two = device.current_stream(), device.stream("one"), device.stream("two")
    value, event = on(device, 8), device.event()
    one.wait_stream(compute)
    with device.use(one):
        value.mul_(2)  # FIRST
    event.record(two if bug else one)
    compute.wait_event(event)
    return value + 1  # SECOND


@case
def wait_stream_sees_only_what_is_queued(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    value = on(device, 8)
    side.wait_stream(compute)
    if bug:
        compute.wait_stream(side)
    with device.use(side):
        value.mul_(2)  # FIRST
    if not bug:
        compute.wait_stream(side)
    return value + 1  # SECOND


@case
def chain_with_a_missing_link(device: FakeDevice, bug: bool) -> object:
    start, middle, end = (device.stream(name) for name in ("start", "middle", "end"))
    value = on(device, 8)
    start.wait_stream(device.current_stream())
    with device.use(start):
        value.mul_(2)  # FIRST
    if not bug:
        middle.wait_stream(start)
    end.wait_stream(middle)
    with device.use(end):
        return value + 1  # SECOND


# --- the host -------------------------------------------------------------------------------------


@case
def list_read_before_the_copy_is_done(device: FakeDevice, bug: bool) -> object:
    losses, host, copied = on(device, 8), pinned(8), device.event()
    device.copy(host, losses)  # FIRST
    copied.record()
    if not bug:
        device.wait(copied, "test")
    return host.tolist()  # SECOND


@case
def number_read_before_the_copy_is_done(device: FakeDevice, bug: bool) -> object:
    loss, host, copied = on(device, 1), pinned(1), device.event()
    device.copy(host, loss)  # FIRST
    copied.record()
    if not bug:
        device.wait(copied, "test")
    return host[0].item()  # SECOND


@case
def array_read_before_the_copy_is_done(device: FakeDevice, bug: bool) -> object:
    losses, host, copied = on(device, 8), pinned(8), device.event()
    device.copy(host, losses)  # FIRST
    copied.record()
    if not bug:
        device.wait(copied, "test")
    return host.numpy().sum()  # SECOND


@case
def tensor_on_its_way_to_the_host_is_read(device: FakeDevice, bug: bool) -> object:
    # PyTorch makes the result pinned, and the copy runs beside the host.
    host, copied = on(device, 8).to("cpu", non_blocking=True), device.event()  # FIRST
    copied.record()
    if not bug:
        device.wait(copied, "test")
    return host.tolist()  # SECOND


@case
def number_on_the_host_is_used_too_early(device: FakeDevice, bug: bool) -> object:
    # A kernel takes a 0-dim host tensor's value when it is launched.
    scale, host, copied = on(device, 1)[0], torch.zeros(()).pin_memory(), device.event()
    host.copy_(scale, non_blocking=True)  # FIRST
    copied.record()
    if not bug:
        device.wait(copied, "test")
    return scale * host  # SECOND


@case
def checkpoint_saved_too_early(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    weight = on(device, 8)
    side.wait_stream(compute)
    with device.use(side):
        weight.mul_(2)  # FIRST
    if not bug:
        compute.wait_stream(side)
    return torch.save({"weight": weight}, io.BytesIO())  # SECOND


@case
def race_inside_the_standard_library(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    value = on(device, 8)
    side.wait_stream(compute)
    with device.use(side):
        value.mul_(2)  # FIRST
    if not bug:
        compute.wait_stream(side)
    return functools.reduce(torch.add, [value, value])  # SECOND


@case
def query_whose_answer_is_ignored(device: FakeDevice, bug: bool) -> object:
    losses, host, copied = on(device, 8), pinned(8), device.event()
    device.copy(host, losses)  # FIRST
    copied.record()
    if bug:
        assert not copied.query()
    else:
        while not copied.query():
            continue
    return host.sum()  # SECOND


@case
def host_waits_for_an_earlier_copy(device: FakeDevice, bug: bool) -> object:
    losses, host = on(device, 8), pinned(8)
    early, late = device.event(), device.event()
    device.copy(host[:4], losses[:4])
    early.record()
    device.copy(host[4:], losses[4:])  # FIRST
    late.record()
    device.wait(early if bug else late, "test")
    return host[4:].tolist()  # SECOND


@case
def host_synchronizes_the_wrong_stream(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    loss, host = on(device, 1), pinned(1)
    side.wait_stream(compute)
    with device.use(side):
        device.copy(host, loss)  # FIRST
    device.synchronize("test", compute if bug else side)
    return host.tolist()  # SECOND


@case
def staging_refilled_during_its_copy(device: FakeDevice, bug: bool) -> object:
    slot, staging, copied = device.empty((64,), torch.float32), pinned(64), device.event()
    device.copy(slot, staging)  # FIRST
    copied.record()
    if not bug:
        device.wait(copied, "test")
    staging.fill_(1)  # SECOND
    return slot


@case
def pool_lends_a_buffer_whose_copy_still_runs(device: FakeDevice, bug: bool) -> object:
    slot, copied = device.empty((128,), torch.float32), device.event()
    for value in range(2):
        buffer = device.pinned.take(512)
        staging = buffer.view((128,), torch.float32)
        staging.fill_(value)  # SECOND
        device.copy(slot, staging)  # FIRST
        copied.record()
        buffer.release(after=None if bug else copied)
    return slot


# --- memory ---------------------------------------------------------------------------------------


@case
def memory_reused_while_another_stream_reads(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    value = on(device, 1000)
    side.wait_stream(compute)
    with device.use(side):
        read = value * 2  # FIRST
    if not bug:
        device.record_stream(value, side)
    del value
    return read, torch.ones(1000, device=device.torch_device)  # SECOND


@case
def memory_recorded_for_the_wrong_stream(device: FakeDevice, bug: bool) -> object:
    compute, side, other = device.current_stream(), device.stream("side"), device.stream("other")
    value = on(device, 1000)
    side.wait_stream(compute)
    with device.use(side):
        read = value * 2  # FIRST
    device.record_stream(value, other if bug else side)
    del value
    return read, torch.ones(900, device=device.torch_device)  # SECOND


@case
def memory_freed_before_the_streams_meet(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    value, host = on(device, 1000), pinned(1000)
    side.wait_stream(compute)
    with device.use(side):
        device.copy(host, value)  # FIRST
    if not bug:
        compute.wait_stream(side)
    del value
    fresh = device.empty((1000,), torch.float32)  # SECOND
    fresh.fill_(0)
    return host


@case
def older_of_two_freed_tensors_is_still_read(device: FakeDevice, bug: bool) -> object:
    compute, slow, fast = device.current_stream(), device.stream("slow"), device.stream("fast")
    one, two = on(device, 1000), on(device, 1000)
    slow.wait_stream(compute)
    fast.wait_stream(compute)
    with device.use(slow):
        read = one * 2  # FIRST
    with device.use(fast):
        read_too = two * 2
    del one, two
    compute.wait_stream(fast)
    if not bug:
        compute.wait_stream(slow)
    return read, read_too, torch.ones(1000, device=device.torch_device)  # SECOND


# --- training -------------------------------------------------------------------------------------


@case
def optimizer_does_not_wait_for_backward(device: FakeDevice, bug: bool) -> object:
    forward, backward = device.stream("forward"), device.stream("backward")
    weight = on(device, 8).requires_grad_()
    forward.wait_stream(device.current_stream())
    with device.use(forward):
        loss = (weight * weight).sum()
    backward.wait_stream(forward)
    with device.use(backward):
        loss.backward()  # FIRST
    update = device.stream("update")
    if not bug:
        update.wait_stream(backward)
    with device.use(update), torch.no_grad():
        weight.grad.clone()  # SECOND
    return weight


@case
def next_forward_does_not_wait_for_the_optimizer(device: FakeDevice, bug: bool) -> object:
    forward, backward = device.stream("forward"), device.stream("backward")
    weight, updated = on(device, 8).requires_grad_(), device.event()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    forward.wait_stream(device.current_stream())
    with device.use(forward):
        loss = weight.sum()
    backward.wait_stream(forward)
    with device.use(backward):
        loss.backward()
        optimizer.step()  # FIRST
        updated.record()
    if not bug:
        forward.wait_event(updated)
    with device.use(forward):
        return weight.sum()  # SECOND


@case
def gradients_zeroed_while_backward_runs(device: FakeDevice, bug: bool) -> object:
    compute, side = device.current_stream(), device.stream("side")
    weight = on(device, 8).requires_grad_()
    (weight * 2).sum().backward()
    (weight * 2).sum().backward()  # FIRST
    if not bug:
        side.wait_stream(compute)
    with device.use(side):
        weight.grad.zero_()  # SECOND
    return weight


@case
def backward_op_reads_what_another_stream_overwrites(device: FakeDevice, bug: bool) -> object:
    # The backward of `weight * batch` reads `batch` on the forward's stream.
    forward, side = device.stream("forward"), device.stream("side")
    weight, batch = on(device, 8).requires_grad_(), on(device, 8)
    forward.wait_stream(device.current_stream())
    side.wait_stream(device.current_stream())
    with device.use(forward):
        loss = (weight * batch).sum()
        loss.backward()  # FIRST
    if not bug:
        side.wait_stream(forward)
    with device.use(side):
        device.copy(batch.detach(), pinned(8))  # SECOND
    return weight


@case
def hook_chooses_the_stream_backward_was_called_under(device: FakeDevice, bug: bool) -> object:
    # The gradient is computed on the forward's stream, and the caller's has not waited for it.
    forward, backward = device.stream("forward"), device.stream("backward")
    weight = on(device, 8).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    forward.wait_stream(device.current_stream())
    backward.wait_stream(device.current_stream())

    def step(_: torch.Tensor) -> None:
        if not bug:
            backward.wait_stream(device.current_stream())
        with device.use(backward):
            optimizer.step()  # SECOND

    weight.register_post_accumulate_grad_hook(step)
    with device.use(forward):
        loss = (weight * weight).sum()
    backward.wait_stream(forward)
    with device.use(backward):
        loss.backward()  # FIRST
    return loss


@case
def backward_of_a_custom_function(device: FakeDevice, bug: bool) -> object:
    # It runs on its forward's stream, too, even as the last operation of the loss. If backward()
    # fails after it, the caller's stream has not waited for it.
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(factor)
            return value * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * ctx.saved_tensors[0], None  # FIRST

    forward, backward = device.stream("forward"), device.stream("backward")
    weight, factor = on(device, 1)[0].requires_grad_(), on(device, 1)[0]
    weight.register_hook(fail)
    forward.wait_stream(device.current_stream())
    with device.use(forward):
        loss = Scaled.apply(weight, factor)
    backward.wait_stream(forward)
    with device.use(backward):
        with contextlib.suppress(KeyError):
            loss.backward()
        if not bug:
            backward.wait_stream(forward)
        factor.zero_()  # SECOND
    return loss


def fail(gradient: torch.Tensor) -> None:
    raise KeyError("a hook that fails")


@case
def running_figures_read_while_they_are_updated(device: FakeDevice, bug: bool) -> object:
    # The schema of batch normalisation does not say that it writes them.
    compute, side = device.current_stream(), device.stream("side")
    norm, batch = torch.nn.BatchNorm1d(4).to(device.torch_device), on(device, 8, 4)
    side.wait_stream(compute)
    with device.use(side):
        result = norm(batch)  # FIRST
    if not bug:
        compute.wait_stream(side)
    return result, norm.running_mean + 1  # SECOND


@case
def one_unordered_batch_in_a_whole_training_loop(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.current_stream(), device.stream("transfer")
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)
    ).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters())
    slot, ready, done = device.empty((8, 16), torch.float32), device.event(), device.event()
    done.record()
    for step in range(3):
        transfer.wait_event(done)
        with device.use(transfer):
            device.copy(slot, pinned(8, 16))  # FIRST
            ready.record()
        if not (bug and step == 2):
            compute.wait_event(ready)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(slot).float().pow(2).mean()  # SECOND
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done.record()
        # After the race the loop is ordered again, so that there is only one report.
        compute.wait_event(ready)
    return model


# --- graphs ---------------------------------------------------------------------------------------


@case
def static_input_refilled_before_the_replay(device: FakeDevice, bug: bool) -> object:
    # The capture itself needs no order: nothing runs.
    compute, transfer = device.current_stream(), device.stream("transfer")
    static, ready = device.empty((64,), torch.float32), device.event()
    transfer.wait_stream(compute)
    graph, result = device.capture(lambda: (static * 2).sum(), device.graph_pool())
    with device.use(transfer):
        device.copy(static, pinned(64))  # FIRST
        ready.record()
    if not bug:
        compute.wait_event(ready)
    graph.replay()  # SECOND
    return result


@case
def static_input_refilled_while_the_graph_runs(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.current_stream(), device.stream("transfer")
    static, weight, done = on(device, 64), on(device, 64).requires_grad_(), device.event()
    transfer.wait_stream(compute)

    def step() -> None:
        weight.grad = None
        (weight * static).sum().backward()

    graph, _ = device.capture(step, device.graph_pool())
    graph.replay()  # FIRST
    done.record()
    if not bug:
        transfer.wait_event(done)
    with device.use(transfer):
        device.copy(static, pinned(64))  # SECOND
    return weight


@case
def graphs_loss_read_on_another_stream(device: FakeDevice, bug: bool) -> object:
    compute, losses, host = device.current_stream(), device.stream("losses"), pinned(1)
    static = on(device, 64)
    losses.wait_stream(compute)
    graph, loss = device.capture(lambda: static.square().mean(), device.graph_pool())
    graph.replay()  # FIRST
    if not bug:
        losses.wait_stream(compute)
    with device.use(losses):
        device.copy(host[0], loss)  # SECOND
    return loss


@case
def graphs_of_one_pool_at_the_same_time(device: FakeDevice, bug: bool) -> object:
    # Each has its own results, but their other memory is the pool's, which they share.
    compute, side, pool = device.current_stream(), device.stream("side"), device.graph_pool()
    one, two = on(device, 64), on(device, 64)
    side.wait_stream(compute)
    first, first_result = device.capture(lambda: (one * 2).sum(), pool)
    second, second_result = device.capture(lambda: (two * 2).sum(), pool)
    first.replay()  # FIRST
    if not bug:
        side.wait_stream(compute)
    with device.use(side):
        second.replay()  # SECOND
    return first_result, second_result


# --- host threads ---------------------------------------------------------------------------------


@case
def thread_forgets_to_choose_its_stream(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.stream("compute"), device.stream("transfer")
    slot, ready = device.empty((64,), torch.float32), device.event()
    transfer.wait_stream(device.current_stream())
    compute.wait_stream(device.current_stream())

    def load() -> None:
        # Each thread has its own current stream: a new one starts on the default stream.
        with device.use(device.current_stream() if bug else transfer):
            device.copy(slot, pinned(64))  # FIRST
        ready.record(transfer)

    with device.use(transfer):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    compute.wait_event(ready)
    with device.use(compute):
        return slot * 2  # SECOND


@case
def batch_from_a_queue_is_used_without_its_event(device: FakeDevice, bug: bool) -> object:
    compute, transfer = device.current_stream(), device.stream("transfer")
    transfer.wait_stream(compute)
    batches: queue.Queue[tuple[torch.Tensor, object]] = queue.Queue()

    def load() -> None:
        with device.use(transfer):
            ready = device.event()
            batch = pinned(64).to(device.torch_device, non_blocking=True)  # FIRST
            ready.record()
        batches.put((batch, ready))

    thread = threading.Thread(target=load)
    thread.start()
    batch, ready = batches.get()
    if not bug:
        compute.wait_event(ready)
    total = batch.sum()  # SECOND
    thread.join()
    return total, batch


@case
def another_thread_waited_and_did_not_say_so(device: FakeDevice, bug: bool) -> object:
    loss, host, copied = on(device, 1), pinned(1), device.event()
    device.copy(host, loss)  # FIRST
    copied.record()
    thread = threading.Thread(target=device.wait, args=(copied, "test"))
    thread.start()
    if not bug:
        thread.join()
    number = host.tolist()  # SECOND
    thread.join()
    return number


@case
def staging_filled_by_a_thread_nobody_waited_for(device: FakeDevice, bug: bool) -> object:
    slot, staging = device.empty((64,), torch.float32), pinned(64)
    filled = threading.Event()

    def fill() -> None:
        staging.fill_(1)  # FIRST
        filled.set()

    thread = threading.Thread(target=fill)
    thread.start()
    if not bug:
        filled.wait()
    else:
        _wait_without_being_seen(thread)
    device.copy(slot, staging)  # SECOND
    thread.join()
    return slot


@case
def memory_freed_by_a_thread_before_its_copy_is_done(device: FakeDevice, bug: bool) -> object:
    # The allocator reuses memory across threads: a thread that has waited may free it.
    compute, side = device.current_stream(), device.stream("side")
    lent, host = [on(device, 1000)], pinned(1000)
    side.wait_stream(compute)

    def save() -> None:
        with device.use(side):
            device.copy(host, lent[0])  # FIRST
            if not bug:
                device.synchronize("test", side)
        lent.clear()

    thread = threading.Thread(target=save)
    thread.start()
    _wait_without_being_seen(thread)
    fresh = torch.ones(1000, device=device.torch_device)  # SECOND
    thread.join()
    return fresh


def _wait_without_being_seen(thread: threading.Thread) -> None:
    """Wait for the thread in a way that the checker does not see: nothing orders the two."""
    while thread.is_alive():
        continue
