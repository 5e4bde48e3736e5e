"""Buckets: the best few shapes, batches from one bucket each, and padding to its edge."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headrace.data import BucketBatches, Buckets, PadToBuckets
from headrace.data.bucket_search import LineSearch
from headrace.errors import PlanError

line = st.lists(st.integers(1, 12), min_size=1, max_size=14)
pair = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=14)
Lengths = Sequence[int] | Sequence[tuple[int, ...]]


def rows_of(lengths: Lengths) -> list[tuple[int, ...]]:
    return [row if isinstance(row, tuple) else (row,) for row in lengths]


def padded_tokens(lengths: Lengths, edges: Any) -> float:
    """By hand: what the samples take, each in the cheapest edge that holds it."""
    return sum(
        min(
            (sum(edge) for edge in edges if all(n <= e for n, e in zip(row, edge, strict=True))),
            default=math.inf,
        )
        for row in rows_of(lengths)
    )


def waste_of(lengths: Lengths, edges: Any) -> float:
    return 1 - sum(map(sum, rows_of(lengths))) / padded_tokens(lengths, edges)


def corpus(samples: int = 2000) -> np.ndarray[Any, Any]:
    """(samples, 2): lengths of two languages, the second about as long as the first."""
    rng = np.random.default_rng(3)
    src = rng.gamma(8, 2, samples) + 3
    return np.clip(np.stack([src, src * rng.normal(1, 0.15, samples)], axis=1), 3, 60).astype(int)


@given(line | pair, st.integers(1, 6))
def test_every_sample_fits_and_the_waste_is_right(lengths: Lengths, most: int) -> None:
    buckets = Buckets.choose(lengths, most)
    assert 1 <= len(buckets.edges) <= most
    assert list(buckets.edges) == sorted(set(buckets.edges))
    index = buckets.of(lengths)
    for row, edge in zip(rows_of(lengths), [buckets.edges[i] for i in index], strict=True):
        assert all(n <= e for n, e in zip(row, edge, strict=True))
        assert sum(edge) == padded_tokens([row], buckets.edges)
    assert buckets.waste == pytest.approx(waste_of(lengths, buckets.edges))
    assert set(index) == set(range(len(buckets.edges)))  # none is there in vain
    assert Buckets.choose(lengths[::-1], most).edges == buckets.edges


@given(line, st.integers(1, 5))
def test_one_side_is_optimal(lengths: list[int], most: int) -> None:
    distinct = sorted(set(lengths))
    best = min(
        waste_of(lengths, [(edge,) for edge in edges])
        for edges in itertools.combinations(distinct, min(most, len(distinct)))
    )
    assert Buckets.choose(lengths, most).waste == pytest.approx(best)


def test_one_side_is_optimal_with_many_lengths() -> None:
    values, counts = np.unique(np.random.default_rng(0).integers(1, 9000, 700), return_counts=True)
    upto = np.concatenate([[0], np.cumsum(counts)])
    best = np.concatenate([[0], values * upto[1:]])
    search = LineSearch(np.repeat(values, counts))
    for _ in range(9):  # the same sum without its shortcut: every i for every j
        best = np.array(
            [
                0,
                *[
                    (best[:j] + values[j - 1] * (upto[j] - upto[:j])).min()
                    for j in range(1, len(best))
                ],
            ]
        )
        assert search.grow()
        assert search.padded[-1] == best[-1]


def test_two_sides_come_near_the_best() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(100):  # few samples far apart: harder for the search than a corpus
        lengths = [(int(a), int(b)) for a, b in rng.integers(1, 7, (10, 2))]
        corners = itertools.product(*(sorted(set(side)) for side in zip(*lengths, strict=True)))
        best = min(padded_tokens(lengths, edges) for edges in itertools.combinations(corners, 2))
        ratios.append(padded_tokens(lengths, Buckets.choose(lengths, 2).edges) / best)
    assert min(ratios) == 1
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.2


@given(line | pair, st.floats(0, 0.6))
def test_as_few_as_reach_the_waste(lengths: Lengths, waste: float) -> None:
    buckets = Buckets.choose(lengths, 14, waste)
    assert buckets.waste <= waste
    if len(buckets.edges) > 1:
        assert Buckets.choose(lengths, len(buckets.edges) - 1).waste > waste


def test_two_languages_in_sixteen_shapes() -> None:
    buckets = Buckets.choose(corpus())
    assert len(buckets.edges) == 16
    assert buckets.waste < 0.12
    fewer = Buckets.choose(corpus(), waste=0.15)
    assert len(fewer.edges) < 16
    assert 0.12 < fewer.waste <= 0.15


def test_long_lengths_go_on_a_coarser_grid() -> None:
    lengths = np.random.default_rng(1).integers(1, 100_000, (3000, 2))
    buckets = Buckets.choose(lengths, 8)
    assert len(buckets.edges) == 8
    assert buckets.waste == pytest.approx(
        waste_of([tuple(map(int, r)) for r in lengths], buckets.edges)
    )
    assert buckets.waste < 0.3  # one bucket: 0.5
    assert len(Buckets.choose(np.random.default_rng(1).integers(1, 99, (500, 3)), 8).edges) == 8


def test_waste_that_cannot_be_reached_says_how_many_buckets_would() -> None:
    lengths = list(range(1, 9))
    with pytest.raises(
        PlanError,
        match=r"waste: 0\.1 .* max_buckets=2, which waste 0\.2500; 4 buckets would be enough",
    ):
        Buckets.choose(lengths, 2, 0.1)
    assert len(Buckets.choose(lengths, 6, 0.1).edges) == 4
    with pytest.raises(PlanError, match=r"which waste 0\.4375; 4 buckets would not be enough"):
        Buckets.choose(lengths, 1, 0.0)
    with pytest.raises(PlanError, match="buckets would be enough"):
        Buckets.choose(corpus(), 4, 0.12)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([3, 0], r"lengths\[1\]: 0; expected 1 to"),
        ([[3, 4], [5, -1]], r"lengths\[1\]: \(5, -1\); expected 1 to"),
        ([2**31], "expected 1 to 2,147,483,647"),
        ([3.0, 2.5], "of type float64; expected whole numbers"),
        ([True, True], "of type bool"),
        (["ab"], "expected whole numbers"),
        ([], r"shape \(0,\); expected \(n,\) or \(n, sides\)"),
        (np.ones((2, 0), int), r"shape \(2, 0\)"),
        (np.ones((2, 2, 2), int), r"shape \(2, 2, 2\)"),
        (5, r"shape \(\)"),
        ([[1, 2], [3]], "rows of different length"),
    ],
)
def test_lengths_that_are_not_lengths(lengths: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Buckets.choose(lengths)
    with pytest.raises(PlanError):
        Buckets(((9, 9),)).of(lengths)


@pytest.mark.parametrize("max_buckets", [0, -1, 2.0, True, "3"])
def test_max_buckets_must_be_a_count(max_buckets: Any) -> None:
    with pytest.raises(PlanError, match=r"max_buckets = .*: expected a whole number, 1 or more"):
        Buckets.choose([1, 2], max_buckets)


@pytest.mark.parametrize("waste", [-0.1, 1.1, math.nan])
def test_waste_must_be_a_share(waste: float) -> None:
    with pytest.raises(PlanError, match=r"waste: .*; expected a share from 0 to 1"):
        Buckets.choose([1, 2], waste=waste)


def test_a_sample_that_fits_in_no_bucket_is_named() -> None:
    buckets = Buckets(((5, 9), (9, 5), (4, 4)))
    with pytest.raises(PlanError, match=r"sample 1 is \(6, 6\) long.*at most \(5, 9\) or \(9, 5\)"):
        buckets.of([(5, 5), (6, 6)])
    with pytest.raises(PlanError, match=r"sample 0 is 8 long, which fits in no bucket; .* most 7"):
        Buckets(((3,), (7,))).of([8])
    with pytest.raises(PlanError, match="lengths: 1 per sample; expected 2"):
        buckets.of([5])


def test_made_by_hand() -> None:
    buckets = Buckets(((5, 9), (9, 5), (4, 4), (4, 4)))
    assert buckets.edges == ((4, 4), (5, 9), (9, 5))
    assert list(buckets.of([(5, 5), (4, 4), (6, 5)])) == [1, 0, 2]  # of equals, the first
    assert math.isnan(buckets.waste)
    assert "waste" not in str(buckets)
    with pytest.raises(PlanError, match=r"edges\[0\]"):
        Buckets(((0, 4),))


def test_str_is_a_table() -> None:
    assert [text.split() for text in str(Buckets.choose([3, 4, 4, 9], 2)).splitlines()] == [
        ["bucket", "side", "1", "tokens"],
        ["─" * len("bucket   side 1   tokens")],
        ["0", "4", "4"],
        ["1", "9", "9"],
        ["waste:", "4.8%"],
    ]


@given(line | pair, st.integers(1, 5), st.integers(0, 3), st.booleans(), st.booleans())
def test_each_sample_once_and_batches_of_one_bucket(
    lengths: Lengths, batch_size: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    buckets = Buckets.choose(lengths, 4)
    bucket = buckets.of(lengths)
    batches = BucketBatches(
        lengths, buckets, batch_size, seed=5, shuffle=shuffle, drop_last=drop_last
    )
    batches.set_epoch(epoch)
    found = list(batches)
    assert len(found) == len(batches)
    assert all(len({bucket[i] for i in batch}) == 1 for batch in found)
    drawn = sorted(itertools.chain.from_iterable(found))
    if drop_last:
        assert all(len(batch) == batch_size for batch in found)
        assert len(drawn) == sum(n - n % batch_size for n in np.bincount(bucket))
        assert len(set(drawn)) == len(drawn)
    else:
        assert drawn == list(range(len(lengths)))
        partial = [bucket[batch[0]] for batch in found if len(batch) < batch_size]
        assert len(set(partial)) == len(partial)  # at most one a bucket


def test_order_is_a_function_of_seed_and_epoch() -> None:
    lengths = corpus(300)
    buckets = Buckets.choose(lengths, 4)

    def order(seed: int, epoch: int, *, shuffle: bool = True) -> list[list[int]]:
        batches = BucketBatches(lengths, buckets, 10, seed=seed, shuffle=shuffle)
        batches.set_epoch(epoch)
        assert list(batches) == list(batches)
        return list(batches)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert order(1, 2) != order(2, 1)
    assert order(1, 2, shuffle=False) == order(2, 3, shuffle=False)
    of_batch = [buckets.of(lengths)[batch[0]] for batch in order(1, 2)]
    assert of_batch != sorted(of_batch)  # batches of different buckets are mixed


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("batch_size", 2.0), ("seed", -1)])
def test_batches_check_their_numbers(name: str, value: Any) -> None:
    options = {"batch_size": 2, name: value}
    with pytest.raises(PlanError, match=f"{name} = {value}: expected a whole number"):
        BucketBatches([1, 2], Buckets(((2,),)), **options)
    with pytest.raises(PlanError, match="epoch = -1"):
        BucketBatches([1, 2], Buckets(((2,),)), 2).set_epoch(-1)


@given(line | pair, st.integers(1, 4), st.integers(1, 5))
def test_a_batch_gets_the_shape_of_its_bucket(lengths: Lengths, most: int, batch_size: int) -> None:
    buckets = Buckets.choose(lengths, most)
    pad = pickle.loads(pickle.dumps(PadToBuckets(buckets, pad=-1)))
    for batch in BucketBatches(lengths, buckets, batch_size):
        rows = [rows_of(lengths)[i] for i in batch]
        samples = [tuple(torch.full((n,), i + 1) for n in row) for i, row in enumerate(rows)]
        one = isinstance(lengths[0], int)
        padded = pad([sample[0] for sample in samples] if one else samples)
        edge = buckets.edges[buckets.of(lengths)[batch[0]]]
        for side, ids in enumerate((padded,) if one else padded):
            assert ids.shape == (len(batch), edge[side])
            for i, row in enumerate(rows):
                assert (ids[i, : row[side]] == i + 1).all()
                assert (ids[i, row[side] :] == -1).all()


def test_lists_arrays_and_dtypes() -> None:
    pad = PadToBuckets(Buckets(((2,), (4,))), pad=9)
    assert torch.equal(pad([[1, 2, 3], (4,)]), torch.tensor([[1, 2, 3, 9], [4, 9, 9, 9]]))  # type: ignore[arg-type]
    assert pad([np.ones(2, np.int32)]).dtype == torch.int32  # type: ignore[union-attr]
    assert pad([torch.ones(1)]).shape == (1, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([([1] * 8, [1]), ([1], [1])], r"up to \(8, 1\) long.* at most \(3, 7\) or \(7, 3\)"),
        ([([1] * 6, [1]), ([1], [1] * 6)], r"up to \(6, 6\) long"),
        ([([1], [2]), ([1], [])], r"lengths\[1\]: \(1, 0\)"),
        ([([1], [2]), ([1],)], r"sample 1: shapes \[\(1,\)\]; expected 2 × \(length,\)"),
        ([([1], [[2]])], r"sample 0: shapes \[\(1,\), \(1, 1\)\]"),
        ([], r"shape \(0,\)"),
    ],
)
def test_samples_that_cannot_be_padded(samples: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        PadToBuckets(Buckets(((3, 7), (7, 3))))(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    lengths = corpus(200)
    data = [tuple(torch.arange(1, n + 1) for n in row) for row in lengths]
    buckets = Buckets.choose(lengths, 5)
    batches = BucketBatches(lengths, buckets, 16)
    loader: DataLoader[Any] = DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=batches,
        collate_fn=PadToBuckets(buckets),
        num_workers=workers,
    )
    seen = real = padded = 0
    for src, trg in loader:
        assert (src.shape[1], trg.shape[1]) in buckets.edges
        seen += len(src)
        real += int((src > 0).sum() + (trg > 0).sum())
        padded += src.numel() + trg.numel()
    assert len(loader) == len(batches)
    assert seen == len(data)
    assert 1 - real / padded == pytest.approx(buckets.waste)
