"""The autograd history of replayed calls. Their gradients: `test_graphed_model.py`."""

from __future__ import annotations

import gc
import weakref

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
