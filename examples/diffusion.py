"""A diffusion model that learns to remove noise, with an EMA of its weights, and one line more."""

import copy
import time

import torch
from torch import nn
from torch.nn import functional

import headrace as hr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Denoiser(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        self.times = nn.ModuleList(nn.Linear(32, width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(blocks))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.register_buffer("rates", 2.0 ** torch.arange(16))

    def forward(self, x, t):
        wave = torch.cat([(t[:, None] * self.rates).sin(), (t[:, None] * self.rates).cos()], 1)
        x = self.enter(x)
        for linear, norm, conv in zip(self.times, self.norms, self.convs):
            x = x + conv(functional.silu(norm(x) + linear(wave)[:, :, None, None]))
        return self.leave(x)


def main(steps=200, width=64, blocks=12, batch=32):
    torch.manual_seed(0)
    model = Denoiser(width, blocks).to(DEVICE)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    hr.speed_up(model, optimizer)  # <- the one line

    for step in range(steps):
        if step == steps // 2:
            start = time.perf_counter()
        images = torch.rand(batch, 3, 32, 32, device=DEVICE) * 2 - 1
        noise, t = torch.randn_like(images), torch.rand(batch, device=DEVICE)
        share = torch.cos(t * torch.pi / 2)[:, None, None, None]
        noisy = share * images + (1 - share**2).sqrt() * noise
        loss = functional.mse_loss(model(noisy, t), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}  loss {loss.item():.4f}")
    return loss.item(), 1000 * (time.perf_counter() - start) / (steps - steps // 2)


if __name__ == "__main__":
    print(f"{main()[1]:.2f} ms per step")
