"""What Headrace makes on the host is made there, whatever PyTorch's default device is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from headrace.data import Buckets, PadToBuckets
from headrace.device import Device
from headrace.plan import PRESETS
from support.training.engines import data, loss, make_engine, same, weights


def measured(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    value = loss(model, batch)
    return {"loss": value, "weight": (batch[1] > -1).sum(), "twice": value.detach() * 2}


@contextmanager
def elsewhere_by_default(device: Device) -> Iterator[None]:
    """What does not name its device is made on the GPU; without one, it has no data."""
    if device.torch_device.type != "cuda":
        with torch.device("meta"):
            yield
        return
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        with torch.device(device.torch_device):
            yield
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


@pytest.mark.parametrize("plan", list(PRESETS))
def test_an_engine_trains_and_is_saved(device: Device, plan: str, tmp_path: Path) -> None:
    def train(*, elsewhere: bool, folder: Path) -> Any:
        folder.mkdir()
        batches, options = data(8), {"clip_norm": 1.0, "accumulate": 2, "ema_decay": 0.9}
        first, second = (
            make_engine(device, plan, loss=measured, on_nonfinite="skip", **options) for _ in "12"
        )
        with elsewhere_by_default(device) if elsewhere else nullcontext():
            losses = list(first.epoch(batches).losses)
            for progress in first.steps(batches):
                if progress.batches == 4:
                    with CheckpointWriter(device, folder) as writer:
                        writer.save(first.state_dict(), step=4)
                    break
            newest = latest_checkpoint(folder)
            assert newest is not None
            second.load_state_dict(load_checkpoint(newest))
            losses += [*second.epoch(batches).losses, second.evaluate(batches).mean_loss]
        return losses, weights(second)

    (found, end), (expected, final) = (
        train(elsewhere=elsewhere, folder=tmp_path / str(elsewhere)) for elsewhere in (True, False)
    )
    assert found == expected
    assert same(end, final)


def test_a_loop_of_ones_own(device: Device) -> None:
    batches, arrived = data(5), []
    with elsewhere_by_default(device):
        scalars = hr.DeferredScalars(device)
        for step, batch in enumerate(hr.prefetch(batches, device)):
            scalars.add(step, {"sum": batch[0].sum()})
            arrived += scalars.ready()
        arrived += scalars.drain()
        padded = PadToBuckets(Buckets(((4,),)), pad=7)([[1, 2, 3], [4]])
    assert [one.values["sum"] for one in arrived] == pytest.approx(
        [float(batch[0].sum()) for batch in batches], rel=1e-5
    )
    assert isinstance(padded, torch.Tensor)
    assert padded.tolist() == [[1, 2, 3, 7], [4, 7, 7, 7]]
