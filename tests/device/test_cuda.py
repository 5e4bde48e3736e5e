"""device/cuda.py, on a GPU and on its emulation."""

from __future__ import annotations

import warnings

import pytest
import torch

from headrace.device import Device
from support.graphs.captures import line


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
