"""What the tests of all libraries share: a small task, and how results are compared."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

EAGER = ["baseline", "interval", "event", "streams4", "pipeline"]


def needs(package: str) -> Any:
    """The package; the tests of a file that needs it are skipped where it is not installed."""
    return pytest.importorskip(
        package,
        reason=f"{package} is not installed: pip install -c constraints.txt -e '.[all,dev]'",
    )


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters and buffers, on the host."""
    return {name: value.detach().clone().to("cpu") for name, value in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    different = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not different


def classifier() -> torch.nn.Module:
    """With dropout, so that it matters where the random generators stand."""
    seeded(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
    )


def samples(count: int = 37) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(count, 8, generator=draw)
    return TensorDataset(features, torch.randint(0, 3, (count,), generator=draw))


def shuffled(count: int = 37, batch_size: int = 4) -> DataLoader[Any]:
    """Ten batches, the last of them smaller."""
    return DataLoader(samples(count), batch_size=batch_size, shuffle=True)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def stopped_after(engine: Any, loader: Any, batches: int) -> Any:
    """A copy of the engine's state after so many batches of an epoch, which is then left."""
    for info in engine.steps(loader):
        if info.batch + 1 == batches:
            return copy.deepcopy(engine.state_dict())
    raise AssertionError("the loader has fewer batches")


def forget_accelerators() -> None:
    """Accelerate keeps the settings of an Accelerator in the process, for the next one."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
