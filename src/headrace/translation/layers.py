"""The layers of the translation model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.translation.attention import Mask, attend
from headrace.translation.model_settings import ModelSettings


class Memory(NamedTuple):
    """The encoder's output, with its attention mask."""

    states: Tensor  # (batch, source length, width)
    mask: Mask  # (batch, 1, 1, source length), True where attention is allowed; or a packed mask


@dataclass(frozen=True, slots=True)
class DecoderState:
    """The state of incremental decoding. Its shapes do not change from step to step."""

    cache: Tensor  # (layers, keys and values, sentences × beams, heads, length, head width)
    # The source's keys and values per layer: (sentences, heads, source length, head width).
    memory: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor  # (sentences, 1, 1, source length)
    written: Tensor  # (1, 1, 1, length); True where the cache has keys and values
    position: Tensor  # (1,): the position of the next token


class _Residual(nn.Module):
    """The residual connection around a sublayer, with dropout and layer norm."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.pre = settings.norm == "pre"
        self.norm = nn.LayerNorm(settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        total: Tensor
        if self.pre:
            total = x + self.dropout(part(self.norm(x)))
        else:
            total = self.norm(x + self.dropout(part(x)))
        return total


class _SelfAttention(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads, self.dropout = settings.heads, _attention_dropout(settings)
        self.qkv = FusedProjections(settings.width, 3)
        self.out = nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor, mask: Mask = None, causal: bool = False) -> Tensor:
        """x (batch, length, width), mask (batch, 1, 1, length) -> (batch, length, width)."""
        q, k, v = _split_heads(self.qkv(x), 3, self.heads)
        dropout = self.dropout if self.training else 0.0
        return _merge_heads(self.out, attend(q, k, v, mask, causal=causal, dropout=dropout))

    def step(self, x: Tensor, cache: Tensor, state: DecoderState) -> Tensor:
        """x (sentences, beams, width), cache (2, sentences × beams, heads, length, head width)."""
        q, k, v = _split_heads(self.qkv(x.flatten(0, 1).unsqueeze(1)), 3, self.heads)
        cache[0].index_copy_(2, state.position, k)
        cache[1].index_copy_(2, state.position, v)
        y = attend(q, cache[0], cache[1], state.written)
        return _merge_heads(self.out, y).view(x.shape)


class _CrossAttention(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads, self.dropout = settings.heads, _attention_dropout(settings)
        self.q = nn.Linear(settings.width, settings.width)
        self.kv = FusedProjections(settings.width, 2)
        self.out = nn.Linear(settings.width, settings.width)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        k, v = _split_heads(self.kv(memory), 2, self.heads)
        return k, v

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """x (batch, length, width); when decoding step by step, length is the number of beams."""
        (q,) = _split_heads(self.q(x), 1, self.heads)
        dropout = self.dropout if self.training else 0.0
        return _merge_heads(self.out, attend(q, *keys_values, mask, dropout=dropout))


def _attention_dropout(settings: ModelSettings) -> float:
    wanted = settings.attention_dropout
    return settings.dropout if wanted is None else wanted


def _feed_forward(settings: ModelSettings) -> nn.Sequential:
    widen = nn.Linear(settings.width, settings.inner)
    narrow = nn.Linear(settings.inner, settings.width)
    # The second part was dropout: names in weight files count the parts.
    return nn.Sequential(widen, _ReluDropout(settings.dropout), nn.Identity(), narrow)


class _ReluDropout(nn.Module):
    """ReLU, then dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.dropout and torch.compiler.is_compiling()):
            return functional.dropout(functional.relu(x), self.dropout, self.training)
        # In compiled code, backward of ReLU and of dropout would keep a mask each. One is enough.
        # NaN is kept, as in ReLU.
        kept = torch.rand(x.shape, device=x.device, dtype=torch.float32) >= self.dropout
        return torch.where(kept & ~(x <= 0), x / (1 - self.dropout), 0)


class EncoderLayer(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention, self.around_attention = _SelfAttention(settings), _Residual(settings)
        self.inner, self.around_inner = _feed_forward(settings), _Residual(settings)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention(h, mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y


class DecoderLayer(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention, self.around_attention = _SelfAttention(settings), _Residual(settings)
        self.cross, self.around_cross = _CrossAttention(settings), _Residual(settings)
        self.inner, self.around_inner = _feed_forward(settings), _Residual(settings)

    def forward(self, x: Tensor, memory: Memory, mask: Mask = None) -> Tensor:
        """`mask` is that of a packed batch; padded ones need only the causal one."""
        x = self.around_attention(x, lambda h: self.attention(h, mask, causal=mask is None))
        keys_values = self.cross.keys_values(memory.states)
        x = self.around_cross(x, lambda h: self.cross(h, keys_values, memory.mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y

    def step(self, x: Tensor, state: DecoderState, number: int) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention.step(h, state.cache[number], state))
        x = self.around_cross(x, lambda h: self.cross(h, state.memory[number], state.mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y


class FusedProjections(nn.Linear):
    """Several square projections in one matrix multiplication."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__(width, parts * width)
        self.parts = parts


def _split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(batch, length, parts × width) -> parts of (batch, heads, length, width / heads)."""
    batch, length, _ = x.shape
    return x.view(batch, length, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def _merge_heads(out: nn.Linear, y: Tensor) -> Tensor:
    """(batch, heads, length, head width) -> (batch, length, width), projected."""
    merged: Tensor = out(y.transpose(1, 2).flatten(2))
    return merged
