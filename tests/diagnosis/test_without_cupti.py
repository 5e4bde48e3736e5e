"""Steps without CUPTI: the host's part is noted, then the device's work measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace.device import open_device
from headrace.diagnosis.host_steps import HostSteps
from headrace.diagnosis.loaders import Loaders
from headrace.diagnosis.torch_calls import TorchCalls
from headrace.diagnosis.without_cupti import TimedSteps


def loop() -> Callable[[], None]:
    """A step of a plain loop."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = itertools.cycle(DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=2))

    def step() -> None:
        (x,) = next(loader)
        model(x).sum().backward()
        optimizer.step()

    return step


def test_a_loop_on_the_cpu_is_cut_into_the_same_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole way, with a device for which nothing has to be waited."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    device = open_device("cpu")
    calls, loaders = TorchCalls(), Loaders()
    noted: list[HostSteps] = []
    timed = TimedSteps(device, calls, loaders, lambda count: iter(range(count)))
    step = loop()
    with calls.watching_optimizers(), loaders.watching():
        for _ in timed.note_host(2, noted.append):
            step()
        for _ in timed.measure_device(2, noted[0]):
            step()
    (host,) = noted
    assert [edge.key for edge in host.edges[:5]] == [
        ("step", 0),
        ("input", 0),
        ("batch", 0),
        ("forward", 0),
        ("after forward", 0),
    ]
    assert len(host.marks) == 2
    assert {one.name for one in host.operators} >= {"aten::add_", "aten::fill_"}
    assert timed.trace(host) is not None
    # Here nothing keeps the device busy, so all segments are late.
    assert "100% of the GPU's time was launched too late" in timed.notes[1]
