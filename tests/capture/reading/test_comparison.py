"""One generated function says whether many things are still the same objects."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.capture.reading.comparison import Comparison, listed, same_values


def made() -> SimpleNamespace:
    return SimpleNamespace(box={"a": 1.5, "b": 2.5}, row=[1.5], space=SimpleNamespace(a=1.5), n=0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an entry": lambda it: it.box.update(a=3.5),
    "an entry that is deleted": lambda it: it.box.pop("a"),
    "a key that appears": lambda it: it.box.update(c=1),
    "an attribute": lambda it: setattr(it.space, "a", 3.5),
    "an attribute that is deleted": lambda it: delattr(it.space, "a"),
    "an item": lambda it: it.row.append(1),
    "the order of keys": lambda it: it.box.update(a=it.box.pop("a")),
    "a result": lambda it: setattr(it, "n", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_noticed(name: str) -> None:
    it, comparison = made(), Comparison()
    comparison.entry(it.box, "a", it.box["a"])
    comparison.absent(it.box, "c")
    comparison.attribute(it.space, "a", it.space.a)
    comparison.items(it.row, *listed(it.row))
    comparison.items(it.box, *listed(it.box))
    comparison.result(lambda: it.n, 0)
    holds = comparison.compile()
    assert holds()
    CHANGES[name](it)
    assert not holds()


def test_thousands_of_entries_are_compared() -> None:
    boxes = [{"a": object(), 1: object()} for _ in range(2000)]
    comparison = Comparison()
    for box in boxes:
        for key, value in box.items():
            comparison.entry(box, key, value)
    holds = comparison.compile()
    assert holds()
    boxes[1999]["a"] = object()
    assert not holds()


def take(boxes: list[dict[Any, Any]]) -> None:
    del boxes[1]["b"]


def add(boxes: list[dict[Any, Any]]) -> None:
    boxes[2]["c"] = object()


def first_of_an_empty_one(boxes: list[dict[Any, Any]]) -> None:
    boxes[0]["a"] = boxes[1].pop("a")


def another(boxes: list[dict[Any, Any]]) -> None:
    boxes[2]["b"] = object()


def swap(boxes: list[dict[Any, Any]]) -> None:
    boxes[1]["a"], boxes[1]["b"] = boxes[1]["b"], boxes[1]["a"]


@pytest.mark.parametrize("change", [take, add, first_of_an_empty_one, another, swap])
def test_values_of_dicts_are_compared(change: Callable[[list[dict[Any, Any]]], None]) -> None:
    boxes: list[dict[Any, Any]] = [{}, *({"a": object(), "b": object()} for _ in range(2))]
    hold = same_values(boxes)
    assert hold()
    change(boxes)
    assert not hold()


def test_nothing_is_the_same_as_nothing() -> None:
    assert Comparison().compile()()
