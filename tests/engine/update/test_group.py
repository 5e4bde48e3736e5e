"""An accumulation group: its phase says whether a state may be taken."""

from __future__ import annotations

import pytest
import torch

from headrace.device import open_device
from headrace.engine.update.group import Group, Phase
from headrace.parallel import SINGLE


def group(size: int = 2, *, by_count: bool = False) -> Group:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    return Group(open_device("cpu"), optimizer, SINGLE, size=size, by_count=by_count, sharded=False)


def add_batch(one: Group) -> None:
    one.begin_backward()
    for parameter in one.parameters():
        parameter.grad = torch.ones(2) if parameter.grad is None else parameter.grad + 1
    one.end_backward()


def test_batches_fill_a_group_and_an_update_empties_it() -> None:
    one = group()
    assert (one.standing, one.is_open, one.batches_for(3)) == ((0, 0), False, 6)
    add_batch(one)
    assert (one.standing, one.is_open, one.is_full, one.batches_for(3)) == ((0, 1), True, False, 5)
    add_batch(one)
    assert one.is_full
    one.begin_update()
    one.clear()
    one.end_update()
    assert (one.standing, one.phase, one.gradients()) == ((1, 0), Phase.CLEAN, [])


@pytest.mark.parametrize(
    ("batches", "phase", "whole", "left"),
    [
        (0, Phase.CLEAN, True, 0),
        (1, Phase.CLEAN, True, 1),
        # A failed backward in an empty group loses no earlier batch.
        (0, Phase.ACCUMULATING, True, 0),
        # A failed backward has changed the gradients of an earlier batch: they are lost.
        (1, Phase.ACCUMULATING, False, 0),
        (2, Phase.UPDATING, False, 0),
    ],
)
def test_what_an_error_leaves(batches: int, phase: Phase, whole: bool, left: int) -> None:
    one = group(size=3)
    for _ in range(batches):
        add_batch(one)
    if phase is Phase.ACCUMULATING:
        one.begin_backward()
    elif phase is Phase.UPDATING:
        one.begin_update()
    assert one.recover() is whole
    assert one.count == left
    assert one.phase is phase  # so that the next batch clears what is left
    one.clear_failed()
    assert (one.phase, one.gradients()) == (Phase.CLEAN, [])


def test_the_weight_is_not_rounded_to_the_gradients_dtype() -> None:
    """bfloat16 has no 259. The first gradient's dtype must not change the others, either."""
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    parameters[1].data = parameters[1].data.float()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    one = Group(open_device("cpu"), optimizer, SINGLE, size=2, by_count=False, sharded=False)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 259.0 * 3)
    one.weight.add(259)
    one.divide()
    expected = torch.tensor(259.0 * 3)
    assert [p.grad[0].item() for p in parameters if p.grad is not None] == [
        (expected.bfloat16() / 259).item(),
        (expected / 259).item(),
    ]


def test_complex_gradients_are_divided_by_the_weight() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    one = Group(open_device("cpu"), optimizer, SINGLE, size=2, by_count=False, sharded=False)
    parameter.grad = torch.full_like(parameter, 6 + 2j)
    one.weight.add(2)
    one.divide()
    assert parameter.grad.tolist() == [3 + 1j, 3 + 1j]


def test_a_replayed_step_counts_as_one_update() -> None:
    one = group(size=1)
    one.begin_update()
    one.end_step()
    assert (one.standing, one.phase) == ((1, 0), Phase.CLEAN)


def test_a_state_has_the_gradients_of_an_open_group() -> None:
    one, other = group(), group()
    add_batch(one)
    other.load_state_dict(one.state_dict())
    assert other.standing == (0, 1)
    (gradient,) = other.gradients()
    assert torch.equal(gradient, torch.ones(2))
    assert gradient is not one.gradients()[0]
