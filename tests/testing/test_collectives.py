"""Collectives beyond the seeded bugs: whole training loops, and what a report says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace.testing import FakeDevice, fake_cuda
from support.process_groups import gloo_process_group


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    with gloo_process_group():
        yield


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))


def train(model: torch.nn.Module, place: torch.device) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 8).to(place)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device_ids", [None, [0]])
def test_ddp_trains_without_a_report(device_ids: list[int] | None) -> None:
    expected = train(make_model(), torch.device("cpu"))
    with fake_cuda() as device:
        place = torch.device("cuda")
        model = torch.nn.parallel.DistributedDataParallel(
            make_model().to(place), device_ids=device_ids
        )
        assert train(model, place) == pytest.approx(expected)
    lanes = {span.lane for span in device.timeline().spans}
    assert any(lane.startswith("collectives of group") for lane in lanes)


@pytest.mark.filterwarnings("ignore")
def test_fsdp_trains_without_a_report() -> None:
    expected = train(make_model(), torch.device("cpu"))
    with fake_cuda():
        model, mesh = make_model().cuda(), init_device_mesh("cuda", (1,))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        assert train(model, torch.device("cuda")) == pytest.approx(expected)


def test_the_missing_call_is_named() -> None:
    with FakeDevice(check=False) as device:
        value = torch.ones(4, device=device.torch_device)
        work = dist.all_reduce(value, async_op=True)
        value + 1
        work.wait()
    (race,) = device.races
    assert race.first.operation == "c10d::allreduce_"
    assert race.missing.startswith("work.wait()")
