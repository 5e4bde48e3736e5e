"""Which rows an indexing operator is said to touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.races.indexing import touched_parts
from headrace.races.operators import Operation

TABLE = torch.zeros(6, 4)
aten = torch.ops.aten


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long)


def elements(parts: list[torch.Tensor]) -> set[tuple[int, ...]]:
    """The elements of TABLE that these views cover."""
    marks = torch.zeros_like(TABLE)
    for part in parts:
        marks.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(1)
    return {tuple(place) for place in marks.nonzero().tolist()}


def whole_rows(*numbers: int) -> set[tuple[int, ...]]:
    return {(number, column) for number in numbers for column in range(4)}


CALLS: list[tuple[Any, tuple[Any, ...], set[tuple[int, ...]]]] = [
    (aten.index.Tensor, (TABLE, [rows(1, -1)]), whole_rows(1, 5)),
    (aten.index.Tensor, (TABLE, [None, rows(2)]), {(row, 2) for row in range(6)}),
    (aten.index.Tensor, (TABLE, [rows(0, 3), rows(1, -1)]), {(0, 1), (3, 3)}),
    (aten.index.Tensor, (TABLE.t(), [rows(2, 2), rows(0, 5)]), {(row, 2) for row in range(6)}),
    (aten.index.Tensor, (TABLE, [TABLE > 0]), whole_rows(*range(6))),
    (aten.index_put_.default, (TABLE, [rows(4)], torch.ones(4)), whole_rows(4)),
    (aten.index_fill_.int_Scalar, (TABLE, 0, rows(2, 3), 1), whole_rows(2, 3)),
    (aten.index_select.default, (TABLE, -1, rows(0)), {(row, 0) for row in range(6)}),
    (aten.gather.default, (TABLE, 0, torch.tensor([[1, 1], [2, 1]])), whole_rows(1, 2)),
    (aten.embedding.default, (TABLE, torch.tensor([[0], [5]])), whole_rows(0, 5)),
    (aten.take.default, (TABLE, rows(0, -1)), {(0, 0), (5, 3)}),
    (aten.index_select.default, (TABLE, 0, rows()), set()),
    (aten.index_copy.default, (TABLE, 0, rows(1), torch.ones(1, 4)), whole_rows(*range(6))),
]


@pytest.mark.parametrize(("func", "args", "expected"), CALLS)
def test_only_the_named_rows_are_touched(
    func: Any, args: tuple[Any, ...], expected: set[tuple[int, ...]]
) -> None:
    operation = Operation(func, args, {})
    reads, writes = operation.reads_and_writes()
    touched = [
        part
        for part in (*touched_parts(operation, reads), *touched_parts(operation, writes))
        if part.untyped_storage().data_ptr() == TABLE.untyped_storage().data_ptr()
    ]
    assert elements(touched) == expected


def test_rows_in_very_many_places_are_the_whole_tensor() -> None:
    table = torch.zeros(1000, 2)
    operation = Operation(aten.index_select.default, (table, 0, torch.arange(0, 1000, 2)), {})
    (part,) = touched_parts(operation, [table])
    assert part is table
