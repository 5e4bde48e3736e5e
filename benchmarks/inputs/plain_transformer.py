"""A translation model of `nn.Transformer` and the training loop around it, written by hand.

It is what one writes without Headrace: no checkpoints, no metrics, no resuming. Model, loss,
optimizer and schedule are those of the trainer, made of PyTorch's own parts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.translation import ModelSettings, TrainSettings, Translator
from headrace.translation.corpus.vocabulary import BOS, EOS, PAD


class PlainTransformer(nn.Module):
    """`nn.Transformer` with embeddings, sinusoidal positions and an output layer."""

    positions: Tensor

    def __init__(
        self, settings: ModelSettings, src_vocabulary: int, trg_vocabulary: int, *, joint: bool
    ) -> None:
        super().__init__()
        if settings.norm != "pre" or not settings.tied:
            raise SystemExit(
                f"norm = {settings.norm}, tied = {settings.tied}: the plain model has only "
                "norm = pre and tied = true"
            )
        width = settings.width
        self.max_length = settings.max_length
        self.trg_embedding = nn.Embedding(trg_vocabulary, width, padding_idx=PAD)
        self.src_embedding = (
            self.trg_embedding if joint else nn.Embedding(src_vocabulary, width, padding_idx=PAD)
        )
        with warnings.catch_warnings():  # pre-norm has no nested tensors; we want none
            warnings.filterwarnings("ignore", message="enable_nested_tensor")
            self.transformer = nn.Transformer(
                width,
                settings.heads,
                settings.encoder_layers,
                settings.decoder_layers,
                settings.inner,
                settings.dropout,
                batch_first=True,
                norm_first=True,
            )
        self.output = nn.Linear(width, trg_vocabulary, bias=False)
        self.output.weight = self.trg_embedding.weight
        self.dropout = nn.Dropout(settings.dropout)
        self.register_buffer("positions", _positions(self.max_length, width), persistent=False)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        """src (batch, source length), trg (batch, length) -> logits (batch, length, vocabulary)."""
        return self.output(self.decode(trg, *self.encode(src)))

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output, and where the source is padding."""
        padding = src.eq(PAD)
        embedded = self._embed(self.src_embedding, src)
        return self.transformer.encoder(embedded, src_key_padding_mask=padding), padding

    def decode(self, trg: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        # Padding follows the real tokens, so the causal mask hides it from them. A second mask for
        # it would only turn the faster causal attention off.
        causal = nn.Transformer.generate_square_subsequent_mask(trg.size(1), dtype=torch.bool)
        return self.transformer.decoder(
            self._embed(self.trg_embedding, trg),
            memory,
            tgt_mask=causal,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )

    def _embed(self, embedding: nn.Module, ids: Tensor) -> Tensor:
        scale = math.sqrt(self.positions.size(1))
        return self.dropout(embedding(ids) * scale + self.positions[: ids.size(1)])


def _positions(length: int, width: int) -> Tensor:
    at = torch.arange(length).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    table = torch.empty(length, width)
    table[:, 0::2], table[:, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
    return table


def plain_copy(model: Translator) -> PlainTransformer:
    """A plain model of the same sizes with the same weights."""
    plain = PlainTransformer(
        model.settings, model.src_vocabulary, model.trg_vocabulary, joint=model.joint
    )
    plain.load_state_dict(_plain_names(model.state_dict(), plain.state_dict()))
    return plain.train()


def _plain_names(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a `Translator` under the names that `nn.Transformer` has for them."""
    parts = {
        "self_attn.in_proj_": ("attention.qkv.",),
        "self_attn.out_proj.": ("attention.out.",),
        "multihead_attn.in_proj_": ("cross.q.", "cross.kv."),
        "multihead_attn.out_proj.": ("cross.out.",),
        "linear1.": ("inner.0.",),
        "linear2.": ("inner.3.",),
    }
    norms = {
        "encoder": {"norm1.": "around_attention", "norm2.": "around_inner"},
        "decoder": {
            "norm1.": "around_attention",
            "norm2.": "around_cross",
            "norm3.": "around_inner",
        },
    }
    found = {}
    for name, tensor in plain.items():
        if not name.startswith("transformer."):
            embedding = name.replace("output.", "trg_embedding.")
            found[name] = ours[embedding][: len(tensor)]  # without the rows that fill up to 8
            continue
        _, stack, *rest = name.split(".")
        if rest[0] == "norm":
            found[name] = ours[f"{stack}_norm.{rest[1]}"]
            continue
        layer, inside, kind = rest[1], ".".join(rest[2:]), name.replace("_", ".").split(".")[-1]
        place = inside.removesuffix(kind)
        sources = parts.get(place) or (f"{norms[stack][place]}.norm.",)
        found[name] = torch.cat([ours[f"{stack}.{layer}.{source}{kind}"] for source in sources])
    return found


class PlainLoop:
    """Trains a `PlainTransformer` with the recipe in `settings`, batch by batch."""

    def __init__(self, model: PlainTransformer, settings: TrainSettings) -> None:
        if settings.schedule != "inverse_sqrt" or settings.accumulate != 1 or settings.ema:
            raise SystemExit("the plain loop has only inverse_sqrt, accumulate = 1 and no EMA")
        self.model, self._clip_norm = model, settings.clip_norm
        self._loss = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=settings.smoothing)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        warmup = settings.warmup
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda n: min((n + 1) / warmup, math.sqrt(warmup / (n + 1)))
        )

    def step(self, src: Tensor, trg: Tensor) -> float:
        """Train on one batch. Returns its loss, a mean over target tokens."""
        loss = self._loss_of(src, trg)
        loss.backward()
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return loss.item()

    def valid_loss(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """The mean loss over the target tokens of these batches."""
        self.model.eval()
        total = tokens = 0.0
        with torch.no_grad():
            for src, trg in batches:
                weight = target_tokens(trg)
                total += self._loss_of(src, trg).item() * weight
                tokens += weight
        self.model.train()
        return total / tokens

    def _loss_of(self, src: Tensor, trg: Tensor) -> Tensor:
        return self._loss(self.model(src, trg[:, :-1]).flatten(0, 1), trg[:, 1:].flatten())


def target_tokens(trg: Tensor) -> int:
    """Tokens that a batch trains on: all but bos and padding."""
    return int(trg[:, 1:].ne(PAD).sum())


@torch.no_grad()
def translate_greedily(
    model: PlainTransformer, sources: Sequence[Sequence[int]], *, rows: int = 128
) -> list[list[int]]:
    """The ids of each translation. The decoder reads the whole prefix again for each new token."""
    model.eval()
    found: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda at: len(sources[at]))
    for start in range(0, len(order), rows):
        at = order[start : start + rows]
        lines = [torch.tensor(sources[index]) for index in at]
        src = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PAD)
        for index, ids in zip(at, _greedy(model, src), strict=True):
            found[index] = ids
    model.train()
    return found


def _greedy(model: PlainTransformer, src: Tensor) -> list[list[int]]:
    """As the trainer decodes: never empty, and at most 1.5 times the source's tokens and 10."""
    memory, padding = model.encode(src)
    limits = (src.ne(PAD).sum(dim=1) * 3 // 2 + 10).clamp(max=model.max_length - 1)
    ids = torch.full((len(src), 1), BOS)
    done = torch.zeros(len(src), dtype=torch.bool)
    for step in range(int(limits.max())):
        logits = model.output(model.decode(ids, memory, padding)[:, -1])
        logits[:, [PAD, BOS]] = -math.inf
        if step == 0:
            logits[:, EOS] = -math.inf
        done = done | limits.le(step)
        newest = logits.argmax(dim=1).masked_fill(done, EOS)
        ids = torch.cat((ids, newest.unsqueeze(1)), dim=1)
        done = done | newest.eq(EOS)
        if done.all():
            break
    rows = ids[:, 1:].tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]
