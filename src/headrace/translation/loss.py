"""The loss of a translation model: cross-entropy with label smoothing, over real target tokens.

The loss of a token is torch's `cross_entropy` with `label_smoothing`: of the wanted distribution
1 - smoothing stands on the right id and smoothing is spread evenly over all ids, the right one and
the special ones too. Padding is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.errors import TranslationError
from headrace.translation.corpus.vocabulary import PAD

# How much of the logits is there in float32 at any moment: 256 MB, 2,048 tokens of 32,000 ids.
_CHUNK_ELEMENTS = 1 << 26


def translation_loss(smoothing: float = 0.1) -> TranslationLoss:
    """A loss for `Engine(model, optimizer, loss)`; it can be pickled."""
    return TranslationLoss(smoothing)


@dataclass(frozen=True, slots=True)
class TranslationLoss:
    """`loss(model, (src, trg))`, trg being bos … eos and padding: (batch, length).

    Gives `loss`, the mean over the batch's real target tokens (bos is not one: nothing predicts
    it); `weight`, how many those are; and `nll`, the mean without smoothing, whose exponential is
    the perplexity. A batch without a real token has a loss of 0.
    """

    smoothing: float = 0.1

    def __post_init__(self) -> None:
        value = self.smoothing
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise TranslationError(f"smoothing = {value!r}: expected a number from 0, below 1")

    def __call__(self, model: Any, batch: Any) -> dict[str, Tensor]:
        src, trg = batch
        logits = model(src, trg[:, :-1]).flatten(0, 1)
        wanted = trg[:, 1:].flatten()
        # Fused, compiled code has no float32 copies to save; a loop would only hinder it.
        sums = _plain_sums if torch.compiler.is_compiling() else _ChunkedSums.apply
        smoothed, nll = sums(logits, wanted, self.smoothing)
        weight = wanted.ne(PAD).sum()
        tokens = weight.clamp(min=1)
        return {"loss": smoothed / tokens, "weight": weight, "nll": nll.detach() / tokens}


def _plain_sums(logits: Tensor, wanted: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """logits (tokens, vocabulary), wanted (tokens,) -> the smoothed loss and the plain, summed."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = functional.log_softmax(logits, dim=-1, dtype=dtype)
    padding = wanted.eq(PAD)
    plain = -log_p.gather(1, wanted.unsqueeze(1)).squeeze(1)
    even = -log_p.mean(dim=1)
    smoothed = (1 - smoothing) * plain + smoothing * even
    return smoothed.masked_fill(padding, 0).sum(), plain.masked_fill(padding, 0).sum()


class _ChunkedSums(torch.autograd.Function):
    """`_plain_sums` a few tokens at a time, forward and backward.

    bf16 logits stay the only copy of their size, beside their gradient: with autocast and
    `cross_entropy` there would be three in float32. What backward needs it computes again.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, wanted: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, wanted)
        ctx.smoothing = smoothing
        sums = [
            _plain_sums(some, ids, smoothing)
            for some, ids in zip(_chunks(logits, logits), _chunks(wanted, logits), strict=True)
        ]
        smoothed, nll = sums[0]
        for more_smoothed, more_nll in sums[1:]:
            smoothed, nll = smoothed + more_smoothed, nll + more_nll
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of a token is its softmax less the wanted distribution."""
        logits, wanted = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        pieces = (_chunks(logits, logits), _chunks(wanted, logits), _chunks(gradient, logits))
        for some, ids, result in zip(*pieces, strict=True):
            right = ids.unsqueeze(1)
            p = functional.softmax(some, dim=-1, dtype=factor.dtype)
            p.sub_(ctx.smoothing / logits.size(1))
            p.scatter_add_(1, right, torch.full_like(right, ctx.smoothing - 1, dtype=p.dtype))
            p.mul_(right.ne(PAD) * factor)
            result.copy_(p)
        return gradient, None, None


def _chunks(tensor: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = tensor.split(max(1, _CHUNK_ELEMENTS // logits.size(1)))
    return pieces
