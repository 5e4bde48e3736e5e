"""Gradients copied to where an optimizer's graphs read them."""

from __future__ import annotations

import pytest
import torch

from headrace.capture.state.gradient_copies import GradientCopies
from headrace.errors import CaptureError


def parameters() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]


def test_the_block_has_the_copies_and_its_end_the_gradients() -> None:
    own = parameters()
    own[0].grad, own[2].grad = torch.full((2,), 3.0), torch.full((2,), 4.0)
    gradients = [one.grad for one in own]
    copies = GradientCopies(own)
    copies.make(gradients)
    with copies.in_place(gradients):
        inside = [one.grad for one in own]
    assert inside[1] is None
    assert all(a is b for a, b in zip(gradients, (one.grad for one in own), strict=True))
    copies.write()
    assert inside[0] is not gradients[0]
    assert inside[0] is not None
    assert inside[0].tolist() == [3, 3]
    own[0].grad = None
    own[2].grad = torch.full((2,), 5.0)
    copies.write()
    assert inside[2] is not None
    assert (inside[0].tolist(), inside[2].tolist()) == ([3, 3], [5, 5])


def test_what_cannot_be_copied() -> None:
    own = parameters()
    with pytest.raises(CaptureError, match="sparse"):
        GradientCopies(own).make([torch.ones(2).to_sparse(), None, None])


def test_a_block_that_writes_to_them_is_refused() -> None:
    own = parameters()
    gradients: list[torch.Tensor | None] = [torch.ones(2), None, None]
    copies = GradientCopies(own)
    copies.make(gradients)

    def write() -> None:
        with copies.in_place(gradients):
            assert own[0].grad is not None
            own[0].grad.mul_(2)

    with pytest.raises(CaptureError, match="writes to its gradients"):
        write()
