"""Batches as a pure function of (seed, epoch): exactly once, little padding, any worker count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.plan import LoaderPlan
from headrace.translation import BatchPlan, Prepared
from headrace.translation.corpus.batches import EpochBatches
from headrace.translation.corpus.loader import PaddedBatches, PlannedSampler, make_loader
from headrace.translation.corpus.prepare import prepared_for
from headrace.translation.settings import TrainSettings

LENGTHS = st.lists(st.tuples(st.integers(2, 60), st.integers(3, 60)), min_size=1, max_size=200)
CUTS = st.sampled_from(
    [
        {"sentences": 1},
        {"sentences": 7},
        {"sentences": 30, "shapes": 4},
        {"tokens": 60},
        {"tokens": 300},
        {"tokens": 100, "shapes": 6},
    ]
)


def everything(batches: EpochBatches) -> list[int]:
    return [int(index) for batch in range(len(batches)) for index in batches[batch].indices]


class TestShares:
    @settings(max_examples=60, deadline=None)
    @given(lengths=LENGTHS, cut=CUTS, ranks=st.integers(1, 5), start=st.integers(0, 3))
    def test_the_shares_of_all_ranks_make_up_each_batch(
        self, lengths: Any, cut: Any, ranks: int, start: int
    ) -> None:
        """From any batch on, at the lengths that a process alone would pad to."""
        plan = BatchPlan(np.array(lengths), seed=3, **cut)
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
            assert {share.lengths for share in shares} == {whole[at].lengths}
            sizes = [len(share.indices) for share in shares]
            assert max(sizes) - min(sizes) <= 1

    def test_an_empty_share_is_a_row_of_padding(self) -> None:
        plan = BatchPlan(np.array([[4, 5]]), sentences=3)
        (spec,) = PlannedSampler(plan, (1, 2))
        source, target = PaddedBatches([])[spec]  # type: ignore[arg-type]
        assert source.shape == (1, 4)
        assert target.shape == (1, 5)
        assert not source.any()
        assert not target.any()


class TestPlan:
    @settings(max_examples=80, deadline=None)
    @given(lengths=LENGTHS, cut=CUTS, seed=st.integers(0, 5), epoch=st.integers(0, 3))
    def test_every_pair_is_in_one_batch_and_fits_its_lengths(
        self, lengths: Any, cut: Any, seed: int, epoch: int
    ) -> None:
        table = np.array(lengths)
        batches = BatchPlan(table, seed=seed, **cut).epoch(epoch)
        assert sorted(everything(batches)) == list(range(len(table)))
        padded = 0
        for number in range(len(batches)):
            spec = batches[number]
            assert len(spec.indices) > 0
            assert (table[spec.indices].max(axis=0) <= spec.lengths).all()
            padded += len(spec.indices) * sum(spec.lengths)
            if "tokens" not in cut:
                assert len(spec.indices) <= cut["sentences"]
            elif "shapes" not in cut:
                assert table[spec.indices, 1].sum() <= cut["tokens"]
            else:
                assert len(spec.indices) * spec.lengths[1] <= max(cut["tokens"], spec.lengths[1])
        assert batches.padding_share == pytest.approx(1 - table.sum() / padded)

    @settings(max_examples=30, deadline=None)
    @given(lengths=LENGTHS, cut=CUTS)
    def test_a_pure_function_of_seed_and_epoch(self, lengths: Any, cut: Any) -> None:
        table = np.array(lengths)

        def order(seed: int, epoch: int) -> list[int]:
            return everything(BatchPlan(table, seed=seed, **cut).epoch(epoch))

        plan = BatchPlan(table, seed=1, **cut)
        assert everything(plan.epoch(2)) == order(1, 2)
        assert everything(plan.epoch(0)) == order(1, 0)  # whatever was asked for before
        if len(table) > 20:
            assert order(1, 0) != order(1, 1)
            assert order(1, 0) != order(2, 0)

    def test_shapes_limits_the_number_of_shapes(self) -> None:
        table = np.random.default_rng(0).integers(4, 60, (5000, 2))
        batches = BatchPlan(table, sentences=30, shapes=16).epoch(0)
        edges = {batches[number].lengths for number in range(len(batches))}
        assert len(edges) <= 16
        assert BatchPlan(table, sentences=30).epoch(0).shapes > 30

    def test_pairs_of_similar_length_are_batched_together(self) -> None:
        table = np.random.default_rng(0).integers(4, 60, (5000, 1)).repeat(2, axis=1)
        assert BatchPlan(table, sentences=30).epoch(0).padding_share < 0.05

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tokens": 9}, "tokens = 9: expected at least 12, the length of the longest target"),
        ],
    )
    def test_invalid_numbers_are_refused(self, options: Any, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            BatchPlan(np.array([[5, 12]]), **options)

    def test_an_empty_corpus_has_no_batches(self) -> None:
        assert len(BatchPlan(np.zeros((0, 2), dtype=np.int64)).epoch(0)) == 0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder: Path = tmp_path_factory.mktemp("corpus")
    lines = [f"word{n % 7} and {n} more\tWort{n % 7} und noch {n}" for n in range(300)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = TrainSettings((str(folder / "pairs.tsv"),), src="en", trg="de", vocabulary=300)
    return prepared_for(settings, folder / "cache")


class TestLoader:
    def batches(self, prepared: Prepared, workers: int, *, start: int = 0, epoch: int = 0) -> Any:
        pairs = prepared.splits["train"]
        plan = BatchPlan(pairs.lengths, sentences=16, seed=3)
        loader = make_loader(pairs, plan, LoaderPlan(workers, 2 if workers else None), pin=False)
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        loader.sampler.start_at(start)  # type: ignore[attr-defined]
        return list(loader)

    def test_batches_do_not_depend_on_the_number_of_workers(self, prepared: Prepared) -> None:
        alone, helped = self.batches(prepared, 0), self.batches(prepared, 2)
        assert len(alone) == len(helped) > 10
        for one, other in zip(alone, helped, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_epoch_can_start_at_any_batch(self, prepared: Prepared, workers: int) -> None:
        whole = self.batches(prepared, 0, epoch=1)
        rest = self.batches(prepared, workers, start=5, epoch=1)
        assert len(rest) == len(whole) - 5
        for one, other in zip(whole[5:], rest, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])

    def test_ids_and_padding(self, prepared: Prepared) -> None:
        source, target = self.batches(prepared, 0)[0]
        assert source.dtype == target.dtype == torch.int64
        assert (target[:, 0] == 2).all()
        ends = target.eq(3).sum(dim=1)
        assert (ends == 1).all()
        assert source.ne(0).any(dim=1).all()

    def test_loading_leaves_the_random_state_of_training_unchanged(
        self, prepared: Prepared
    ) -> None:
        before = torch.get_rng_state()
        self.batches(prepared, 0)
        assert torch.equal(torch.get_rng_state(), before)
