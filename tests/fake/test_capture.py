"""What a capture on the fake device refuses, as CUDA does, and that it leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from headrace.errors import CaptureError
from headrace.fake import FakeDevice
from support.graphs.captures import TrainedModel, line, on, same


def host_index(value: torch.Tensor) -> object:
    return value[torch.tensor([0])]


@pytest.mark.parametrize(
    ("refused", "what"),
    [
        (lambda value: value.sum().item(), "aten::_local_scalar_dense"),
        (lambda value: value.nonzero(), "aten::nonzero"),
        (lambda value: value[value > 0], "aten::index"),
        (lambda value: value.tolist(), "tolist"),
        (lambda value: str(value), "repr"),
        (lambda value: value.cpu(), "copy to pageable memory"),
        (lambda value: value.copy_(torch.ones(4)), "copy from pageable memory"),
        (lambda value: value.copy_(torch.ones(4), non_blocking=True), "copy from pageable"),
        (lambda value: value.copy_(torch.ones(4).pin_memory()), "blocking copy"),
        (lambda value: torch.tensor([1.0], device=value.device), "copy from pageable memory"),
        (host_index, "index from host memory"),
        (lambda value: value.bernoulli_(0.5, generator=torch.Generator()), "random numbers"),
    ],
)
def test_host_waits(
    device: FakeDevice, refused: Callable[[torch.Tensor], object], what: str
) -> None:
    value = on(device, 4)
    lines = []

    def work() -> None:
        value.mul_(2)
        lines.append(line() + 1)
        refused(value)

    waits = len(device.hidden_waits)
    with pytest.raises(CaptureError, match=r"^the step could not be captured$") as raised:
        device.capture(work, device.graph_pool())
    cause = raised.value.__cause__
    assert isinstance(cause, RuntimeError)
    message = f"operation not permitted when stream is capturing: {what}"
    assert str(cause).startswith(message)
    trace = cause.__traceback__
    seen = set()
    while trace is not None:
        seen.add(trace.tb_lineno)
        trace = trace.tb_next
    assert lines[0] in seen
    assert len(device.hidden_waits) == waits
    assert value.tolist() == [1.0] * 4


def test_the_seams_own_waits(device: FakeDevice) -> None:
    passed, inside = device.event(), device.event()
    passed.record()
    works: list[Callable[[], object]] = [
        lambda: device.synchronize("test"),
        lambda: device.synchronize("test", device.stream("capture")),
        lambda: device.wait(passed, "test"),
        passed.query,
        lambda: device.current_stream().query(),
        lambda: device.current_stream().wait_event(passed),
        lambda: device.current_stream().wait_stream(device.default_stream),
        lambda: device.default_stream.wait_stream(device.current_stream()),
        lambda: (inside.record(), inside.query()),
    ]
    for work in works:
        with pytest.raises(CaptureError) as raised:
            device.capture(work, device.graph_pool())
        assert "not permitted when stream is capturing" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="an event last recorded in a capturing stream"):
        device.wait(inside, "test")
    with pytest.raises(RuntimeError, match="last recorded in another capture"):
        device.default_stream.wait_event(inside)


def test_another_thread_may_wait_for_what_is_not_captured(device: FakeDevice) -> None:
    passed, answers = device.event(), []
    passed.record()

    def ask() -> None:
        answers.append(passed.query())
        with pytest.raises(RuntimeError, match="when stream is capturing"):
            device.synchronize("test", device.stream("capture"))

    def work() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    with pytest.raises(CaptureError):
        device.capture(work, device.graph_pool())
    assert answers == [True]


def test_an_error_that_is_swallowed(device: FakeDevice) -> None:
    value = on(device, 1)

    def work() -> None:
        with pytest.raises(RuntimeError):
            value.item()

    with pytest.raises(CaptureError) as raised:
        device.capture(work, device.graph_pool())
    assert "aten::_local_scalar_dense" in str(raised.value.__cause__)


def test_what_is_no_error_goes_through(device: FakeDevice) -> None:
    value = on(device, 1)

    def work() -> None:
        value.add_(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.capture(work, device.graph_pool())
    assert value.item() == 1.0


def test_an_optimizer_whose_count_of_steps_is_the_hosts(device: FakeDevice) -> None:
    training = TrainedModel(device, fused=False, capturable=False)
    training.eager(range(1))
    with pytest.raises(CaptureError) as raised:
        device.capture(training.step, device.graph_pool())
    assert "capturable is False" in str(raised.value.__cause__)


def test_gradients_that_belong_to_the_default_stream(device: FakeDevice) -> None:
    weight = on(device, 2).requires_grad_()

    def work() -> None:
        weight.grad = None
        (weight * 2).sum().backward()

    loss = weight.sum()  # keeps the node that accumulates the weight's gradient
    with pytest.raises(CaptureError) as raised:
        device.capture(work, device.graph_pool())
    assert "the default stream would depend" in str(raised.value.__cause__)
    del loss, raised
    weight.grad = None
    device.capture(work, device.graph_pool())


def test_training_goes_on_as_if_nothing_had_been(device: FakeDevice) -> None:
    undisturbed = TrainedModel(device)
    expected = undisturbed.eager(range(8))
    training = TrainedModel(device)
    found = training.eager(range(2))
    before = training.state()
    with pytest.raises(CaptureError):
        device.capture(lambda: training.step().item(), device.graph_pool())
    assert same(training.state(), before)
    found += training.eager(range(2, 7))
    graph, loss = device.capture(training.step, device.graph_pool())
    training.load(7)
    graph.replay()
    assert [*found, loss.item()] == expected
    assert same(training.state(), undisturbed.state())


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"), reason="newer PyTorch"
)
def test_gradients_of_the_default_stream_brought_over(device: FakeDevice) -> None:
    weight = on(device, 2).requires_grad_()
    loss = weight.sum()
    torch.autograd.graph.set_override_stale_capture_stream(True)
    try:
        graph, _ = device.capture(lambda: (weight * 2).sum().backward(), device.graph_pool())
    finally:
        torch.autograd.graph.set_override_stale_capture_stream(False)
    graph.replay()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]
    assert loss.item() == 2.0


@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointing_that_sets_the_random_state(device: FakeDevice, preserve: bool) -> None:
    layer, value = torch.nn.Linear(4, 4).to(device.torch_device), on(device, 2, 4)

    def work() -> None:
        layer.weight.grad = layer.bias.grad = None
        result = checkpoint(layer, value, use_reentrant=False, preserve_rng_state=preserve)
        assert isinstance(result, torch.Tensor)
        result.square().sum().backward()

    work()
    expected = layer.bias.grad
    if preserve:
        with pytest.raises(CaptureError) as raised:
            device.capture(work, device.graph_pool())
        assert "torch.set_rng_state()" in str(raised.value.__cause__)
        return
    graph, _ = device.capture(work, device.graph_pool())
    graph.replay()
    assert layer.bias.grad is not expected
    assert layer.bias.grad.tolist() == expected.tolist()
