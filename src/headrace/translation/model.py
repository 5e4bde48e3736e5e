"""The translation model: an encoder–decoder Transformer that can be captured as a CUDA graph.

No Python code and no shape depends on the value of a tensor, so a step can be captured, and
compiled for varying lengths. Padding (id 0) follows the real tokens, so the decoder's
self-attention needs only the causal mask. A packed batch has all its sentences in one row
(`Packing` in `attention.py`).
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.errors import TranslationError
from headrace.translation.attention import Mask, Packing, attention_dtype
from headrace.translation.corpus.vocabulary import EOS as EOS
from headrace.translation.corpus.vocabulary import PAD as PAD
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.layers import (
    DecoderLayer,
    DecoderState,
    EncoderLayer,
    FusedProjections,
    Memory,
)
from headrace.translation.model_settings import ModelSettings

# Without cuDNN's kernels, which make a new plan for each shape: lengths vary here.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
        self.encoder = nn.ModuleList(EncoderLayer(settings) for _ in range(settings.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(settings) for _ in range(settings.decoder_layers))
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
        layers = cast("list[DecoderLayer]", self.decoder)
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
            for number, layer in enumerate(cast("list[DecoderLayer]", self.decoder)):
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
                parts = module.parts if isinstance(module, FusedProjections) else 1
                for block in module.weight.chunk(parts):
                    nn.init.xavier_uniform_(block)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                # The lookup multiplies by √width, so embeddings and positions have a similar size.
                nn.init.normal_(module.weight, std=self.settings.width**-0.5)
                with torch.no_grad():
                    module.weight[PAD].zero_()


def _sdpa_kernels(mask: Mask) -> AbstractContextManager[object]:
    """Choose SDPA's kernels, unless flex_attention runs instead."""
    return sdpa_kernel(_ATTENTION) if mask is None or isinstance(mask, Tensor) else nullcontext()


# Attribute names are keys in weight files: do not rename them.


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
