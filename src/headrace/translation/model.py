"""The translation model: an encoder–decoder Transformer that can be captured as a CUDA graph.

No Python code and no shape depends on the value of a tensor, so a step can be captured, and
compiled for varying lengths. Padding (id 0) follows the real tokens, so the decoder's
self-attention needs only the causal mask. A packed batch has all its sentences in one row
(`Packing` in `attention.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.errors import TranslationError
from headrace.translation.attention import Mask, Packing, attend, attention_dtype
from headrace.translation.corpus.vocabulary import EOS as EOS
from headrace.translation.corpus.vocabulary import PAD as PAD
from headrace.translation.corpus.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The size of the model. Vocabulary sizes are not settings: they come with the data."""

    width: int = 512  # between layers (d_model); even
    heads: int = 8  # divides width
    encoder_layers: int = 6
    decoder_layers: int = 6
    inner: int = 2048  # width of the feed-forward layers
    dropout: float = 0.1
    norm: Literal["pre", "post"] = "pre"  # before each sublayer (more stable) or after it
    tied: bool = True  # output and target embedding share weights; if joint, source too
    max_length: int = 512  # maximum tokens per sentence, with bos and eos
    attention_dropout: float | None = None  # of attention weights; None: as dropout

    def __post_init__(self) -> None:
        if self.width % 2 or self.width % self.heads:
            raise TranslationError(
                f"width = {self.width}: expected an even number, a multiple of heads = {self.heads}"
            )

    @classmethod
    def preset(cls, name: str) -> ModelSettings:
        """The settings of this name in `MODEL_PRESETS`."""
        if name not in MODEL_PRESETS:
            raise TranslationError(f"no model {name!r}; known: {', '.join(MODEL_PRESETS)}")
        return MODEL_PRESETS[name]

    def replace(self, **changes: Any) -> ModelSettings:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


# Without cuDNN's kernels, which make a new plan for each shape: lengths vary here.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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


def new_model(settings: ModelSettings, vocabularies: tuple[Vocabulary, Vocabulary]) -> Translator:
    """A model for these vocabularies, with random weights. A joint vocabulary is passed twice."""
    source, target = vocabularies
    return Translator(settings, len(source), len(target), joint=source is target)


