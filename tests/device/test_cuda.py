"""device/cuda.py, on a GPU and on its emulation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from headrace.device import Device, open_device
from headrace.fake import fake_cuda
from support.graphs.captures import line
from support.training.devices import needs_cuda


@pytest.fixture(params=["emulated", needs_cuda])
def cuda(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "emulated":
        with fake_cuda():
            yield open_device("cuda")
    else:
        yield open_device(request.param)


def test_a_watched_wait_is_named_by_the_users_line(cuda: Device) -> None:
    """PyTorch's warning names the line of the mode that watches."""
    value = torch.ones(4, device=cuda.torch_device)
    with cuda.watch() as found:
        value.sum().item()
    assert [str(one.site) for one in found] == [f"{__file__}:{line() - 1}"]


def test_other_warnings_of_a_watched_step_go_their_way(cuda: Device) -> None:
    with pytest.warns(UserWarning, match="own") as caught, cuda.watch() as found:
        warnings.warn("the user's own", stacklevel=1)
    assert [(str(one.message), one.lineno) for one in caught] == [("the user's own", line() - 1)]
    assert found == []


@pytest.mark.parametrize("ends", ["closed", "forgotten"])
def test_a_pool_takes_a_graph_after_its_last_one_has_gone(cuda: Device, ends: str) -> None:
    """PyTorch closes its pool with the last graph, and captures nothing into it afterwards."""
    value, pool = torch.ones(4, device=cuda.torch_device), cuda.graph_pool()
    first, _ = cuda.capture(lambda: value.mul_(2), pool)
    if ends == "closed":
        first.close()
    del first
    second, made = cuda.capture(lambda: value + 1, pool)
    second.replay()
    assert made.tolist() == [2, 2, 2, 2]


def test_a_capture_leaves_a_replay_that_is_under_way_its_random_numbers(cuda: Device) -> None:
    """PyTorch resets the graphs' random state when a capture begins, on the capture's stream."""
    values, pool = torch.zeros(1000, device=cuda.torch_device), cuda.graph_pool()
    draw, _ = cuda.capture(lambda: values.uniform_(), pool)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        values.uniform_()  # so that the offset is not zero
        cuda.delay(20_000_000)
        draw.replay()
        if not drawn:
            cuda.capture(lambda: torch.ones(1, device=cuda.torch_device) + 1, cuda.graph_pool())
        drawn.append(values.clone())
    assert torch.equal(*drawn)
