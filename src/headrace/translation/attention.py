"""Attention for padded and for packed batches: the only file that chooses the kernel.

A packed batch is one row: sentences end to end, then padding. A token may attend to tokens of its
own sentence only. The padding counts as one more sentence.

    compiled, on a GPU   flex_attention, which skips blocks without a common sentence
    otherwise            scaled_dot_product_attention with a mask of queries × keys

flex_attention needs a GPU and `torch.compile`: it has no backward on a CPU, and uncompiled it
computes all queries × keys in float32. It has no dropout. The dense mask gives the same results,
but its time and memory grow with the square of the tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from headrace.errors import TranslationError

#: A dense mask, True or 0 where attention is allowed; or a `BlockMask` of flex_attention.
Mask: TypeAlias = Any
#: Tokens per side of a block, as flex_attention has it by default.
BLOCK = 128
_FLEX_DEVICES = ("cuda",)


class Packing(NamedTuple):
    """Where the sentences of a packed batch lie. They are numbered from 0, in the same order on
    both sides; padding has the number after the last. All are int32."""

    src_positions: Tensor  # (1, source tokens): the position of each token in its sentence
    trg_positions: Tensor  # (1, target tokens)
    src_sentences: Tensor  # (source tokens,): the number of each token's sentence
    trg_sentences: Tensor  # (target tokens,)

    def encoder_mask(self, dtype: torch.dtype) -> Mask:
        return _packed_mask(self.src_sentences, self.src_sentences, dtype)

    def decoder_mask(self, dtype: torch.dtype) -> Mask:
        return _packed_mask(self.trg_sentences, self.trg_sentences, dtype, causal=True)

    def cross_mask(self, dtype: torch.dtype) -> Mask:
        return _packed_mask(self.trg_sentences, self.src_sentences, dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, *, causal: bool = False, dropout: float = 0
) -> Tensor:
    """q (batch, heads, queries, head width), k and v (batch, heads, keys, head width) -> as q.

    `causal` is for padded batches; the masks of packed ones include it."""
    if mask is None or isinstance(mask, Tensor):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
    if dropout:
        raise TranslationError(
            f"attention_dropout = {dropout}: expected 0 for packed batches: flex_attention has none"
        )
    from torch.nn.attention.flex_attention import flex_attention

    attended: Tensor = flex_attention(q, k, v, block_mask=mask)
    return attended


def attention_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention runs on the states `x`: autocast's, if it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _packed_mask(
    queries: Tensor, keys: Tensor, dtype: torch.dtype, *, causal: bool = False
) -> Mask:
    """The mask of these sentence numbers, queries (n,) and keys (m,), for all layers."""
    if torch.compiler.is_compiling() and queries.device.type in _FLEX_DEVICES:
        return _block_mask(queries, keys, causal)
    forbidden = queries.unsqueeze(1) != keys.unsqueeze(0)
    if causal:
        forbidden = forbidden | torch.ones_like(forbidden).triu(1)
    # In the dtype of attention: SDPA would convert a boolean mask in every layer, and keep each
    # copy for backward.
    mask = torch.zeros(forbidden.shape, dtype=dtype, device=forbidden.device)
    return mask.masked_fill_(forbidden, -torch.inf)[None, None]


def _block_mask(queries: Tensor, keys: Tensor, causal: bool) -> Mask:
    from torch.nn.attention.flex_attention import BlockMask

    def same_sentence(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return queries[query] == keys[key]

    def not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (queries[query] == keys[key]) & (key <= query)

    blocks = blocks_of(queries, keys, causal=causal)
    return BlockMask(
        seq_lengths=(queries.size(0), keys.size(0)),
        kv_num_blocks=blocks.counts,
        kv_indices=blocks.indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=blocks.counts_by_key,
        q_indices=blocks.indices_by_key,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=not_later if causal else same_sentence,
    )


class Blocks(NamedTuple):
    """Which blocks of 128 queries × 128 keys have a sentence in common: for each block of queries
    the blocks of keys, and for backward the other way round. All int32."""

    counts: Tensor  # (1, 1, query blocks): how many blocks of keys
    indices: Tensor  # (1, 1, query blocks, key blocks): which; entries after `counts` are unused
    counts_by_key: Tensor  # (1, 1, key blocks)
    indices_by_key: Tensor  # (1, 1, key blocks, query blocks)


def blocks_of(queries: Tensor, keys: Tensor, *, causal: bool = False) -> Blocks:
    """The blocks of these sentence numbers, which ascend. Compiled, it is a few small kernels.

    Since both sides have the sentences in the same order, a block's partners are a range."""
    first_query, last_query = _ends(queries)
    first_key, last_key = _ends(keys)
    starts, stops = (
        _count(last_key < first_query[:, None]),
        _count(first_key <= last_query[:, None]),
    )
    starts_by_key = _count(last_query < first_key[:, None])
    stops_by_key = _count(first_query <= last_key[:, None])
    if causal:
        numbers = torch.arange(first_query.size(0), dtype=torch.int32, device=queries.device)
        stops = torch.minimum(stops, numbers + 1)
        starts_by_key = torch.maximum(starts_by_key, numbers)
    return Blocks(
        *_ranges(starts, stops, first_key.size(0)),
        *_ranges(starts_by_key, stops_by_key, first_query.size(0)),
    )


def _ends(sentences: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last sentence of each block."""
    tokens = sentences.size(0)
    starts = torch.arange(0, tokens, BLOCK, device=sentences.device)
    return sentences[starts], sentences[(starts + BLOCK - 1).clamp(max=tokens - 1)]


def _count(table: Tensor) -> Tensor:
    """(n, m) of truth values -> (n,): how many of a row are true."""
    return table.sum(dim=1, dtype=torch.int32)


def _ranges(starts: Tensor, stops: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of each row, from `starts` to below `stops`: how many, and which, of `size` blocks."""
    numbers = torch.arange(size, dtype=torch.int32, device=starts.device)
    return (stops - starts)[None, None], ((starts[:, None] + numbers) % size)[None, None]
