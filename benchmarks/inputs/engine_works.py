"""The workloads of the benchmarks: a model, an optimizer, a loss and host batches.

transformer   encoder-decoder, 512/8/6+6/2048, vocabulary 32,000, dropout 0.1
resnet50      torchvision's, 224 × 224 images
mlp           three layers: steps too short to hide any overhead
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Work:
    name: str
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batches: list[Any]

    def fresh(self, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The same model and optimizer each time."""
        torch.manual_seed(0)
        model = self.make_model().to(device).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class Translator(nn.Module):
    """`nn.Transformer` around two embeddings, without its read-backs.

    Given a mask and no `is_causal`, `nn.Transformer` reads the mask back in each layer to see
    whether it is causal, and waits for the device. So this model passes `is_causal`.
    """

    def __init__(self, vocabulary: int = 32_000, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.src, self.trg = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.core = nn.Transformer(
            width, 8, layers, layers, 4 * width, 0.1, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(width, vocabulary)
        at = torch.arange(512).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
        positions = torch.zeros(512, width)
        positions[:, 0::2], positions[:, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("positions", positions)
        self.register_buffer("causal", torch.triu(torch.full((512, 512), -math.inf), 1))

    def forward(self, src: torch.Tensor, trg: torch.Tensor) -> torch.Tensor:
        """src (batch, length), trg (batch, length) -> logits (batch, length, vocabulary)."""
        padding = torch.zeros(src.shape, device=src.device).masked_fill(src.eq(0), -math.inf)
        hidden = self.core(
            self.src(src) * math.sqrt(self.width) + self.positions[: src.size(1)],
            self.trg(trg) * math.sqrt(self.width) + self.positions[: trg.size(1)],
            tgt_mask=self.causal[: trg.size(1), : trg.size(1)],
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.out(hidden)


def translation_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    src, trg = batch
    logits = model(src, trg[:, :-1])
    return functional.cross_entropy(
        logits.flatten(0, 1), trg[:, 1:].reshape(-1), ignore_index=0, label_smoothing=0.1
    )


def classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def transformer(sentences: int = 30, length: int = 60, count: int = 16) -> Work:
    draw = torch.Generator().manual_seed(0)

    def ids(extra: int) -> torch.Tensor:
        return torch.randint(4, 32_000, (sentences, length + extra), generator=draw)

    batches = [(ids(0), ids(1)) for _ in range(count)]
    return Work(f"transformer {sentences} × {length}", Translator, translation_loss, batches)


def resnet50(images: int = 128, count: int = 8) -> Work:
    from torchvision.models import resnet50 as build

    draw = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(images, 3, 224, 224, generator=draw),
            torch.randint(0, 1000, (images,), generator=draw),
        )
        for _ in range(count)
    ]
    return Work(f"resnet50 {images} × 224²", build, classification_loss, batches)


def mlp(rows: int = 64, width: int = 64, layers: int = 3, count: int = 16) -> Work:
    draw = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(rows, width, generator=draw),
            torch.randint(0, 10, (rows,), generator=draw),
        )
        for _ in range(count)
    ]

    def build() -> nn.Module:
        hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    return Work(f"mlp {layers} × {width}, {rows} rows", build, classification_loss, batches)
