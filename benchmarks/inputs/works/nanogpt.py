"""A GPT of 6 layers on characters, as nanoGPT trains it: 64 × 256 tokens, bf16, dropout 0.2.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/nanogpt.py --steps 100
    headrace bench --work benchmarks/inputs/works/nanogpt.py:work --precision bf16
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

PRECISION = "bf16"


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int, length: int, layers: int, width: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = (2 * layers) ** -0.5 if name.endswith(("out.weight", "mlp.2.weight")) else 1
                nn.init.normal_(weight, std=0.02 * scale)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) -> logits (batch, length, vocabulary)."""
        at = torch.arange(ids.size(1), device=ids.device)
        x = self.blocks(self.drop(self.tokens(ids) + self.positions(at)))
        logits: Tensor = self.head(self.norm(x))
        return logits


def work(
    *,
    tiny: bool = False,
    batch_size: int = 64,
    batches: int = 64,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """A GPT of 6 layers, 64 × 256 tokens."""
    vocabulary, length = 65, 256
    layers, width, heads = 6, 384, 6
    if tiny:
        batch_size, length, layers, width, heads = min(batch_size, 2), 16, 1, 32, 2
    model = GPT(vocabulary, length, layers, width, heads, dropout=0.2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(vocabulary, (batches * batch_size, length + 1), generator=draw)
    loader = loader_of(
        Samples(text),
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, loss, loader


def loss(model: Any, batch: Any) -> Tensor:
    (text,) = batch
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            text = batch[0].to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(text[:, :-1])
                value = cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
