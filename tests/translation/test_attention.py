"""Packed batches give each sentence the loss that it has in a padded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from headrace.device import Device
from headrace.engine import Engine
from headrace.errors import TranslationError
from headrace.translation import ModelSettings, Translator, attention, translation_loss
from headrace.translation.attention import BLOCK, attend, blocks_of
from headrace.translation.corpus.division import BatchSpec
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.loader import PaddedBatches
from headrace.translation.corpus.packed import PackedPlan, packed_size
from headrace.translation.corpus.packed_batch import PackedBatch
from headrace.translation.corpus.vocabulary import EOS, PAD
from support.translation.id_pairs import random_pairs

SMALL = ModelSettings(16, 4, 2, 2, 24, 0.0, max_length=30)
VOCABULARY, LONGEST = 17, 12


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> IdPairs:
    return random_pairs(tmp_path_factory.mktemp("pairs"), 60, VOCABULARY, LONGEST)


def make(settings: ModelSettings = SMALL) -> Translator:
    torch.manual_seed(0)
    model = Translator(settings, VOCABULARY, VOCABULARY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def both(pairs: IdPairs, tokens: int = 100) -> list[tuple[PackedBatch, tuple[Tensor, Tensor]]]:
    """The batches of an epoch, packed and padded. The first one has only two sentences."""
    plan = PackedPlan(pairs.lengths, packed_size(pairs.lengths, tokens, LONGEST + 2))
    epoch, packed, padded = plan.epoch(0), plan.dataset(pairs), PaddedBatches(pairs)
    found = []
    for number in range(len(epoch)):
        indices = epoch[number].indices[: None if number else 2]
        source, target = pairs.lengths[indices].max(axis=0).tolist()
        spec = BatchSpec(indices, epoch[number].lengths)
        found.append((packed[spec], padded[BatchSpec(indices, (source, target))]))
    return found


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="none"
    )
    return losses.view(targets.shape)


def packed_losses(model: Any, batch: PackedBatch) -> Tensor:
    """The loss of each sentence: (sentences,)."""
    src, trg, packing = batch.inputs()
    losses = token_losses(model(src, trg, packing), batch.targets())[0]
    numbers = packing.trg_sentences
    sums = losses.new_zeros(int(numbers.max()) + 1).index_add(0, numbers, losses)
    return sums[: int(batch.targets().eq(EOS).sum())]


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_the_losses_of_padded_batches_sentence_by_sentence(pairs: IdPairs, norm: Any) -> None:
    model, loss = make(SMALL.replace(norm=norm)), translation_loss()
    for packed, (src, trg) in both(pairs):
        expected = token_losses(model(src, trg[:, :-1]), trg[:, 1:]).sum(dim=1)
        torch.testing.assert_close(packed_losses(model, packed), expected, rtol=1e-5, atol=1e-5)
        for name, value in loss(model, packed).items():
            torch.testing.assert_close(value, loss(model, (src, trg))[name])


def test_a_changed_sentence_changes_no_other_loss(pairs: IdPairs) -> None:
    """Neither its losses nor, with respect to the others' tokens, its gradients."""
    model = make()
    packed, _ = both(pairs)[1]
    changed = PackedBatch(packed.source.clone(), packed.target.clone())
    for side in changed:
        ids, sentences = side[0], side[2]
        ids.copy_(torch.where(sentences == 3, ids % 5 + 5, ids))
    before, after = packed_losses(model, packed), packed_losses(model, changed)
    others = torch.arange(len(before)) != 3
    assert len(before) > 6
    assert torch.equal(before[others], after[others])
    assert not torch.isclose(before[3], after[3])

    looked_up: list[Tensor] = []
    model.src_embedding.register_forward_hook(lambda *call: looked_up.append(call[2]))
    loss = packed_losses(model, packed)[3]
    (gradient,) = torch.autograd.grad(loss, looked_up)
    reached = gradient[0].any(dim=1)
    assert torch.equal(reached, packed.source[2] == 3)


