"""The loss against plain sums and against torch's."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from headrace.translation import EOS, translation_loss
from headrace.translation import loss as loss_module
from headrace.translation.corpus.vocabulary import BOS, PAD


class Given(nn.Module):
    """A model whose logits are its parameter."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        assert trg.shape == self.logits.shape[:2]
        return self.logits


def targets(rows: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """bos, ids, eos and padding: (rows, length)."""
    draw = torch.Generator().manual_seed(seed)
    trg = torch.randint(EOS + 1, vocabulary, (rows, length), generator=draw)
    trg[:, 0] = BOS
    for row in range(rows):
        end = int(torch.randint(1, length, (1,), generator=draw))
        trg[row, end], trg[row, end + 1 :] = EOS, PAD
    return trg


def plain(logits: Tensor, trg: Tensor, smoothing: float) -> tuple[float, int, float]:
    """Loss, weight and NLL by definition, token by token."""
    vocabulary = logits.size(2)
    total, nll, count = 0.0, 0.0, 0
    for row, ids in zip(logits.tolist(), trg[:, 1:].tolist(), strict=True):
        for values, right in zip(row, ids, strict=True):
            if right == PAD:
                continue
            largest = max(values)
            norm = largest + math.log(sum(math.exp(value - largest) for value in values))
            wanted = [smoothing / vocabulary] * vocabulary
            wanted[right] += 1 - smoothing
            total -= sum(p * (value - norm) for p, value in zip(wanted, values, strict=True))
            nll -= values[right] - norm
            count += 1
    return total / max(count, 1), count, nll / max(count, 1)


class TestLoss:
    @given(
        rows=st.integers(1, 5),
        length=st.integers(2, 7),
        vocabulary=st.integers(5, 12),
        smoothing=st.sampled_from([0.0, 0.1, 0.3]),
        seed=st.integers(0, 10_000),
    )
    @settings(max_examples=40, deadline=None, derandomize=True)
    def test_equals_plain_sums_and_torchs_cross_entropy(
        self, rows: int, length: int, vocabulary: int, smoothing: float, seed: int
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(rows, length - 1, vocabulary, generator=draw)
        trg = targets(rows, length, vocabulary, seed)
        model = Given(logits)
        found = translation_loss(smoothing)(model, (trg, trg))
        loss, weight, nll = plain(logits, trg, smoothing)
        assert found["loss"].item() == pytest.approx(loss, rel=1e-4)
        assert found["weight"].item() == weight
        assert found["nll"].item() == pytest.approx(nll, rel=1e-4)
        assert not found["nll"].requires_grad
        found["loss"].backward()
        theirs = logits.clone().requires_grad_()
        expected = functional.cross_entropy(
            theirs.flatten(0, 1),
            trg[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=smoothing,
        )
        expected.backward()
        torch.testing.assert_close(found["loss"], expected)
        torch.testing.assert_close(model.logits.grad, theirs.grad, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("rows_a_chunk", [1, 3, 4, 100])
    def test_chunks_change_nothing(self, monkeypatch: Any, rows_a_chunk: int) -> None:
        trg = targets(4, 6, 9, seed=3)
        logits = torch.randn(4, 5, 9, dtype=torch.float64)
        monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", rows_a_chunk * 9 + 1)
        model = Given(logits)
        found = translation_loss()(model, (trg, trg))
        found["loss"].backward()
        theirs = logits.clone().requires_grad_()
        ids = trg[:, 1:].flatten()
        smoothed, nll = loss_module._loss_sums(theirs.flatten(0, 1), ids, 0.1)
        (smoothed / ids.ne(PAD).sum()).backward()
        torch.testing.assert_close(found["loss"], smoothed / ids.ne(PAD).sum())
        torch.testing.assert_close(found["nll"], nll / ids.ne(PAD).sum())
        torch.testing.assert_close(model.logits.grad, theirs.grad)

    def test_the_form_for_compiled_code(self) -> None:
        ids = targets(4, 6, 9, seed=3)[:, 1:].flatten()
        found = []
        for sums in (loss_module._fusible_loss_sums, loss_module._loss_sums):
            logits = torch.randn(20, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
            smoothed, nll = sums(logits, ids, 0.2)
            (smoothed + 2 * nll).backward()
            found.append((smoothed, nll, logits.grad))
        torch.testing.assert_close(*found)

    def test_gradcheck(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 21)
        ids = torch.tensor([4, PAD, 6, EOS, PAD])
        logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda some: loss_module._ChunkedLossSums.apply(some, ids, 0.2)[0], (logits,)
        )

    def test_bf16_logits_are_summed_in_float32(self) -> None:
        trg = targets(30, 20, 50, seed=1)
        logits = torch.randn(30, 19, 50).bfloat16()
        model = Given(logits)
        with torch.autocast("cpu", torch.bfloat16):
            found = translation_loss()(model, (trg, trg))
        assert found["loss"].dtype == torch.float32
        expected = plain(logits.float(), trg, 0.1)
        assert found["loss"].item() == pytest.approx(expected[0], rel=1e-5)
        found["loss"].backward()
        assert model.logits.grad is not None
        assert model.logits.grad.dtype == torch.bfloat16

    def test_no_float32_copy_of_all_logits_is_made(self, monkeypatch: Any) -> None:
        """Only chunks are converted to float32."""
        monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 10 * 50)
        sizes: list[int] = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
                result = func(*args, **(kwargs or {}))
                for value in result if isinstance(result, tuple) else (result,):
                    if isinstance(value, Tensor) and value.dtype == torch.float32:
                        sizes.append(value.numel())
                return result

        trg = targets(10, 11, 50, seed=1)
        model = Given(torch.randn(10, 10, 50).bfloat16())
        with Watch():
            translation_loss()(model, (trg, trg))["loss"].backward()
        assert max(sizes) == 10 * 50

    def test_a_batch_without_a_token(self) -> None:
        model = Given(torch.randn(2, 3, 6))
        trg = torch.zeros(2, 4, dtype=torch.int64)
        found = translation_loss()(model, (trg, trg))
        assert [value.item() for value in found.values()] == [0, 0, 0]
        found["loss"].backward()
        assert (model.logits.grad == 0).all()  # type: ignore[union-attr]

    def test_it_pickles(self) -> None:
        loss = translation_loss(0.2)
        assert pickle.loads(pickle.dumps(loss)) == loss
