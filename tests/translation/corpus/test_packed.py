"""Packed batches: every pair once, limits kept, almost nothing wasted, the same for all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import end_workers
from headrace.errors import PlanError
from headrace.plan import LoaderPlan
from headrace.translation.corpus.division import BatchSpec, IntArray
from headrace.translation.corpus.loader import PlannedSampler, make_loader
from headrace.translation.corpus.packed import PackedEpoch, PackedPlan, PackedSize, packed_size
from headrace.translation.corpus.packed_batch import PackedBatches
from support.translation.id_pairs import random_pairs, write_pairs

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(2, 60)), min_size=1, max_size=200)


def everything(batches: PackedEpoch) -> list[int]:
    return [int(index) for batch in range(len(batches)) for index in batches[batch].indices]


def sentence_lengths(count: int, mean: float, skew: float) -> IntArray:
    """Lengths as in Multi30k: normal, with targets about as long as sources."""
    random = np.random.default_rng(1)
    src = random.normal(mean, mean / 3, count)
    trg = src * random.normal(skew, 0.2, count) + 2
    return np.clip(np.stack((src, trg), axis=1).round(), 4, 60).astype(np.int64)


def skewed_lengths(kind: str, count: int) -> IntArray:
    random = np.random.default_rng(1)
    scale, spread = (4.5, 0.7) if kind == "long" else (3, 0.6)
    both = np.exp(random.normal(scale, spread, (count, 1)))
    tables = {
        "independent": np.exp(random.normal(3, 0.6, (count, 2))),
        "two lengths": np.where(
            random.random((count, 1)) < 0.05,
            random.integers(200, 260, (count, 2)),
            random.integers(3, 9, (count, 2)),
        ),
        "opposite": np.abs(random.integers(3, 250, (count, 1)) - [0, 253]),
    }
    table = tables.get(kind, both * random.normal(1, 0.15, (count, 2)))
    return np.clip(table, 3, 500).astype(np.int64)


class TestPlan:
    @settings(max_examples=60, deadline=None)
    @given(lengths=LENGTHS, tokens=st.integers(59, 700), epoch=st.integers(0, 3))
    def test_every_pair_is_in_one_batch_and_all_batches_fit(
        self, lengths: Any, tokens: int, epoch: int
    ) -> None:
        table = np.array(lengths)
        size = packed_size(table, tokens, 60)
        batches = PackedPlan(table, size, seed=3).epoch(epoch)
        assert sorted(everything(batches)) == list(range(len(table)))
        for number in range(len(batches)):
            spec = batches[number]
            assert spec.lengths == size
            assert len(spec.indices) > 0
            assert table[spec.indices, 0].sum() < size.src  # one token of padding
            assert (table[spec.indices, 1] - 1).sum() <= size.trg
        assert everything(PackedPlan(table, size, seed=3).epoch(epoch)) == everything(batches)

    @pytest.mark.parametrize(
        ("tokens", "pairs", "skew"),
        [(26_000, 29_000, 1.05), (26_000, 120_000, 0.8), (8192, 29_000, 1.2), (1024, 6000, 1.05)],
    )
    def test_less_than_2_percent_of_either_side_is_wasted(
        self, tokens: int, pairs: int, skew: float
    ) -> None:
        """In all epochs together, the last batch of each included."""
        table = sentence_lengths(pairs, 14, skew)
        size = packed_size(table, tokens, 60)
        assert size.trg <= tokens
        plan = PackedPlan(table, size)
        epochs = [plan.epoch(epoch) for epoch in range(2)]
        for fills in zip(*(epoch.fills for epoch in epochs), strict=True):
            assert 0.98 < sum(fills) / len(fills) <= 1
        assert everything(epochs[0]) != everything(epochs[1])
        sizes = [len(epochs[0][number].indices) for number in range(len(epochs[0]))]
        assert min(sizes) > 0.8 * max(sizes)  # no small rest

    @pytest.mark.parametrize(
        ("src", "trg", "tokens"),
        [
            ([60], [61], 100),  # fits once, with 40 tokens to spare
            ([60], [61], 600),
            ([257], [258], 8192),
            ([4, 250], [6, 252], 1000),
            ([3, 5, 5, 5, 5, 5, 5, 5, 500], [4, 6, 6, 6, 6, 6, 6, 6, 501], 8192),
            ([20, 21, 200], [3, 4, 20], 200),  # the longest source has more than `tokens`
            ([2], [241], 4096),
            ([5, 5, 5, 80], [6, 6, 6, 81], 8),  # the longest target alone has more
        ],
    )
    def test_lengths_that_hardly_fit_together(
        self, src: list[int], trg: list[int], tokens: int
    ) -> None:
        """A smaller shape wastes less than one that they do not fill."""
        table = np.stack([np.resize(side, 3000) for side in (src, trg)], axis=1)
        size = packed_size(table, tokens, (max(src), max(trg) - 1))
        assert size.trg <= max(tokens, max(trg) - 1)
        fills = PackedPlan(table, size).epoch(0).fills
        waste = sum(side * (1 - fill) for side, fill in zip(size, fills, strict=True)) / sum(size)
        # Sizes are multiples of 8, with room for 5 tokens: much in a batch of 100.
        assert waste < 0.02 + 6 / size.trg

    @pytest.mark.parametrize(
        ("kind", "pairs", "tokens"),
        [
            ("independent", 40_000, 4096),
            ("correlated", 3000, 2000),
            ("long", 3000, 2000),
            ("two lengths", 3000, 2000),
            ("opposite", 6000, 8192),
        ],
    )
    def test_no_batch_of_an_epoch_is_nearly_empty(self, kind: str, pairs: int, tokens: int) -> None:
        """Also where pairs are left over, and an epoch has a batch in addition."""
        table = skewed_lengths(kind, pairs)
        sizes = table - [0, 1]
        size = packed_size(table, tokens, (int(sizes[:, 0].max()), int(sizes[:, 1].max())))
        plan = PackedPlan(table, size)
        additional = 0
        for number in range(3):
            epoch = plan.epoch(number)
            assert sorted(everything(epoch)) == list(range(pairs))
            used = np.array([sizes[epoch[at].indices].sum(axis=0) for at in range(len(epoch))])
            assert (used <= (size.src - 1, size.trg)).all()
            assert (used > 0.6 * used.mean(axis=0)).all()
            additional += len(epoch) - plan.least_batches
        assert additional  # else this corpus shows nothing

    @settings(max_examples=40, deadline=None)
    @given(lengths=LENGTHS, ranks=st.integers(1, 5), start=st.integers(0, 3))
    def test_the_shares_of_all_ranks_make_up_each_batch(
        self, lengths: Any, ranks: int, start: int
    ) -> None:
        table = np.array(lengths)
        plan = PackedPlan(table, packed_size(table, 300, 60), seed=3)
        whole = plan.epoch(2)
        start = min(start, len(whole))
        samplers = [PlannedSampler(plan, (rank, ranks)) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(2)
            sampler.start_at(start)
            assert len(sampler) == len(whole) - start
        for at, shares in enumerate(zip(*samplers, strict=True), start):
            indices = [int(index) for share in shares for index in share.indices]
            assert sorted(indices) == sorted(whole[at].indices)
            for share in shares:
                assert table[share.indices, 0].sum() < share.lengths[0]
                assert (table[share.indices, 1] - 1).sum() <= share.lengths[1]

    def test_shares_of_real_batches_have_one_shape(self) -> None:
        table = sentence_lengths(6000, 14, 1.05)
        plan = PackedPlan(table, packed_size(table, 9000, 60))
        epoch = plan.epoch(0)
        specs = [plan.share(epoch[at], rank, 4) for at in range(len(epoch)) for rank in range(4)]
        assert len({spec.lengths for spec in specs}) == 1
        assert specs[0].lengths[1] < 1.06 * epoch[0].lengths[1] / 4

    def test_sizes(self) -> None:
        table = np.tile([[10, 11]], (1000, 1))  # 10,000 tokens per side
        assert packed_size(table, 12_000, 60) == PackedSize(10_112, 10_112)
        assert packed_size(table, 9000, 60) == PackedSize(5120, 5120)
        assert packed_size(table, 100, 60) == PackedSize(96, 96)
        assert packed_size(table, 8, 60) == PackedSize(64, 64)  # the longest sentence fits
        assert str(PackedSize(10_112, 64)) == "10,112 source and 64 target tokens"

    def test_a_pair_that_fits_in_no_batch_is_refused(self) -> None:
        with pytest.raises(PlanError, match="has 9 source and 11 target tokens: expected at most"):
            PackedPlan(np.array([[9, 12]]), PackedSize(9, 20))

    def test_an_empty_corpus_has_no_batches(self) -> None:
        none = np.zeros((0, 2), dtype=np.int64)
        assert len(PackedPlan(none, packed_size(none, 100, 60)).epoch(0)) == 0


class TestLoader:
    def test_ids_positions_and_sentences(self, tmp_path: Path) -> None:
        pairs = write_pairs(tmp_path, [([5, 6, 7], [8]), ([9], [10, 11]), ([4], [4])])
        batch = PackedBatches(pairs)[BatchSpec(np.array([1, 0]), (8, 6))]
        src, trg, packing = batch.inputs()
        assert [tensor.tolist() for tensor in (src, trg, batch.targets(), *packing)] == [
            [[9, 3, 5, 6, 7, 3, 0, 0]],
            [[2, 10, 11, 2, 8, 0]],
            [[10, 11, 3, 8, 3, 0]],
            [[0, 1, 0, 1, 2, 3, 0, 0]],
            [[0, 1, 2, 0, 1, 0]],
            [0, 0, 1, 1, 1, 1, 2, 2],
            [0, 0, 0, 1, 1, 2],
        ]

    def test_a_share_without_pairs_is_padding(self, tmp_path: Path) -> None:
        pairs = write_pairs(tmp_path, [([5], [6])])
        batch = PackedBatches(pairs)[BatchSpec(np.array([], dtype=np.int64), (8, 16))]
        assert (batch.source.shape, batch.target.shape) == ((3, 8), (4, 16))
        assert not batch.source.any()
        assert not batch.target.any()

    def test_the_next_epoch_is_planned_during_an_epoch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only if epochs are asked for: validation has one."""
        table = sentence_lengths(60, 14, 1.05)
        plan = PackedPlan(table, packed_size(table, 200, 60), seed=3)
        expected = [everything(plan.epoch(epoch)) for epoch in range(3)]
        planned, epoch_of = [], plan.epoch

        def counted(epoch: int) -> PackedEpoch:
            planned.append(epoch)
            return epoch_of(epoch)

        monkeypatch.setattr(plan, "epoch", counted)
        sampler = PlannedSampler(plan)
        list(sampler)
        assert planned == [0]
        for epoch in (0, 1, 2, 1):
            sampler.set_epoch(epoch)
            found = [int(index) for spec in sampler for index in spec.indices]
            assert found == expected[epoch]
        sampler.set_epoch(2)
        assert sorted(planned) == [0, 1, 1, 2, 2, 3]

    def test_an_epoch_can_start_at_any_batch_in_workers_too(self, tmp_path: Path) -> None:
        pairs = random_pairs(tmp_path, 200, 30, 20)
        plan = PackedPlan(pairs.lengths, packed_size(pairs.lengths, 200, 20))

        def load(workers: int, start: int) -> list[Any]:
            options = LoaderPlan(workers, 2 if workers else None)
            loader = make_loader(pairs, plan, options, pin=False)
            loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
            loader.sampler.start_at(start)  # type: ignore[attr-defined]
            return list(loader)

        whole, rest = load(0, 0), load(1, 3)
        assert len(rest) == len(whole) - 3 > 5
        for one, other in zip(whole[3:], rest, strict=True):
            assert all(map(torch.equal, one, other))

    def test_workers_go_on_with_the_next_epoch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its first batches are loaded when the epoch before ends. A jump, an epoch that was left
        and one that is repeated begin anew."""
        pairs = random_pairs(tmp_path, 60, 30, 20)
        plan = PackedPlan(pairs.lengths, packed_size(pairs.lengths, 100, 20), seed=3)
        dataset, asked, share = plan.dataset(pairs), [], plan.share

        def counted(batch: BatchSpec, *ranks: int) -> BatchSpec:
            asked.append(batch)
            return share(batch, *ranks)

        monkeypatch.setattr(plan, "share", counted)
        loader: Any = make_loader(pairs, plan, LoaderPlan(1, 2), pin=False)
        ahead = []
        passes = ((0, 0, 99), (1, 0, 99), (2, 0, 2), (2, 2, 99), (3, 0, 99), (1, 0, 99), (1, 0, 99))
        for epoch, start, stop in passes:
            loader.sampler.set_epoch(epoch)
            loader.sampler.start_at(start)
            before = len(asked)
            found = [batch.source for batch in itertools.islice(loader, stop - start)]
            batches = plan.epoch(epoch)
            expected = [dataset[batches[at]].source for at in range(start, min(stop, len(batches)))]
            assert len(found) == len(expected) > 1
            assert all(map(torch.equal, found, expected))
            ahead.append(len(asked) - before - len(expected))
        assert ahead == [2, 0, 0, 2, 0, 2, 2]
        # Ended workers begin anew.
        end_workers(loader)
        loader.sampler.set_epoch(2)
        loader.sampler.start_at(0)
        assert torch.equal(next(iter(loader)).source, dataset[plan.epoch(2)[0]].source)
        end_workers(loader)
