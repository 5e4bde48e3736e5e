"""The autograd history of replayed calls. Their gradients: `test_graphed_model.py`."""

from __future__ import annotations

import gc
import weakref

import torch

import headrace as hr
from headrace.device import Device
from support.graphs.sped_up import batch, small


def test_a_kept_loss_does_not_keep_its_model(capturing: Device) -> None:
    """As in a script, whose names hold both, and are held by the model's code."""
    model = small().to(capturing.torch_device)
    model.kept = None
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(5):
            loss = model(batch(capturing, at)).square().mean()
            loss.backward()
            model.kept = loss
        assert handle.report().parts[0].replays == 3
    forgotten = weakref.ref(model)
    del model, handle, loss
    gc.collect()
    assert forgotten() is None


def test_a_model_that_is_called_on_two_streams(capturing: Device) -> None:
    """Its backward graphs share memory, and autograd runs each on its forward's stream."""
    model, plain = (small(dropout=0).to(capturing.torch_device) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    streams = [capturing.stream("first"), capturing.stream("second")]

    def step(trained: torch.nn.Module, at: int) -> None:
        trained.zero_grad()
        losses = []
        here = capturing.current_stream()
        for stream in streams:
            stream.wait_stream(here)
            with capturing.use(stream):
                losses.append(trained(batch(capturing, at)).square().mean())
            here.wait_stream(stream)
        (losses[0] + 2 * losses[1]).backward()

    with hr.speed_up(model, device=capturing) as handle:
        for at in range(6):
            step(model, at)
            step(plain, at)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
        assert handle.report().parts[0].replays > 6
