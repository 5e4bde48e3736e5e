"""ConvNeXt-T from timm: 128 images of 224 × 224, bf16.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/convnext_tiny.py --steps 100
    headrace bench --work benchmarks/inputs/works/convnext_tiny.py:work --precision bf16
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch
from samples import images, loader_of, run
from torch import Tensor
from torch.nn.functional import cross_entropy

PRECISION = "bf16"


def work(
    *,
    tiny: bool = False,
    batch_size: int = 128,
    batches: int = 8,
    seed: int = 0,
    workers: int = 4,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """ConvNeXt-T, 128 images of 224 × 224."""
    size, options = 224, {}
    if tiny:
        batch_size, size = min(batch_size, 2), 32
        options = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)}
    model = timm.create_model("convnext_tiny", num_classes=1000, **options)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    loader = loader_of(
        images(batches * batch_size, size, seed),
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, loss, loader


def normalized(pixels: Tensor) -> Tensor:
    """Bytes to floats from -1 to 1, on the device."""
    return pixels.float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)


def loss(model: Any, batch: Any) -> Tensor:
    pixels, labels = batch
    return cross_entropy(model(normalized(pixels)), labels, label_smoothing=0.1)


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            pixels, labels = (part.to(device, non_blocking=True) for part in batch)
            with torch.autocast(device.type, torch.bfloat16):
                value = cross_entropy(model(normalized(pixels)), labels, label_smoothing=0.1)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
