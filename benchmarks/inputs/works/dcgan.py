"""The DCGAN of PyTorch's examples, a step with two models and two optimizers: 128 images.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/dcgan.py --steps 100
    headrace bench --work benchmarks/inputs/works/dcgan.py:work
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

PRECISION = None
NOISE = 100


def generator_of(width: int) -> nn.Module:
    """noise (batch, 100, 1, 1) -> images (batch, 3, 64, 64)."""
    parts: list[nn.Module] = []
    channels = NOISE
    for stride, padding, out in ((1, 0, 8), (2, 1, 4), (2, 1, 2), (2, 1, 1)):
        parts += [nn.ConvTranspose2d(channels, out * width, 4, stride, padding, bias=False)]
        parts += [nn.BatchNorm2d(out * width), nn.ReLU(inplace=True)]
        channels = out * width
    return nn.Sequential(*parts, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator_of(width: int) -> nn.Module:
    """images (batch, 3, 64, 64) -> logits (batch,)."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for into, out in ((1, 2), (2, 4), (4, 8)):
        parts += [nn.Conv2d(into * width, out * width, 4, 2, 1, bias=False)]
        parts += [nn.BatchNorm2d(out * width), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*parts, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def step_of(device: torch.device, width: int) -> Callable[[Any], dict[str, Tensor]]:
    generator, discriminator = generator_of(width).to(device), discriminator_of(width).to(device)
    for part in (*generator.modules(), *discriminator.modules()):
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(part.weight, 0.0, 0.02)
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight, 1.0, 0.02)
    options: dict[str, Any] = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True}
    g_optimizer = torch.optim.Adam(generator.parameters(), **options)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), **options)

    def step(batch: Any) -> dict[str, Tensor]:
        (pixels,) = batch
        real = pixels.float().div(127.5).sub(1)
        ones = torch.ones(len(real), device=real.device)
        d_optimizer.zero_grad(set_to_none=True)
        on_real = binary_cross_entropy_with_logits(discriminator(real), ones)
        on_real.backward()
        fake = generator(torch.randn(len(real), NOISE, 1, 1, device=real.device))
        zeros = torch.zeros_like(ones)
        on_fake = binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        on_fake.backward()
        d_optimizer.step()
        g_optimizer.zero_grad(set_to_none=True)
        deceived = binary_cross_entropy_with_logits(discriminator(fake), ones)
        deceived.backward()
        g_optimizer.step()
        return {"loss": (on_real + on_fake).detach(), "generator": deceived.detach()}

    return step


def work(
    device: torch.device | None = None,
    *,
    tiny: bool = False,
    batch_size: int = 128,
    batches: int = 16,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """DCGAN, 128 images of 64 × 64."""
    width = 64
    if tiny:
        width, batch_size, batches = 4, min(batch_size, 2), min(batches, 4)
    step = step_of(device or torch.device("cpu"), width)
    draw = torch.Generator().manual_seed(seed)
    shape = (batches * batch_size, 3, 64, 64)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    loader = loader_of(
        Samples(pixels),
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return step, loader


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    step, loader = work(device, seed=seed, **options)
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            yield step([part.to(device, non_blocking=True) for part in batch])["loss"]


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
