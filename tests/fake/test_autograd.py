"""Backward on the fake device: correct programs that must be clean, and what hooks see."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from headrace.fake import FakeDevice, fake_cuda
from support.races.race_cases import split


def test_gradients_meet_at_a_leaf() -> None:
    with FakeDevice() as device:
        weight = torch.ones(8, device=device.torch_device, requires_grad=True)
        losses = []
        for factor, side in enumerate(split(device, "one", "two")):
            with device.use(side):
                losses.append((weight * (factor + 1)).sum())
            device.current_stream().wait_stream(side)
        sum(losses).backward()  # type: ignore[union-attr]
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0] * 8


def test_gradients_that_meet_are_added_where_they_meet() -> None:
    with FakeDevice() as device:
        weight = torch.ones(8, device=device.torch_device, requires_grad=True)
        (first,) = split(device, "first")
        with device.use(first):
            shared = weight * 2
        losses = []
        for name in ("left", "right"):
            side = device.stream(name)
            side.wait_stream(first)
            with device.use(side):
                losses.append((shared * 3).sum())
            device.current_stream().wait_stream(side)
        before = len(device.timeline().spans)
        (losses[0] + losses[1]).backward()
        sums = [s.lane for s in device.timeline().spans[before:] if s.name.startswith("aten::add")]
    assert sums == ["default", "first"]  # the loss, and the two gradients of `shared`


def test_one_module_on_two_streams() -> None:
    with FakeDevice() as device:
        model = torch.nn.Linear(4, 4).to(device.torch_device)
        batch = torch.ones(2, 4, device=device.torch_device)
        results = []
        for side in split(device, "one", "two"):
            with device.use(side):
                results.append(model(batch))
            device.current_stream().wait_stream(side)
        (results[0] - results[1]).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_a_tensors_hook_is_ordered_like_its_node() -> None:
    with FakeDevice() as device:
        weight = torch.ones(8, device=device.torch_device, requires_grad=True)
        (one,) = split(device, "one")
        with device.use(one):
            value = weight * 2
            value.register_hook(lambda gradient: gradient * 2)
        two = device.stream("two")
        two.wait_stream(one)
        with device.use(two):
            (value * 3).sum().backward()
    assert any(span.lane == "one" for span in device.timeline().spans)


def test_hooks_see_the_device() -> None:
    seen: dict[str, object] = {}

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen["device"] = parameter.grad.device
        seen["on host"] = parameter.grad.cpu().device
        seen["made"] = torch.ones(3).device
        seen["moved"] = torch.ones(3).to(parameter.device).device
        seen["pinned"] = torch.ones(3).pin_memory().is_pinned()

    with FakeDevice() as device:
        weight = torch.ones(4, device=device.torch_device, requires_grad=True)
        weight.register_post_accumulate_grad_hook(hook)
        (weight * 2).sum().backward()
        by_method = dict(seen)
        torch.autograd.backward((weight * 2).sum())
    host = torch.device("cpu")
    here = device.torch_device
    expected = {"device": here, "on host": host, "made": host, "moved": here, "pinned": True}
    assert by_method == seen == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_backward_on_a_stream_of_its_own(reentrant: bool) -> None:
    with FakeDevice() as device:
        model = torch.nn.Linear(8, 8).to(device.torch_device)
        batch = torch.ones(3, 8, device=device.torch_device)
        (forward,) = split(device, "forward")
        with device.use(forward):
            middle = checkpoint(model, model(batch), use_reentrant=reentrant)
            loss = model(middle).mean()
        backward = device.stream("backward")
        backward.wait_stream(forward)
        before = len(device.timeline().spans)
        with device.use(backward):
            loss.backward()
        lanes = {span.lane for span in device.timeline().spans[before + 1 :]}
    assert lanes == {"forward"}


def test_a_stream_that_a_hook_left_chosen_ends_with_its_node() -> None:
    def choose(gradient: torch.Tensor) -> None:
        device.stream("stray").wait_stream(device.current_stream())
        device.switch(device.stream("stray"))

    with FakeDevice(check=False) as device:  # the engine does not know, and does not wait
        weight = torch.ones(8, device=device.torch_device, requires_grad=True)
        value = weight.exp() * 2
        value.register_hook(choose)
        (value * 3).sum().backward()
        assert device.current_stream().name == "default"
    # The node's own work goes there, as on a GPU; the next one's does not.
    assert [span.name for span in device.timeline().on("stray")] == ["aten::mul"]
    assert device.timeline().spans[-1].lane == "default"


def test_a_failed_backward_leaves_nothing_behind() -> None:
    def broken(gradient: torch.Tensor) -> None:
        device.switch(device.stream("stray"))
        raise KeyError("mine")

    with FakeDevice() as device:
        weight = torch.ones(8, device=device.torch_device, requires_grad=True)
        value = weight * 2
        handle = value.register_hook(broken)
        (side,) = split(device, "side")
        with device.use(side):
            with pytest.raises(KeyError, match="mine"):
                value.sum().backward(retain_graph=True)
            assert device.current_stream() is side
        handle.remove()
        device.current_stream().wait_stream(side)
        value.sum().backward()


def test_a_loss_on_the_host() -> None:
    with FakeDevice() as device:
        model = torch.nn.Linear(4, 3).to(device.torch_device)
        result = model(torch.ones(2, 4, device=device.torch_device)).cpu()
        result.square().sum().backward()
        assert model.weight.grad is not None
        assert device.holds(model.weight.grad)


def test_an_input_that_was_moved_gets_its_gradient_back() -> None:
    with FakeDevice() as device:
        batch = torch.ones(2, 4, requires_grad=True)
        model = torch.nn.Linear(4, 3).to(device.torch_device)
        model((batch * 2).to(device.torch_device, torch.float64).float()).sum().backward()
        assert batch.grad is not None
        assert not device.holds(batch.grad)
        assert torch.equal(batch.grad[0], 2 * model.weight.detach().cpu().sum(0))


def test_gradients_of_gradients() -> None:
    with FakeDevice() as device:
        (side,) = split(device, "side")
        with device.use(side):
            weight = torch.ones(4, device=device.torch_device, requires_grad=True)
            (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        device.current_stream().wait_stream(side)
        gradient.square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [36.0] * 4


def test_callbacks_of_a_backward_run_at_its_end_on_the_callers_stream() -> None:
    """As FSDP does it: a hook works on a stream of its own, and a callback waits for it."""
    seen: list[object] = []
    with fake_cuda():
        side, forward = torch.cuda.Stream(), torch.cuda.Stream()
        reduced: list[torch.Tensor] = []
        leaf = torch.ones(4, device="cuda", requires_grad=True)

        def reduce(gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(wait)  # type: ignore[attr-defined]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                reduced.append(gradient * 2)

        def wait() -> None:
            seen.append(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(side)

        forward.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(forward):
            loss = leaf.sum()
            leaf.register_hook(reduce)
        torch.cuda.current_stream().wait_stream(forward)
        loss.backward()
        assert seen == [torch.cuda.default_stream()]
        assert reduced[0].tolist() == [2.0] * 4
