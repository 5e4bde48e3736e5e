"""A step of soft actor-critic: an actor, two critics and their slow copies, 256 transitions.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/actor_critic.py --steps 100
    headrace bench --work benchmarks/inputs/works/actor_critic.py:work
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

PRECISION = None
SEEN, ACTIONS = 17, 6  # the numbers of a half-cheetah's observation and action
DISCOUNT, SLOWNESS = 0.99, 0.005


def mlp(into: int, width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(into, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, out),
    )


class Actor(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = mlp(SEEN, width, 2 * ACTIONS)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """seen (batch, 17) -> drawn actions (batch, 6) and their log-probabilities (batch,)."""
        mean, deviation = self.body(seen).chunk(2, dim=1)
        deviation = deviation.clamp(-5, 2)
        noise = torch.randn_like(mean)
        drawn = mean + deviation.exp() * noise
        density = -0.5 * noise.square() - deviation - 0.5 * math.log(2 * math.pi)
        squashed = 2 * (math.log(2) - drawn - softplus(-2 * drawn))
        return drawn.tanh(), (density - squashed).sum(1)


class Critics(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (mlp(SEEN + ACTIONS, width, 1) for _ in range(2))

    def forward(self, seen: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([seen, action], dim=1)
        return self.first(both).squeeze(1), self.second(both).squeeze(1)


def step_of(device: torch.device, width: int) -> Callable[[Any], dict[str, Tensor]]:
    actor, critics = Actor(width).to(device), Critics(width).to(device)
    slow = copy.deepcopy(critics).requires_grad_(False)
    temperature = nn.Parameter(torch.zeros((), device=device))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3, fused=True)
    temperature_optimizer = torch.optim.Adam([temperature], lr=3e-4, fused=True)
    fast_weights, slow_weights = list(critics.parameters()), list(slow.parameters())

    def step(batch: Any) -> dict[str, Tensor]:
        seen, action, reward, after, ended = batch
        weight = temperature.detach().exp()
        with torch.no_grad():
            next_action, likelihood = actor(after)
            value = torch.minimum(*slow(after, next_action)) - weight * likelihood
            target = reward + DISCOUNT * (1 - ended) * value
        first, second = critics(seen, action)
        critic_loss = mse_loss(first, target) + mse_loss(second, target)
        critic_optimizer.zero_grad(set_to_none=True)
        critic_loss.backward()
        critic_optimizer.step()

        drawn, likelihood = actor(seen)
        actor_loss = (weight * likelihood - torch.minimum(*critics(seen, drawn))).mean()
        actor_optimizer.zero_grad(set_to_none=True)
        actor_loss.backward()
        actor_optimizer.step()

        temperature_loss = -(temperature * (likelihood.detach() - ACTIONS)).mean()
        temperature_optimizer.zero_grad(set_to_none=True)
        temperature_loss.backward()
        temperature_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(slow_weights, fast_weights, SLOWNESS)
        return {"loss": critic_loss.detach(), "actor": actor_loss.detach()}

    return step


def work(
    device: torch.device | None = None,
    *,
    tiny: bool = False,
    batch_size: int = 256,
    batches: int = 256,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """A step of soft actor-critic, 256 transitions."""
    width = 256
    if tiny:
        width, batch_size, batches = 8, min(batch_size, 4), min(batches, 4)
    step = step_of(device or torch.device("cpu"), width)
    draw = torch.Generator().manual_seed(seed)
    count = batches * batch_size
    samples = Samples(
        torch.randn(count, SEEN, generator=draw),
        torch.rand(count, ACTIONS, generator=draw) * 2 - 1,
        torch.randn(count, generator=draw),
        torch.randn(count, SEEN, generator=draw),
        (torch.rand(count, generator=draw) < 0.01).float(),
    )
    loader = loader_of(
        samples,
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
