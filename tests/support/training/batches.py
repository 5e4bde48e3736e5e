"""Batches of every shape: named tuples, dataclasses, objects that move themselves, any nesting."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st


class Pair(NamedTuple):
    src: torch.Tensor
    trg: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: torch.Tensor
    names: list[str]
    length: int = dataclasses.field(init=False, default=7)


class MovesItself:
    def __init__(self) -> None:
        self.moved_to: Any = None

    def to(self, device: Any) -> MovesItself:
        twin = MovesItself()
        twin.moved_to = device
        return twin


nested = st.recursive(
    st.integers(0, 9).map(lambda n: torch.full((2,), float(n))) | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)
