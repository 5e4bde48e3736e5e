"""A denoising diffusion step with a U-Net: 32 images of 64 × 64, bf16.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/unet.py --steps 100
    headrace bench --work benchmarks/inputs/works/unet.py:work --precision bf16
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

PRECISION = "bf16"
TIMES = 1000


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, out))
        self.second = nn.Sequential(
            nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) + self.time(time)[:, :, None, None])
        return y + self.shortcut(x)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, 3, 4, channels // 4, height * width)
        q, k, v = parts.transpose(3, 4).unbind(1)
        y = scaled_dot_product_attention(q, k, v).transpose(2, 3)
        found: Tensor = x + self.out(y.reshape(batch, channels, height, width))
        return found


class UNet(nn.Module):
    """Predicts the noise in images (batch, 3, size, size) at the times (batch,)."""

    frequencies: Tensor
    kept: Tensor

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        time = 4 * width
        self.register_buffer(
            "frequencies", torch.exp(torch.arange(width // 2) * (-math.log(10_000) * 2 / width))
        )
        #: The share of an image that is left at each time.
        self.register_buffer("kept", (1 - torch.linspace(1e-4, 0.02, TIMES)).cumprod(0))
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        sizes = [width << level for level in range(levels)]
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        channels = width
        for size in sizes:
            parts = (Residual(channels, size, time), Residual(size, size, time))
            self.down.append(nn.ModuleList(parts))
            self.shrink.append(nn.Conv2d(size, size, 3, stride=2, padding=1))
            channels = size
        self.middle = nn.ModuleList(
            (Residual(channels, channels, time), Residual(channels, channels, time))
        )
        self.attention = Attention(channels)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for size in reversed(sizes):
            self.grow.append(nn.ConvTranspose2d(channels, size, 4, stride=2, padding=1))
            parts = (Residual(2 * size, size, time), Residual(size, size, time))
            self.up.append(nn.ModuleList(parts))
            channels = size
        self.out = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1)
        )

    def forward(self, images: Tensor, at: Tensor) -> Tensor:
        angles = at[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skipped = self.stem(images), []
        for blocks, shrink in zip(self.down, self.shrink, strict=True):
            for block in blocks:
                x = block(x, time)
            skipped.append(x)
            x = shrink(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for blocks, grow in zip(self.up, self.grow, strict=True):
            x = torch.cat([grow(x), skipped.pop()], dim=1)
            for block in blocks:
                x = block(x, time)
        noise: Tensor = self.out(x)
        return noise


def work(
    *,
    tiny: bool = False,
    batch_size: int = 32,
    batches: int = 32,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """A U-Net that denoises 32 images of 64 × 64."""
    width, levels, size = 64, 4, 64
    if tiny:
        width, levels, size, batch_size = 8, 1, 8, min(batch_size, 2)
    model = UNet(width, levels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    draw = torch.Generator().manual_seed(seed)
    shape = (batches * batch_size, 3, size, size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    loader = loader_of(
        Samples(pixels),
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, loss, loader


def loss(model: Any, batch: Any) -> Tensor:
    (pixels,) = batch
    images = pixels.float().div(127.5).sub(1)
    at = torch.randint(TIMES, (len(images),), device=images.device)
    noise = torch.randn_like(images)
    kept = model.kept[at][:, None, None, None]
    noised = kept.sqrt() * images + (1 - kept).sqrt() * noise
    return mse_loss(model(noised, at), noise)


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            pixels = batch[0].to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(model, (pixels,))
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
