"""Nested batches: flattened into leaves and rebuilt."""

from __future__ import annotations

import collections
import collections.abc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given

from headrace.data import (
    batch_leaves,
    flatten_batch,
    is_plain_object,
    is_plain_tensor,
    measure_leaves,
    moves_itself,
    other_attributes,
    rebuild_batch,
)
from support.training.batches import MovesItself, Pair, Sample, nested


class Extra(dict[str, Any]):
    note = "kept"


class Named(list[Any]):
    def __init__(self, name: str) -> None:
        self.name = name


class Marked(tuple[Any, ...]):
    name = ""


class Stored(collections.abc.MutableMapping[str, Any]):
    """A mapping that keeps its items in a dict of its own."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


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
        collections.UserDict(x=ONE),
        Stored(x=ONE),
        Marked([ONE]),
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


def test_attributes_of_a_container_are_kept() -> None:
    named, marked, extra = Named("a"), Marked([ONE]), Extra(x=ONE)
    named.append(ONE)
    marked.name = extra.name = "a"  # type: ignore[attr-defined]
    assert [doubled(one).name for one in (named, marked, extra)] == ["a"] * 3


def test_attributes_in_slots_are_attributes_too() -> None:
    slotted = type("Slotted", (dict,), {"__slots__": ("name", "unset")})(x=ONE)
    slotted.name = "a"
    assert other_attributes(slotted) == {"name": "a"}
    assert other_attributes(doubled(slotted)) == {"name": "a"}


def test_a_mapping_that_keeps_its_items_in_a_slot_is_not_written_to() -> None:
    class InSlot(Stored):
        __slots__ = ("_items",)

    batch = InSlot(x=ONE)
    assert torch.equal(doubled(batch)["x"], 2 * ONE)
    assert batch["x"] is ONE


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


class Cached:
    """An object of which nothing is known."""

    def __init__(self, *layers: Any) -> None:
        self.layers, self.name = layers, "a"


def test_plain_objects_are_looked_into_if_asked() -> None:
    inner = Cached(ONE)
    batch = {"cache": Cached(inner, ONE), "again": inner}
    assert flatten_batch(batch) == []
    leaves = flatten_batch(batch, objects=True)
    assert all(leaf is ONE for leaf in leaves)
    assert len(leaves) == 2
    result = rebuild_batch(batch, [ONE + 1, ONE + 2], objects=True)
    assert result["cache"] is not batch["cache"]
    assert result["again"] is result["cache"].layers[0]
    assert result["again"].layers[0][0] == 2
    assert result["cache"].layers[1][0] == 3
    assert result["cache"].name == "a"
    assert batch["cache"].layers == (inner, ONE)


def test_an_object_that_holds_itself_is_looked_into_once() -> None:
    batch = Cached(ONE)
    batch.layers = (batch, ONE)
    assert len(flatten_batch(batch, objects=True)) == 1
    result = rebuild_batch(batch, [ONE + 1], objects=True)
    assert result.layers[0] is result


@pytest.mark.parametrize(
    "part",
    [{}, [], Sample(ONE, ["a"]), MovesItself(), torch.nn.Linear(1, 1), Cached, iter([]), object(),
     len, type("Slotted", (), {"__slots__": ("x",)})(), ValueError("a"),
     type("Ends", (), {"__del__": lambda self: None})()],
)  # fmt: skip
def test_what_is_no_plain_object(part: Any) -> None:
    assert not is_plain_object(part)
    assert is_plain_object(Cached())