class Translator(nn.Module):
    """A Transformer from source and target ids to logits of the next target ids.

    `joint` says that source and target share one vocabulary. Two vocabularies of the same size are
    not joint.
    """

    positions: Tensor

    def __init__(
        self,
        settings: ModelSettings,
        src_vocabulary: int,
        trg_vocabulary: int,
        *,
        joint: bool = False,
    ) -> None:
        super().__init__()
        self.settings, self.joint = settings, joint
        self.src_vocabulary, self.trg_vocabulary = src_vocabulary, trg_vocabulary
        width = settings.width
        rows = _multiple_of_8(trg_vocabulary)
        self.trg_embedding = nn.Embedding(rows, width, padding_idx=PAD)
        self.src_embedding = (
            self.trg_embedding
            if joint and settings.tied
            else nn.Embedding(_multiple_of_8(src_vocabulary), width, padding_idx=PAD)
        )
        self.encoder = nn.ModuleList(
            _EncoderLayer(settings) for _ in range(settings.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            _DecoderLayer(settings) for _ in range(settings.decoder_layers)
        )
        pre = settings.norm == "pre"  # then the last layer's output still needs a norm
        self.encoder_norm = nn.LayerNorm(width) if pre else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if pre else nn.Identity()
        self.output = nn.Linear(width, rows, bias=not settings.tied)
        self.dropout = nn.Dropout(settings.dropout)
        self.register_buffer("positions", sinusoids(settings.max_length, width), persistent=False)
        self._initialize()
        if settings.tied:
            self.output.weight = self.trg_embedding.weight

    def forward(self, src: Tensor, trg: Tensor, packing: Packing | None = None) -> Tensor:
        """src (batch, source length), trg (batch, length) -> logits (batch, length, vocabulary).

        With `packing`, the batch is one row of sentences end to end.
        """
        return self.decode(trg, self.encode(src, packing), packing)

    def encode(self, src: Tensor, packing: Packing | None = None) -> Memory:
        """src (batch, source length) -> the encoder's output."""
        mask: Mask
        if packing is None:
            # A row of only padding attends to its first position: with none, softmax would give
            # NaN. In any other row the first token is real.
            first = torch.arange(src.size(1), device=src.device).eq(0)
            mask = cross = (src.ne(PAD) | first)[:, None, None, :]
            x = self._embed(self.src_embedding, src)
        else:
            x = self._embed(self.src_embedding, src, packing.src_positions)
            dtype = attention_dtype(x)
            mask, cross = packing.encoder_mask(dtype), packing.cross_mask(dtype)
        with _sdpa_kernels(mask):
            for layer in self.encoder:
                x = layer(x, mask)
        return Memory(self.encoder_norm(x), cross)

    def decode(self, trg: Tensor, memory: Memory, packing: Packing | None = None) -> Tensor:
        """trg (batch, length) -> logits (batch, length, vocabulary), for all positions at once."""
        mask: Mask = None
        if packing is None:
            x = self._embed(self.trg_embedding, trg)
        else:
            x = self._embed(self.trg_embedding, trg, packing.trg_positions)
            mask = packing.decoder_mask(attention_dtype(x))
        with _sdpa_kernels(mask):
            for layer in self.decoder:
                x = layer(x, memory, mask)
        return self._logits(x)

    # --- one token at a time ----------------------------------------------------------------------

    def start(self, memory: Memory, length: int, beams: int = 1) -> DecoderState:
        """Start decoding `beams` hypotheses per sentence, of at most `length` tokens with bos.

        The beams of a sentence share the keys and values of its source.
        """
        if not 1 <= length <= self.settings.max_length:
            raise TranslationError(
                f"length = {length}: expected 1 to {self.settings.max_length}, "
                "the model's max_length"
            )
        layers = cast("list[_DecoderLayer]", self.decoder)
        keys_values = tuple(layer.cross.keys_values(memory.states) for layer in layers)
        keys, heads = keys_values[0][0], self.settings.heads
        rows, head_width = keys.size(0) * beams, self.settings.width // heads
        # In the dtype of the keys, which autocast chooses.
        cache = keys.new_zeros(len(self.decoder), 2, rows, heads, length, head_width)
        written = torch.zeros(1, 1, 1, length, dtype=torch.bool, device=keys.device)
        position = torch.zeros(1, dtype=torch.int64, device=keys.device)
        return DecoderState(cache, keys_values, memory.mask, written, position)

    def step(self, last: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """last (sentences, beams), the newest id of each hypothesis -> logits (sentences, beams,
        vocabulary) of the next id.

        Changes the state in place. It has room for `length` steps.
        """
        x = self.trg_embedding(last) * math.sqrt(self.settings.width)
        x = self.dropout(x + self.positions.index_select(0, state.position))
        state.written.index_fill_(3, state.position, True)
        with sdpa_kernel(_ATTENTION):
            for number, layer in enumerate(cast("list[_DecoderLayer]", self.decoder)):
                x = layer.step(x, state, number)
        state.position.add_(1)
        return self._logits(x), state

    @staticmethod
    def reorder(state: DecoderState, indices: Tensor) -> DecoderState:
        """Select hypotheses: row i continues row `indices[i]`, which must be of the same sentence.

        indices is (sentences × beams,).
        """
        return dataclasses.replace(state, cache=state.cache.index_select(2, indices))

    def _embed(self, embedding: nn.Module, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """ids (batch, length) -> (batch, length, width). `positions` has the shape of `ids`; None
        counts along each row."""
        length = ids.size(1)
        if positions is None and length > self.settings.max_length:
            raise TranslationError(
                f"a batch is {length} tokens long: expected at most {self.settings.max_length}, "
                "the model's max_length"
            )
        places = self.positions[:length] if positions is None else self.positions[positions]
        x = embedding(ids) * math.sqrt(self.settings.width) + places
        dropped: Tensor = self.dropout(x)
        return dropped

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.decoder_norm(x))
        return logits[..., : self.trg_vocabulary]

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # Initialize each fused projection as the separate matrix that it is.
                parts = module.parts if isinstance(module, _FusedProjections) else 1
                for block in module.weight.chunk(parts):
                    nn.init.xavier_uniform_(block)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                # The lookup multiplies by √width, so embeddings and positions have a similar size.
                nn.init.normal_(module.weight, std=self.settings.width**-0.5)
                with torch.no_grad():
                    module.weight[PAD].zero_()


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
        self.qkv = _FusedProjections(settings.width, 3)
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
        self.kv = _FusedProjections(settings.width, 2)
        self.out = nn.Linear(settings.width, settings.width)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        k, v = _split_heads(self.kv(memory), 2, self.heads)
        return k, v

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """x (batch, length, width); when decoding step by step, length is the number of beams."""
        (q,) = _split_heads(self.q(x), 1, self.heads)
        dropout = self.dropout if self.training else 0.0
        return _merge_heads(self.out, attend(q, *keys_values, mask, dropout=dropout))


def _sdpa_kernels(mask: Mask) -> AbstractContextManager[object]:
    """Choose SDPA's kernels, unless flex_attention runs instead."""
    return sdpa_kernel(_ATTENTION) if mask is None or isinstance(mask, Tensor) else nullcontext()


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


# Attribute names are keys in weight files: do not rename them.


class _EncoderLayer(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention, self.around_attention = _SelfAttention(settings), _Residual(settings)
        self.inner, self.around_inner = _feed_forward(settings), _Residual(settings)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention(h, mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y


class _DecoderLayer(nn.Module):
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


class _FusedProjections(nn.Linear):
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


def _multiple_of_8(vocabulary: int) -> int:
    """The number of rows of a matrix for this vocabulary: a multiple of 8, for tensor cores.

    The extra rows are never looked up and have no logits, so they get no gradient.
    """
    return -(-vocabulary // 8) * 8


def sinusoids(length: int, width: int) -> Tensor:
    """Positional encodings, (length, width): sine and cosine in turn, from fast to slow."""
    at = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    return torch.stack((torch.sin(at * rate), torch.cos(at * rate)), dim=2).flatten(1)


#: `base` and `big` are the sizes of the original Transformer; `tiny` and `small` are for small
#: corpora.
MODEL_PRESETS: dict[str, ModelSettings] = {
    "tiny": ModelSettings(128, 4, 2, 2, 512, 0.1),
    "small": ModelSettings(256, 4, 4, 4, 1024, 0.1),
    "base": ModelSettings(512, 8, 6, 6, 2048, 0.1),
    "big": ModelSettings(1024, 16, 6, 6, 4096, 0.3),
}
