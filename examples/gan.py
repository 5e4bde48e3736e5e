"""A GAN: two models, two optimizers, three losses a step, and one line that speeds it up."""

import time

import torch
from torch import nn
from torch.nn.functional import softplus

import headrace as hr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generator(noise, width):
    layers = [nn.Linear(noise, width * 16), nn.Unflatten(1, (width, 4, 4))]
    for _ in range(3):
        layers += [nn.ConvTranspose2d(width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())


def discriminator(width):
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 16, 1))


def main(steps=200, width=64, noise=64, batch=64):
    torch.manual_seed(0)
    g, d = generator(noise, width).to(DEVICE), discriminator(width).to(DEVICE)
    g_optimizer = torch.optim.AdamW(g.parameters(), 2e-4, (0.5, 0.99), fused=True)
    d_optimizer = torch.optim.AdamW(d.parameters(), 2e-4, (0.5, 0.99), fused=True)
    hr.speed_up(g, d, g_optimizer, d_optimizer)  # <- the one line

    for step in range(steps):
        if step == steps // 2:
            start = time.perf_counter()
        real = torch.rand(batch, 3, 32, 32, device=DEVICE) * 2 - 1
        fake = g(torch.randn(batch, noise, device=DEVICE))
        d_loss = softplus(-d(real)).mean() + softplus(d(fake.detach())).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = softplus(-d(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}  D {d_loss.item():.4f}  G {g_loss.item():.4f}")
    return g_loss.item(), 1000 * (time.perf_counter() - start) / (steps - steps // 2)


if __name__ == "__main__":
    print(f"{main()[1]:.2f} ms per step")
