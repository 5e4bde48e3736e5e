"""A recommendation model like DLRM, with 26 embedding tables: 2,048 rows.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/dlrm.py --steps 100
    headrace bench --work benchmarks/inputs/works/dlrm.py:work
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

PRECISION = None
NUMBERS = 13


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    parts: list[nn.Module] = []
    for into, out in pairwise(sizes):
        parts += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*parts)


class DLRM(nn.Module):
    """Numbers go through an MLP, categories through tables; their products go to another MLP."""

    pairs: Tensor

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = mlp((NUMBERS, hidden, hidden // 2, width))
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        self.top = mlp((width + pairs.size(1), hidden, hidden // 2))
        self.out = nn.Linear(hidden // 2, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """numbers (batch, 13), categories (batch, tables) -> logits (batch,)."""
        dense = self.bottom(numbers)
        found = [table(categories[:, at]) for at, table in enumerate(self.tables)]
        features = torch.stack([dense, *found], dim=1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        together = torch.cat([dense, products[:, self.pairs]], dim=1)
        logits: Tensor = self.out(self.top(together)).squeeze(1)
        return logits


def work(
    *,
    tiny: bool = False,
    batch_size: int = 2048,
    batches: int = 64,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """DLRM-like, 26 embedding tables, 2,048 rows."""
    tables, rows, width, hidden = 26, 20_000, 64, 512
    if tiny:
        tables, rows, width, hidden, batch_size = 3, 10, 4, 8, min(batch_size, 4)
    model = DLRM(tables, rows, width, hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    draw = torch.Generator().manual_seed(seed)
    count = batches * batch_size
    samples = Samples(
        torch.randn(count, NUMBERS, generator=draw),
        torch.randint(rows, (count, tables), generator=draw),
        torch.randint(2, (count,), generator=draw).float(),
    )
    loader = loader_of(
        samples,
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, loss, loader


def loss(model: Any, batch: Any) -> Tensor:
    numbers, categories, clicks = batch
    return binary_cross_entropy_with_logits(model(numbers, categories), clicks)


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            numbers, categories, clicks = (part.to(device, non_blocking=True) for part in batch)
            value = binary_cross_entropy_with_logits(model(numbers, categories), clicks)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
