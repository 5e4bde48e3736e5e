"""A tensor in pieces: any part of it is what slicing the whole would give."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.atomic_files import DurableFile
from headrace.checkpoint.pieces import StoredTensors
from headrace.checkpoint.tensor_file import write_tensors
from headrace.errors import CheckpointError


@st.composite
def boxes(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], tuple[int, ...], tuple[int, ...]]:
    """A tensor, where its rows are cut, and a part of it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, shape[0] - 1)), max_size=3)) - {shape[0]})
    begin, size = [], []
    for length in shape:
        first = draw(st.integers(0, length))
        begin.append(first)
        size.append(draw(st.integers(0, length - first)))
    return tensor, cuts, tuple(begin), tuple(size)


def stored(folder: Path, tensor: torch.Tensor, cuts: list[int]) -> StoredTensors:
    starts, files, pieces = [0, *cuts], [], []
    for number, (start, end) in enumerate(zip(starts, [*cuts, len(tensor)], strict=True)):
        files.append(folder / f"{number}.safetensors")
        with DurableFile(files[-1]) as file:
            write_tensors(file, {"other": torch.ones(3), "w": tensor[start:end].contiguous()})
        pieces.append([number, [start, *[0] * (tensor.dim() - 1)]])
    sharded = {"w": {"shape": list(tensor.shape), "pieces": pieces}}
    return StoredTensors(files, {"whole": {"other": 0}, "sharded": sharded}, parts=True)


@settings(deadline=None, max_examples=60)
@given(boxes())
def test_any_part_is_as_sliced(
    box: tuple[torch.Tensor, list[int], tuple[int, ...], tuple[int, ...]],
) -> None:
    tensor, cuts, begin, size = box
    with tempfile.TemporaryDirectory() as folder:
        found = stored(Path(folder), tensor, cuts)["w"]
        ends = (first + length for first, length in zip(begin, size, strict=True))
        assert torch.equal(found.part(begin, size), tensor[tuple(map(slice, begin, ends))])
        assert torch.equal(found.whole(), tensor)


def test_scalars_and_half_precision(tmp_path: Path) -> None:
    path, row = tmp_path / "w.safetensors", torch.arange(3).bfloat16()
    with DurableFile(path) as file:
        write_tensors(file, {"scalar": torch.tensor(2.5), "row": row})
    found = StoredTensors([path], {"whole": {"scalar": 0, "row": 0}, "sharded": {}}, parts=True)
    assert torch.equal(found["scalar"], torch.tensor(2.5))
    assert torch.equal(found["row"].part([1], [2]), row[1:])


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    tensors = stored(tmp_path, torch.ones(4, 2), [2])
    tensors._sharded["w"]["pieces"].pop()
    with pytest.raises(CheckpointError, match=r"w: its files hold 4 of the 8 elements"):
        tensors["w"].whole()


def test_the_same_name_is_the_same_object(tmp_path: Path) -> None:
    tensors = stored(tmp_path, torch.ones(4, 2), [2])
    assert tensors["w"] is tensors["w"]
    assert sorted(tensors) == ["other", "w"]
