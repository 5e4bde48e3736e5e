"""Collectives beyond the seeded bugs: whole training loops, and what a report says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace.fake import FakeDevice, fake_cuda
from support.processes.process_groups import gloo_process_group


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


def test_a_collective_waits_for_the_stream_of_its_call() -> None:
    def launch(side: torch.cuda.Stream, value: torch.Tensor) -> None:
        with torch.cuda.stream(side):
            value.add_(1)
        dist.all_reduce(value, async_op=True).wait()

    with fake_cuda(check=False) as cuda:
        launch(torch.cuda.Stream(), torch.ones(4).cuda())
    (race,) = cuda.races
    assert race.missing.startswith("torch.cuda.current_stream().wait_stream(side) before")
    with FakeDevice(check=False) as device:
        value, side = torch.ones(4).to(device.torch_device), device.stream("side")
        with device.use(side):
            value.add_(1)
        dist.all_reduce(value, async_op=True).wait()
    (race,) = device.races
    assert "device.current_stream().wait_event(event) before" in race.missing


@pytest.mark.filterwarnings("ignore")
def test_ddp_with_compressed_gradients_trains_without_a_report() -> None:
    with fake_cuda():
        model = torch.nn.parallel.DistributedDataParallel(make_model().cuda())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        losses = train(model, torch.device("cuda"))
    assert losses == pytest.approx(train(make_model(), torch.device("cpu")), rel=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_tensor_lies_where_its_part_lies() -> None:
    with fake_cuda(check=False) as device:
        model, mesh = make_model().cuda(), init_device_mesh("cuda", (1,))
        fully_shard(model, mesh=mesh)
        weight = next(model.parameters())
        assert (weight.device, weight.is_cuda) == (torch.device("cuda", 0), True)
        launches = device.launches
        assert weight.to("cuda") is weight
        assert device.launches == launches
        waits = len(device.hidden_waits)
        on_host = weight.detach().cpu()
        assert (on_host.device.type, len(device.hidden_waits)) == ("cpu", waits + 1)
        copied = weight.detach().to("cpu", non_blocking=True)
        copied.to_local().sum()  # type: ignore[attr-defined]
    (race,) = device.races
    assert (race.first.operation, race.second.operation) == ("copy d2h", "aten::sum")


def test_the_missing_call_is_named() -> None:
    with FakeDevice(check=False) as device:
        value = torch.ones(4, device=device.torch_device)
        work = dist.all_reduce(value, async_op=True)
        value + 1
        work.wait()
    (race,) = device.races
    assert race.first.operation == "c10d::allreduce_"
    assert race.missing.startswith("work.wait()")
    assert "while stream 'default' is current, before" in race.missing
