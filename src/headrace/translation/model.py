"""The translation model: an encoder–decoder Transformer that a graph can hold.

Nothing in it reads a value back or branches on one, and no shape depends on one: a step of it can
be captured, and compiled with lengths that vary. Padding (id 0) comes after every real token, so
the decoder's self-attention needs no mask but the causal one.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.errors import TranslationError
from headrace.translation.corpus.vocabulary import EOS as EOS
from headrace.translation.corpus.vocabulary import PAD as PAD
from headrace.translation.corpus.vocabulary import Vocabulary


def _setting(default: object, low: float, high: float, meaning: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model's size and shape. Vocabularies are the data's: `Translator` takes their sizes."""

    width: int = _setting(512, 2, 1 << 16, "numbers a token is, between layers; even")
    heads: int = _setting(8, 1, 1024, "attention heads; divides width")
    encoder_layers: int = _setting(6, 1, 1024, "layers that read the source")
    decoder_layers: int = _setting(6, 1, 1024, "layers that write the target")
    inner: int = _setting(2048, 1, 1 << 20, "width inside the feed-forward part")
    dropout: float = _setting(0.1, 0.0, 1.0, "share of values dropped in training, below 1")
    norm: Literal["pre", "post"] = field(
        default="pre", metadata={"meaning": "norm before each part (steadier) or after (as first)"}
    )
    tied: bool = field(
        default=True,
        metadata={"meaning": "one matrix for output and target; with a joint vocabulary, source"},
    )
    max_length: int = _setting(512, 2, 1 << 20, "tokens a sentence has at most, bos and eos too")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for known in dataclasses.fields(self):
            _check_setting(known, hints[known.name], getattr(self, known.name))
        if self.width % 2 or self.width % self.heads:
            raise TranslationError(
                f"width = {self.width}: expected an even multiple of heads = {self.heads}"
            )

    @classmethod
    def preset(cls, name: str) -> ModelSettings:
        """The preset of that name; `MODEL_PRESETS` has them all."""
        if name not in MODEL_PRESETS:
            raise TranslationError(f"no model {name!r}; known: {', '.join(MODEL_PRESETS)}")
        return MODEL_PRESETS[name]

    def but(self, **changes: Any) -> ModelSettings:
        """These settings with some changed."""
        known = [setting.name for setting in dataclasses.fields(self)]
        for name in changes.keys() - set(known):
            raise TranslationError(f"no model setting {name!r}; known: {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: `ModelSettings().but(**values)` has them back."""
        return dataclasses.asdict(self)


# Not cuDNN's kernels: they are planned anew for every shape, and lengths vary here.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Memory(NamedTuple):
    """A source that was read, and what of it may be looked at."""

    states: Tensor  # (batch, source length, width)
    mask: Tensor  # (batch, 1, 1, source length); True: may be looked at


@dataclass(frozen=True, slots=True)
class DecoderState:
    """Where an incremental decoding stands. Shapes are the same at every step."""

    cache: Tensor  # (layers, keys and values, sentences × beams, heads, length, head width)
    memory: tuple[tuple[Tensor, Tensor], ...]  # a layer's: (sentences, heads, source length, …)
    mask: Tensor  # (sentences, 1, 1, source length)
    seen: Tensor  # (1, 1, 1, length); True: written already
    at: Tensor  # (1,): the position of the next token


def new_model(settings: ModelSettings, vocabularies: tuple[Vocabulary, Vocabulary]) -> Translator:
    """A model for these vocabularies (one object if they are joint), with weights drawn from the
    current random state."""
    source, target = vocabularies
    return Translator(settings, len(source), len(target), joint=source is target)


class Translator(nn.Module):
    """Source and target ids to logits of the next target ids.

    With a `joint` vocabulary source and target ids mean the same; that two vocabularies are of
    one size does not say so.
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
        _check_vocabularies(src_vocabulary, trg_vocabulary, joint)
        self.settings, self.joint = settings, joint
        self.src_vocabulary, self.trg_vocabulary = src_vocabulary, trg_vocabulary
        width = settings.width
        rows = _aligned(trg_vocabulary)
        self.trg_embedding = nn.Embedding(rows, width, padding_idx=PAD)
        self.src_embedding = (
            self.trg_embedding
            if joint and settings.tied
            else nn.Embedding(_aligned(src_vocabulary), width, padding_idx=PAD)
        )
        self.encoder = nn.ModuleList(
            _EncoderLayer(settings) for _ in range(settings.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            _DecoderLayer(settings) for _ in range(settings.decoder_layers)
        )
        pre = settings.norm == "pre"  # then nothing has normed the last layer's sum
        self.encoder_norm = nn.LayerNorm(width) if pre else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if pre else nn.Identity()
        self.output = nn.Linear(width, rows, bias=not settings.tied)
        self.dropout = nn.Dropout(settings.dropout)
        self.register_buffer("positions", sinusoids(settings.max_length, width), persistent=False)
        self._initialize()
        if settings.tied:
            self.output.weight = self.trg_embedding.weight

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        """src (batch, source length), trg (batch, length) -> logits (batch, length, vocabulary)."""
        return self.decode(trg, self.encode(src))

    def encode(self, src: Tensor) -> Memory:
        """src (batch, source length) -> what the decoder looks at."""
        # A row of nothing but padding looks at its first place: of no place at all the mean
        # would be 0/0. Any other row's first token is real.
        first = torch.arange(src.size(1), device=src.device).eq(0)
        mask = (src.ne(PAD) | first)[:, None, None, :]
        x = self._embed(self.src_embedding, src)
        with sdpa_kernel(_ATTENTION):
            for layer in self.encoder:
                x = layer(x, mask)
        return Memory(self.encoder_norm(x), mask)

    def decode(self, trg: Tensor, memory: Memory) -> Tensor:
        """trg (batch, length) -> logits (batch, length, vocabulary), all places at once."""
        x = self._embed(self.trg_embedding, trg)
        with sdpa_kernel(_ATTENTION):
            for layer in self.decoder:
                x = layer(x, memory)
        return self._logits(x)

    # --- one token at a time ----------------------------------------------------------------------

    def start(self, memory: Memory, length: int, beams: int = 1) -> DecoderState:
        """Begin to decode `beams` hypotheses a sentence, of at most `length` tokens, bos too.

        The source's keys and values are kept once a sentence, however many beams look at them.
        """
        if not 1 <= length <= self.settings.max_length:
            raise TranslationError(
                f"length = {length}: expected 1 to {self.settings.max_length}, "
                "the model's max_length"
            )
        layers = cast("list[_DecoderLayer]", self.decoder)
        seen_by = tuple(layer.cross.keys_values(memory.states) for layer in layers)
        keys, heads = seen_by[0][0], self.settings.heads
        rows, head_width = keys.size(0) * beams, self.settings.width // heads
        # In the type that keys are computed in, which autocast decides.
        cache = keys.new_zeros(len(self.decoder), 2, rows, heads, length, head_width)
        seen = torch.zeros(1, 1, 1, length, dtype=torch.bool, device=keys.device)
        at = torch.zeros(1, dtype=torch.int64, device=keys.device)
        return DecoderState(cache, seen_by, memory.mask, seen, at)

    def step(self, last: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """last (sentences, beams), each hypothesis' newest id -> logits (sentences, beams,
        vocabulary) of its next. The state is written in place; it may be used `length` times."""
        x = self.trg_embedding(last) * math.sqrt(self.settings.width)
        x = self.dropout(x + self.positions.index_select(0, state.at))
        state.seen.index_fill_(3, state.at, True)
        with sdpa_kernel(_ATTENTION):
            for number, layer in enumerate(cast("list[_DecoderLayer]", self.decoder)):
                x = layer.step(x, state, number)
        state.at.add_(1)
        return self._logits(x), state

    @staticmethod
    def reorder(state: DecoderState, indices: Tensor) -> DecoderState:
        """The state of other hypotheses: row i goes on from row `indices[i]`, (sentences × beams,),
        which must be of the same sentence."""
        return dataclasses.replace(state, cache=state.cache.index_select(2, indices))

    def _embed(self, embedding: nn.Module, ids: Tensor) -> Tensor:
        length = ids.size(1)
        if length > self.settings.max_length:
            raise TranslationError(
                f"a batch is {length} tokens long: expected at most {self.settings.max_length}, "
                "the model's max_length"
            )
        x = embedding(ids) * math.sqrt(self.settings.width) + self.positions[:length]
        dropped: Tensor = self.dropout(x)
        return dropped

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.decoder_norm(x))
        return logits[..., : self.trg_vocabulary]

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # What several projections share is as many matrices, each with its own fans.
                parts = module.parts if isinstance(module, _Fused) else 1
                for block in module.weight.chunk(parts):
                    nn.init.xavier_uniform_(block)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                # Multiplied by √width when looked up: about as large as the positions then.
                nn.init.normal_(module.weight, std=self.settings.width**-0.5)
                with torch.no_grad():
                    module.weight[PAD].zero_()


class _Around(nn.Module):
    """What stands around each part of a layer: the residual, its dropout, and the norm."""

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
        self.heads, self.dropout = settings.heads, settings.dropout
        self.qkv = _Fused(settings.width, 3)
        self.out = nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """x (batch, length, width), mask (batch, 1, 1, length) -> (batch, length, width)."""
        q, k, v = _split(self.qkv(x), 3, self.heads)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
        return _merged(self.out, y)

    def step(self, x: Tensor, cache: Tensor, state: DecoderState) -> Tensor:
        """x (sentences, beams, width), cache (2, sentences × beams, heads, length, head width)."""
        q, k, v = _split(self.qkv(x.flatten(0, 1).unsqueeze(1)), 3, self.heads)
        cache[0].index_copy_(2, state.at, k)
        cache[1].index_copy_(2, state.at, v)
        y = functional.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=state.seen)
        return _merged(self.out, y).view(x.shape)


class _CrossAttention(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads, self.dropout = settings.heads, settings.dropout
        self.q = nn.Linear(settings.width, settings.width)
        self.kv = _Fused(settings.width, 2)
        self.out = nn.Linear(settings.width, settings.width)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        k, v = _split(self.kv(memory), 2, self.heads)
        return k, v

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x (batch, length, width); in steps, beams stand in the place of length."""
        (q,) = _split(self.q(x), 1, self.heads)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            q, *keys_values, attn_mask=mask, dropout_p=dropout
        )
        return _merged(self.out, y)


