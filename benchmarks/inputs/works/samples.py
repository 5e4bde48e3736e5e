"""What the scripts in this folder share: samples in memory, their loader, and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

EPOCH = 1000  # batches: a short epoch would measure how loaders begin and end


class Samples(Dataset[Any]):
    """Tensors whose first dimension counts samples. A batch is gathered at once."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)


@lru_cache(maxsize=1)
def images(count: int, size: int, seed: int) -> Samples:
    """Images of 1,000 classes, as bytes: a quarter of what floats would take to copy."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=draw)
    return Samples(pixels, torch.randint(0, 1000, (count,), generator=draw))


def loader_of(
    data: Dataset[Any],
    batch_size: int | None,
    *,
    seed: int,
    workers: int,
    prefetch_factor: int,
    pin: bool,
) -> DataLoader[Any]:
    """A loader that draws samples; if `batch_size` is None, `data` holds whole batches, in order.

    Its random generator is its own: the batches depend on the seed only, not on what else draws
    random numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    sampler = None
    if batch_size is not None:
        count = EPOCH * batch_size
        sampler = RandomSampler(data, replacement=True, num_samples=count, generator=draw)
    return DataLoader(
        data,
        batch_size,
        sampler=sampler,
        collate_fn=_unchanged,
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin,
        generator=draw,
    )


def _unchanged(batch: Any) -> Any:
    return batch


def run(description: str | None, train: Any, arguments: list[str] | None = None) -> None:
    """Read the arguments (by default the command line's), train, and print the loss of every tenth
    step."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    options = parser.parse_args(arguments)
    losses: Iterator[Tensor] = train(
        torch.device(options.device),
        tiny=options.tiny,
        seed=options.seed,
        workers=options.workers,
        pin=options.device != "cpu",
    )
    for step, loss in enumerate(islice(losses, options.steps), 1):
        if step % 10 == 0 or step == options.steps:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
