"""Both columns of docs/porting.md are run, and train alike."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headrace as hr
from headrace.fake import FakeDevice
from support.paths import ROOT

Names = dict[str, Any]


def columns(number: int) -> tuple[str, str]:
    """The two columns of the page's loop `number`, as programs."""
    text = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    block = [block for block in found if "│" in block][number]
    rows = [line.split("│") for line in block.splitlines()]
    left, right = zip(*((row[0].rstrip(), row[1].removeprefix(" ")) for row in rows), strict=True)
    return "\n".join(left), "\n".join(right)


class Small(nn.Module):
    """A classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


class Recurrent(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(7, 5), nn.Linear(5, 7)
        self.recurrent = nn.LSTM(5, 5, batch_first=True)
        self._device = device

    def zero_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = torch.zeros(1, batch_size, 5, device=self._device)
        return zeros, zeros.clone()

    def forward(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        hidden, state = self.recurrent(self.embedding(tokens), state)
        return self.output(hidden), state


class WithMask(nn.Module):
    """Called like a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), Small()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        weight = attention_mask.unsqueeze(-1).float()
        mean = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1)
        logits = self.head(mean)
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels), logits=logits)


def classifier(device: torch.device, said: list[Any]) -> Names:
    model = Small().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(12)]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "cross_entropy": functional.cross_entropy,
        "clip_grad_norm_": nn.utils.clip_grad_norm_,
        "log": lambda *values: said.append(values),
    }


def language_model(device: torch.device, said: list[Any]) -> Names:
    names = classifier(device, said)
    batches = iter(names["loader"] * 4)

    def evaluate(model: Any) -> None:
        said.append([parameter.detach().clone() for parameter in model.parameters()])

    return {
        **names,
        "batches": batches,
        "model_loss": functional.cross_entropy,
        "get_lr": lambda update: 0.1 / (1 + update),
        "evaluate": evaluate,
    }


def recurrent(device: torch.device, said: list[Any]) -> Names:
    model = Recurrent(device).to(device)
    loader = [(torch.randint(7, (3, 4)), torch.randint(7, (3, 4))) for _ in range(8)]
    return {
        "model": model,
        "loader": loader,
        "batch_size": 3,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, fused=True),
        "cross_entropy": functional.cross_entropy,
    }


def gan(device: torch.device, said: list[Any]) -> Names:
    generator, critic = nn.Linear(8, 6).to(device), nn.Linear(6, 1).to(device)

    def bce(logits: torch.Tensor, label: int) -> torch.Tensor:
        wanted = torch.full_like(logits, float(label))
        return functional.binary_cross_entropy_with_logits(logits, wanted)

    return {
        "generator": generator,
        "critic": critic,
        "bce": bce,
        "loader": [torch.randn(4, 6) for _ in range(8)],
        "g_optimizer": torch.optim.AdamW(generator.parameters(), lr=1e-2, fused=True),
        "d_optimizer": torch.optim.AdamW(critic.parameters(), lr=1e-2, fused=True),
        "log": lambda *values: said.append(values),
        "show": lambda images: said.append(images.clone()),
    }


def with_mask(device: torch.device, said: list[Any]) -> Names:
    model = WithMask().to(device)

    def batches(count: int) -> list[Names]:
        return [
            {
                "input_ids": torch.randint(9, (4, 5)),
                "attention_mask": (torch.arange(5) < torch.randint(1, 6, (4, 1))).long(),
                "labels": torch.randint(3, (4,)),
            }
            for _ in range(count)
        ]

    return {
        "model": model,
        "loader": batches(8),
        "valid": batches(3),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        "metric": lambda *values: said.append([value.clone() for value in values]),
    }


LOOPS = (classifier, language_model, recurrent, gan, with_mask)


def run(program: str, make: Callable[..., Names], device: FakeDevice) -> tuple[Names, list[Any]]:
    """Run a column. Returns its names, and what it said, in an order that does not depend on when
    values arrive."""
    torch.manual_seed(5)
    random.seed(5)
    said: list[Any] = []
    names = {**make(device.torch_device, said), "torch": torch, "hr": hr}
    names["device"] = device.torch_device
    exec(compile(program, "docs/porting.md", "exec"), names)
    return names, sorted(map(flat, said), key=len)


def flat(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        return [float(one) for one in value.detach().cpu().flatten()]
    if isinstance(value, list | tuple):
        return [one for part in value for one in flat(part)]
    return [float(value)]


def weights(names: Names) -> list[torch.Tensor]:
    modules = [value for value in names.values() if isinstance(value, nn.Module)]
    return [parameter.detach() for module in modules for parameter in module.parameters()]


@pytest.fixture
def engines_on(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The engines of the page run on the fake device."""
    create, from_step = hr.Engine.__init__, hr.Engine.from_step

    def on_fake(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options, device=fake_device)

    def step_on_fake(step: Any, *, device: Any, **options: Any) -> hr.Engine:
        return from_step(step, device=fake_device, **options)

    monkeypatch.setattr(hr.Engine, "__init__", on_fake)
    monkeypatch.setattr(hr.Engine, "from_step", step_on_fake)
    return fake_device


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[make.__name__ for make in LOOPS])
def test_both_columns_train_alike(engines_on: FakeDevice, number: int) -> None:
    left, right = columns(number)
    plain, plain_said = run(left, LOOPS[number], engines_on)
    ported, ported_said = run(right, LOOPS[number], engines_on)
    assert ported_said == plain_said
    for one, other in zip(weights(plain), weights(ported), strict=True):
        assert torch.equal(one, other)
    engine = ported["engine"]
    assert engine.graphs.why is None
    assert engine.graphs.replays > 0


def test_an_initial_state_is_trained_in_the_first_batch() -> None:
    class Trained(torch.nn.GRU):
        def __init__(self) -> None:
            super().__init__(2, 3)
            self.initial_state = torch.nn.Parameter(torch.zeros(1, 4, 3))

    torch.manual_seed(0)
    model = Trained()
    gradients: list[bool] = []
    model.initial_state.register_hook(lambda gradient: gradients.append(bool(gradient.any())))
    names: dict[str, Any] = {
        "cross_entropy": lambda logits, targets: (logits - targets).square().mean(),
        "hr": hr,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "torch": torch,
        "zero_state": torch.zeros(1, 4, 3),
    }
    (code,) = re.findall(
        r"```python\n(def loss_fn\(model, batch, carried\).*?)```",
        (ROOT / "docs" / "porting.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    exec(compile(code, "docs/porting.md", "exec"), names)
    names["engine"].epoch([(torch.randn(5, 4, 2), torch.randn(5, 4, 3)) for _ in range(3)])
    assert gradients == [True, False, False]
    assert model.initial_state.any()
