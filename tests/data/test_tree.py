"""Nested batches: flattened into leaves and rebuilt."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given

from headrace.data import (
    batch_leaves,
    is_plain_tensor,
    measure_leaves,
    moves_itself,
    rebuild_batch,
)
from support.batches import MovesItself, Pair, Sample, nested


class Extra(dict[str, Any]):
    note = "kept"


def doubled(batch: Any) -> Any:
    return rebuild_batch(batch, [leaf * 2 for leaf in batch_leaves(batch)])


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        ONE,
        (ONE, ONE),
        [ONE, "text", 3],
        {"src": ONE, "meta": {"name": "x", "at": ONE}},
        Pair(ONE, ONE),
        Sample(ONE, ["a", "b"]),
        collections.OrderedDict(b=ONE, a=ONE),
        collections.defaultdict(list, x=ONE),
        Extra(x=ONE),
        [],
        None,
        "text",
    ],
)
def test_the_shape_stays(batch: Any) -> None:
    result = doubled(batch)
    assert type(result) is type(batch)
    assert len(list(batch_leaves(result))) == len(list(batch_leaves(batch)))
    for leaf in batch_leaves(result):
        assert torch.equal(leaf, torch.full((2,), 2.0))
    for leaf in batch_leaves(batch):
        assert torch.equal(leaf, ONE)  # the original is untouched


def test_other_objects_are_not_copied() -> None:
    note = object()
    result = doubled({"x": ONE, "note": note, "names": ["a"]})
    assert result["note"] is note
    assert result["names"] == ["a"]
    sample = doubled(Sample(ONE, ["a"]))
    assert (sample.names, sample.length) == (["a"], 7)
    assert doubled(Extra(x=ONE)).note == "kept"


def test_an_object_that_moves_itself_is_one_leaf() -> None:
    moves = MovesItself()
    assert list(batch_leaves((ONE, moves))) == [ONE, moves]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert list(batch_leaves([packed])) == [packed]  # its batch_sizes must stay on the CPU


def test_bytes_and_samples_are_counted() -> None:
    batch = (torch.ones(3, 2), {"y": torch.ones(3, dtype=torch.int64)}, "x")
    assert measure_leaves(batch_leaves(batch)) == (24 + 24, 3)
    assert measure_leaves([torch.tensor(1.0)]) == (4, 1)
    assert measure_leaves([]) == (0, 1)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        MovesItself(),
    ],
)
def test_tensors_that_are_not_plain(leaf: Any) -> None:
    assert not is_plain_tensor(leaf)
    assert moves_itself(leaf)


@given(nested)
def test_any_nesting_survives(batch: Any) -> None:
    leaves = list(batch_leaves(batch))
    assert repr(rebuild_batch(batch, leaves)) == repr(batch)
    assert len(list(batch_leaves(doubled(batch)))) == len(leaves)
