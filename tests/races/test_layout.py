"""Which bytes a tensor covers: exact, and quick for tensors in very many pieces."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.races.layout import Layout


def covered(tensor: torch.Tensor) -> set[int]:
    """The bytes a tensor covers, one by one: slow and plainly right."""
    offsets = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    size = tensor.element_size()
    return {
        byte for offset in offsets.tolist() for byte in range(offset * size, (offset + 1) * size)
    }


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    view = draw(st.sampled_from([BASE, BASE[0], BASE.flatten()]))
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else None
        if dim is None:
            break
        start = draw(st.integers(0, view.shape[dim]))
        step = draw(st.integers(1, 3))
        index = [slice(None)] * view.dim()
        index[dim] = slice(start, draw(st.integers(start, view.shape[dim])), step)
        view = view[tuple(index)]
        if draw(st.booleans()):
            view = view.transpose(0, -1)
    return view


BASE = torch.zeros(4, 6, 5, dtype=torch.int16)


@settings(max_examples=300)
@given(views(), views())
def test_layouts_overlap_exactly_when_they_share_a_byte(
    one: torch.Tensor, two: torch.Tensor
) -> None:
    first, second = Layout.of(one), Layout.of(two)
    assert first.overlaps(second) == bool(covered(one) & covered(two))
    if first.covers(second):
        assert covered(two) <= covered(one)
    assert {byte for low, high in first.runs for byte in range(low, high)} == covered(one)


def test_layouts_in_very_many_pieces() -> None:
    table = torch.zeros(200_000, 4, dtype=torch.int16)
    first, second, whole = Layout.of(table[:, 0]), Layout.of(table[:, 1]), Layout.of(table)
    pair = Layout.of(table[:, 1:3])
    assert not first.overlaps(second)
    assert not first.overlaps(pair)
    assert second.overlaps(pair)
    assert second.overlaps(Layout.of(table[7]))
    boxes = torch.zeros(100_000, 2, 8, dtype=torch.int16)
    even = Layout.of(boxes[:, 1, ::2])
    assert not even.overlaps(Layout.of(boxes[:, 0]))
    assert not even.overlaps(Layout.of(boxes[:, :, 1::2]))
    assert not even.overlaps(Layout.of(boxes[7, 0]))
    assert even.overlaps(Layout.of(boxes[7:9]))
    assert even.overlaps(Layout.of(boxes[:, 1, 4:]))
    assert whole.covers(first)
    assert first.covers(first)
    assert not first.covers(Layout.of(table[1:3, 1]))  # between its first byte and its last