def test_the_engine_trains_as_with_padded_batches(pairs: IdPairs) -> None:
    """In a group of two, batches count by their tokens."""
    batches = both(pairs)
    assert len(batches) == 5
    found = []
    for side in (0, 1):
        model = make()
        engine = Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            translation_loss(),
            accumulate=2,
            clip_norm=1.0,
            device="cpu",
        )
        result = engine.epoch([batch[side] for batch in batches])
        found.append((result.losses, result.weights, list(model.parameters())))
        engine.close()
    (losses, weights, trained), (expected_losses, expected_weights, expected) = found
    assert weights == expected_weights
    assert weights[0] < weights[1] / 2
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for one, other in zip(trained, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_shares_of_ranks_have_the_gradients_of_the_batch(pairs: IdPairs) -> None:
    """Also the share of a rank that has no sentence."""
    plan = PackedPlan(pairs.lengths, packed_size(pairs.lengths, 30, LONGEST + 2))
    whole, loss = plan.epoch(0)[0], translation_loss()
    assert len(whole.indices) < 8
    dataset, sums = plan.dataset(pairs), []
    for ranks in (1, 8):
        model = make()
        for rank in range(ranks):
            values = loss(model, dataset[plan.share(whole, rank, ranks)])
            (values["loss"] * values["weight"]).backward()
        sums.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_in_bf16(pairs: IdPairs) -> None:
    model = make()
    packed, _ = both(pairs)[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = packed_losses(model, packed)
    torch.testing.assert_close(found, packed_losses(model, packed), atol=1, rtol=0.1)


def test_a_step_is_captured_with_the_same_losses(pairs: IdPairs, capturing: Device) -> None:
    """One shape, one graph, no host wait."""
    batches = [packed for packed, _ in both(pairs)]
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        one_layer = SMALL.replace(encoder_layers=1, decoder_layers=1, dropout=0.1)
        model = Translator(one_layer.replace(attention_dropout=0.0), VOCABULARY, VOCABULARY)
        model.to(capturing.torch_device)
        engine = Engine(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
            translation_loss(),
            plan=plan,
            device=capturing,
            deterministic=True,
        )
        torch.manual_seed(5)
        found.append(engine.epoch(batches).losses)
        report = engine.graphs
        engine.close()
    assert report is not None
    assert (report.why, report.shapes, report.replays) == (None, 1, 3)
    assert found[0] == found[1]


class TestFlex:
    @settings(max_examples=40, deadline=None)
    @given(
        lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=12),
        padding=st.tuples(st.integers(1, 300), st.integers(0, 300)),
    )
    def test_blocks_are_those_with_a_common_sentence(self, lengths: Any, padding: Any) -> None:
        table = np.array([*lengths, padding])
        numbers = np.arange(len(table), dtype=np.int32)
        src, trg = (np.repeat(numbers, table[:, side]) for side in (0, 1))
        for queries, keys, causal in ((src, src, False), (trg, trg, True), (trg, src, False)):
            if not len(queries):
                continue
            allowed = queries[:, None] == keys[None, :]
            allowed = np.tril(allowed) if causal else allowed
            rows, columns = (-(-len(side) // BLOCK) for side in (queries, keys))
            padded = np.zeros((rows * BLOCK, columns * BLOCK), dtype=bool)
            padded[: len(queries), : len(keys)] = allowed
            expected = padded.reshape(rows, BLOCK, columns, BLOCK).any(axis=(1, 3))
            sides = (torch.from_numpy(side) for side in (queries, keys))
            blocks = blocks_of(*sides, causal=causal)
            assert {tensor.dtype for tensor in blocks} == {torch.int32}
            assert np.array_equal(listed(blocks.counts, blocks.indices), expected)
            by_key = listed(blocks.counts_by_key, blocks.indices_by_key)
            assert np.array_equal(by_key, expected.T)

    def test_compiled_on_a_gpu_it_is_flex_attention(
        self, pairs: IdPairs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One graph for all batches, with the losses and gradients of the dense mask. On a CPU,
        PyTorch has a backward only for graphs that run eagerly, and refuses all of them."""
        import torch.nn.attention.flex_attention as flex
        from torch._dynamo.backends.debugging import aot_eager

        monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(attention, "_FLEX_DEVICES", ("cpu",))
        model = make(SMALL.replace(encoder_layers=1, decoder_layers=1))
        size = packed_size(pairs.lengths, 200, LONGEST + 2)
        plan = PackedPlan(pairs.lengths, size)
        epoch, dataset, graphs = plan.epoch(0), plan.dataset(pairs), []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return aot_eager(graph, inputs)

        torch.compiler.reset()  # other tests compile it for other shapes
        loss = translation_loss()
        compiled = torch.compile(loss, backend=backend, fullgraph=True)
        for batch in (dataset[epoch[0]], dataset[epoch[1]]):
            found = []
            for way in (compiled, loss):
                model.zero_grad()
                values = way(model, batch)
                values["loss"].backward()
                found.append([*values.values(), *(p.grad for p in model.parameters())])
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert [names.count("flex_attention") for names in graphs] == [3]

    def test_it_has_no_dropout(self) -> None:
        x = torch.zeros(1, 1, 8, 4)
        with pytest.raises(TranslationError, match=r"attention_dropout = 0.1: expected 0"):
            attend(x, x, x, object(), dropout=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFlexOnTheGpu:
    WIDER = SMALL.replace(width=64, inner=96)  # flex_attention needs heads of 16 or more

    @pytest.mark.parametrize("tokens", [200, 8 * BLOCK])
    def test_losses_and_gradients_of_the_dense_mask(self, tmp_path: Path, tokens: int) -> None:
        """Sentence by sentence, also where the last block is not full."""
        pairs = random_pairs(tmp_path, 200, VOCABULARY, LONGEST)
        plan = PackedPlan(pairs.lengths, packed_size(pairs.lengths, tokens, LONGEST + 2))
        epoch, dataset = plan.epoch(0), plan.dataset(pairs)
        batches = [PackedBatch(*(side.cuda() for side in dataset[epoch[at]])) for at in (0, 1)]
        model = make(self.WIDER).cuda()
        compiled = torch.compile(model, dynamic=False, fullgraph=True)
        for batch in batches:
            found = []
            for way in (compiled, model):
                model.zero_grad()
                sums = packed_losses(way, batch)
                sums.sum().backward()
                found.append([sums, *(parameter.grad for parameter in model.parameters())])
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)

    def test_the_engine_trains_as_with_padded_batches(
        self, pairs: IdPairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Under `max`: compiled, captured, and with the losses of `pipeline`. A second process
        would compile nothing: the compiler's cache has the code."""
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        size = packed_size(pairs.lengths, 100, LONGEST + 2)
        plan = PackedPlan(pairs.lengths, size)
        epoch, packed, padded = plan.epoch(0), plan.dataset(pairs), PaddedBatches(pairs)
        specs = [epoch[number] for number in range(len(epoch))] * 3
        found, from_cache = [], []
        for name in ("max", "pipeline", "max"):
            torch.compiler.reset()
            model = make(self.WIDER).cuda()
            engine = Engine(
                model,
                torch.optim.AdamW(model.parameters(), lr=0.001, fused=True),
                translation_loss(),
                plan=name,
                device="cuda",
            )
            longest = (LONGEST, LONGEST + 1)
            result = engine.epoch(
                [
                    packed[spec] if name == "max" else padded[BatchSpec(spec.indices, longest)]
                    for spec in specs
                ]
            )
            found.append(result)
            report, graphs = engine.compiled, engine.graphs
            if name == "max":
                assert report is not None
                assert (report.why, report.compiled, report.compilations) == (None, True, 1)
                from_cache.append(report.from_cache)
                assert graphs is not None
                assert (graphs.why, graphs.shapes) == (None, 1)
                assert graphs.replays == len(specs) - graphs.one_by_one > 5
            engine.close()
        assert found[0].weights == found[1].weights
        assert found[0].losses == pytest.approx(found[1].losses, rel=2e-3)
        assert found[2].losses == pytest.approx(found[1].losses, rel=2e-3)
        assert from_cache == [0, 1]


def listed(counts: Tensor, indices: Tensor) -> Any:
    """The blocks as a table of truth values."""
    table = np.zeros(indices.shape[2:], dtype=bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        table[row, indices[0, 0, row, :count]] = True
    return table