def _feed_forward(settings: ModelSettings) -> nn.Sequential:
    widen = nn.Linear(settings.width, settings.inner)
    narrow = nn.Linear(settings.inner, settings.width)
    return nn.Sequential(widen, nn.ReLU(), nn.Dropout(settings.dropout), narrow)


class _EncoderLayer(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention, self.around_attention = _SelfAttention(settings), _Around(settings)
        self.inner, self.around_inner = _feed_forward(settings), _Around(settings)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention(h, mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y


class _DecoderLayer(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention, self.around_attention = _SelfAttention(settings), _Around(settings)
        self.cross, self.around_cross = _CrossAttention(settings), _Around(settings)
        self.inner, self.around_inner = _feed_forward(settings), _Around(settings)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention(h, causal=True))
        seen = self.cross.keys_values(memory.states)
        x = self.around_cross(x, lambda h: self.cross(h, seen, memory.mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y

    def step(self, x: Tensor, state: DecoderState, number: int) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention.step(h, state.cache[number], state))
        x = self.around_cross(x, lambda h: self.cross(h, state.memory[number], state.mask))
        y: Tensor = self.around_inner(x, self.inner)
        return y


class _Fused(nn.Linear):
    """Several square projections in one product."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__(width, parts * width)
        self.parts = parts


def _split(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(batch, length, parts × width) -> parts of (batch, heads, length, width / heads)."""
    batch, length, _ = x.shape
    return x.view(batch, length, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def _merged(out: nn.Linear, y: Tensor) -> Tensor:
    """(batch, heads, length, head width) -> (batch, length, width), projected."""
    merged: Tensor = out(y.transpose(1, 2).flatten(2))
    return merged


def _aligned(vocabulary: int) -> int:
    """Rows of a matrix for so many ids: a GPU's fast products want them by eights. Those that are
    too many are never looked up, have no logit, and so no gradient."""
    return -(-vocabulary // 8) * 8


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sine and cosine of each place, by turns, from fast to slow."""
    at = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    return torch.stack((torch.sin(at * rate), torch.cos(at * rate)), dim=2).flatten(1)


def _check_setting(known: dataclasses.Field[Any], hint: Any, value: object) -> None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise TranslationError(f"{known.name} = {value!r}: expected {' or '.join(choices)}")
    elif hint is bool:
        if not isinstance(value, bool):
            raise TranslationError(f"{known.name} = {value!r}: expected true or false")
    else:
        low, high = known.metadata["low"], known.metadata["high"]
        kinds = (int,) if hint is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            what = "a whole number" if hint is int else "a number"
            raise TranslationError(
                f"{known.name} = {value!r}: expected {what}, {low:,} to {high:,}"
            )
        if known.name == "dropout" and value == high:
            raise TranslationError(f"dropout = {value!r}: expected a number below 1")


def _check_vocabularies(src: object, trg: object, joint: bool) -> None:
    for name, size in (("src_vocabulary", src), ("trg_vocabulary", trg)):
        if isinstance(size, bool) or not isinstance(size, int) or size <= EOS:
            raise TranslationError(
                f"{name} = {size!r}: expected a whole number above {EOS}, the last special id"
            )
    if joint and src != trg:
        raise TranslationError(
            f"a joint vocabulary of {src} source and {trg} target ids: expected one size"
        )


#: `base` is the first Transformer's size; `tiny` and `small` are for small corpora.
MODEL_PRESETS: dict[str, ModelSettings] = {
    "tiny": ModelSettings(128, 4, 2, 2, 512, 0.1),
    "small": ModelSettings(256, 4, 4, 4, 1024, 0.1),
    "base": ModelSettings(512, 8, 6, 6, 2048, 0.1),
    "big": ModelSettings(1024, 16, 6, 6, 4096, 0.3),
}
