"""A language model of two LSTM layers, whose state is carried from batch to batch: 32 × 35 words.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/lstm.py --steps 100
    headrace bench --work benchmarks/inputs/works/lstm.py:work
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from samples import loader_of, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

PRECISION = None


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """ids (batch, length) -> logits (batch, length, words), and the state after them."""
        hidden, state = self.lstm(self.dropout(self.embedding(ids)), state)
        return self.out(self.dropout(hidden)), state


class Text(Dataset[Tensor]):
    """A text in as many columns as a batch has rows. Batch k continues batch k - 1."""

    def __init__(self, columns: Tensor, length: int) -> None:
        self.columns, self.length = columns, length

    def __len__(self) -> int:
        return (self.columns.size(1) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.columns[:, index * self.length : (index + 1) * self.length + 1].contiguous()


def work(
    *,
    tiny: bool = False,
    batch_size: int = 32,
    batches: int = 1000,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """A language model of two LSTM layers, 32 × 35 words, its state carried."""
    words, width, length = 10_000, 650, 35
    if tiny:
        words, width, length, batch_size = 50, 16, 5, min(batch_size, 3)
    model = LanguageModel(words, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(words, (batch_size, batches * length + 1), generator=draw)
    loader = loader_of(
        Text(text, length),
        None,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    state = tuple(torch.zeros(2, batch_size, width) for _ in range(2))
    return model, optimizer, loss, loader, state


def loss(model: Any, batch: Any, state: Any) -> tuple[Tensor, Any]:
    logits, state = model(batch[:, :-1], state)
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), state


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader, state = work(seed=seed, **options)
    model.to(device).train()
    state = tuple(part.to(device) for part in state)
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            text = batch.to(device, non_blocking=True)
            logits, state = model(text[:, :-1], state)
            state = tuple(part.detach() for part in state)
            value = cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
