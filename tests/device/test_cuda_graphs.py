"""device/cuda_graphs.py, on a GPU and on its emulation."""

from __future__ import annotations

import pytest
import torch

from headrace.device import Device


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


def test_graphs_that_draw_on_two_streams_draw_in_turn(cuda: Device) -> None:
    """They find the random state in the same memory."""
    streams = [cuda.stream("first"), cuda.stream("second")]
    values = [torch.zeros(1000, device=cuda.torch_device) for _ in streams]
    expected, drawn = [], []
    torch.manual_seed(3)
    for _ in range(6):
        expected.append(values[0].uniform_().clone())
    graphs = [cuda.capture(one.uniform_, cuda.graph_pool())[0] for one in values]
    torch.manual_seed(3)
    for at in range(6):
        with cuda.use(streams[at % 2]):
            cuda.delay(5_000_000)
            graphs[at % 2].replay()
            drawn.append(values[at % 2].clone())
    cuda.synchronize("test")
    assert all(map(torch.equal, drawn, expected))
