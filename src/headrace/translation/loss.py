"""The loss of a translation model: cross-entropy with label smoothing, without padding.

The loss of a token is that of torch's `cross_entropy` with `label_smoothing`: the right id has the
probability 1 - smoothing, and `smoothing` is spread evenly over all ids, also the right one and the
special ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.translation.corpus.packed_batch import PackedBatch
from headrace.translation.corpus.vocabulary import PAD

# The largest part of the logits that is converted to float32 at once: 256 MB, which is 2,048 tokens
# with a vocabulary of 32,000.
_CHUNK_ELEMENTS = 1 << 26


def translation_loss(smoothing: float = 0.1) -> TranslationLoss:
    """A loss for `Engine(model, optimizer, loss)`. It can be pickled."""
    return TranslationLoss(smoothing)


@dataclass(frozen=True, slots=True)
class TranslationLoss:
    """Call it as `loss(model, (src, trg))`, or with a `PackedBatch`. trg (batch, length) is bos …
    eos and padding.

    Returns `loss`, the mean over the target tokens without padding and bos; `weight`, the number of
    these tokens; and `nll`, the mean without label smoothing (perplexity is its exponential). A
    batch of only padding has loss 0.
    """

    smoothing: float = 0.1

    def __call__(self, model: Any, batch: Any) -> dict[str, Tensor]:
        if isinstance(batch, PackedBatch):
            logits = model(*batch.inputs()).flatten(0, 1)
            targets = batch.targets().flatten()
        else:
            src, trg = batch
            logits = model(src, trg[:, :-1]).flatten(0, 1)
            targets = trg[:, 1:].flatten()
        sums = _fusible_loss_sums if torch.compiler.is_compiling() else _ChunkedLossSums.apply
        smoothed, nll = sums(logits, targets, self.smoothing)
        weight = targets.ne(PAD).sum()
        tokens = weight.clamp(min=1)
        return {"loss": smoothed / tokens, "weight": weight, "nll": nll.detach() / tokens}


def _loss_sums(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """logits (tokens, vocabulary), targets (tokens,) -> summed smoothed loss and NLL."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = functional.log_softmax(logits, dim=-1, dtype=dtype)
    padding = targets.eq(PAD)
    nll = -log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    uniform = -log_p.mean(dim=1)
    smoothed = (1 - smoothing) * nll + smoothing * uniform
    return smoothed.masked_fill(padding, 0).sum(), nll.masked_fill(padding, 0).sum()


def _fusible_loss_sums(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """`_loss_sums` for compiled code, which fuses it: forward reduces the logits without a float32
    copy of them, and backward is one pass that reads the logits and writes their gradient.

    So there is no `gather`: its backward would fill a tensor as large as the logits with zeros. And
    `smoothed` is written with few operations: after thirty, inductor would write a float32 tensor
    of that size in between.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    x = logits.to(dtype)
    log_sum = x.logsumexp(dim=1)
    is_right = torch.arange(x.size(1), device=x.device) == targets.unsqueeze(1)
    right = torch.where(is_right, x, 0).sum(dim=1)
    padding = targets.eq(PAD)
    smoothed = log_sum - (1 - smoothing) * right - smoothing * x.mean(dim=1)
    nll = log_sum - right
    return smoothed.masked_fill(padding, 0).sum(), nll.masked_fill(padding, 0).sum()


class _ChunkedLossSums(torch.autograd.Function):
    """`_loss_sums` in chunks of tokens, forward and backward, to save memory.

    It keeps only the bf16 logits and their gradient, where `cross_entropy` under autocast makes
    three float32 copies. Backward computes the softmax again.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, targets)
        ctx.smoothing = smoothing
        sums = [
            _loss_sums(chunk, ids, smoothing)
            for chunk, ids in zip(_chunks(logits, logits), _chunks(targets, logits), strict=True)
        ]
        smoothed, nll = sums[0]
        for more_smoothed, more_nll in sums[1:]:
            smoothed, nll = smoothed + more_smoothed, nll + more_nll
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of a token is its softmax minus the target distribution."""
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        pieces = (_chunks(logits, logits), _chunks(targets, logits), _chunks(gradient, logits))
        for chunk, ids, result in zip(*pieces, strict=True):
            right = ids.unsqueeze(1)
            p = functional.softmax(chunk, dim=-1, dtype=factor.dtype)
            p.sub_(ctx.smoothing / logits.size(1))
            p.scatter_add_(1, right, torch.full_like(right, ctx.smoothing - 1, dtype=p.dtype))
            p.mul_(right.ne(PAD) * factor)
            result.copy_(p)
        return gradient, None, None


def _chunks(tensor: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = tensor.split(max(1, _CHUNK_ELEMENTS // logits.size(1)))
    return pieces
