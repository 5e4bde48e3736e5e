"""A training step that can be captured, for tests of graphs on the fake device."""

from __future__ import annotations

import sys
from typing import Any

import torch

from headrace.fake import FakeDevice


def on(device: FakeDevice, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=device.torch_device)


def line() -> int:
    """The caller's line."""
    return sys._getframe(1).f_lineno


class TrainedModel:
    """A small model with everything that a step can change (parameters, running means, dropout's
    random state), and its static input."""

    def __init__(self, device: FakeDevice, **options: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 2),
        ).to(device.torch_device)
        options = {"fused": True, "capturable": True, **options}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.input = device.empty((8, 6), torch.float32)
        self.batches = [
            torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).pin_memory()
            for seed in range(8)
        ]

    def load(self, number: int) -> None:
        self.device.copy(self.input, self.batches[number])

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.input).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()

    def eager(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            self.load(number)
            losses.append(self.step().item())
        return losses

    def state(self) -> list[torch.Tensor]:
        """Everything that a step changes: a copy, on the host."""
        found = [*self.model.state_dict().values(), torch.get_rng_state()]
        for values in self.optimizer.state.values():
            found += values.values()
        return [value.detach().cpu().clone() for value in found]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
