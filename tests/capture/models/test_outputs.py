"""What replays return for a model's outputs: values of their own, of the same types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import Device
from support.graphs.sped_up import Made, batch, compare, fused, small


class Layer:
    """Of a cache; a plain object that a model makes at each call."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.device, self.kind = keys, keys.device, type(keys)


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = list(layers)


class Model(nn.Module):
    """Returns its output and objects that hold tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small(4, 8, 4)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        out = self.body(x)
        layer = Layer(out * 2)
        return {"out": out, "cache": Cache(layer, layer), "policy": self.policy(out)}

    def policy(self, out: torch.Tensor) -> Any:
        return torch.distributions.Normal(out, out.exp(), validate_args=False)


def loop(device: Device, model: Model, kept: list[Any]) -> Made:
    model.to(device.torch_device)
    optimizer = fused(model)

    def step(at: int) -> Any:
        found = model(batch(device, at))
        kept.append(found)
        cache, policy = found["cache"], found["policy"]
        assert type(cache) is Cache
        assert cache.layers[0] is cache.layers[1]
        assert cache.layers[0].kind is torch.Tensor
        loss = cache.layers[0].keys.square().mean() - policy.log_prob(batch(device, at)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), cache.layers[0].keys, policy.mean

    return (model, optimizer), step


def test_objects_that_a_call_makes_are_made_anew(capturing: Device) -> None:
    kept: list[Any] = []
    report = compare(capturing, lambda device: loop(device, Model(), kept))
    assert report.parts[0].replays == 5
    assert len({id(one["cache"]) for one in kept}) == len(kept)
    assert len({one["cache"].layers[0].keys.data_ptr() for one in kept}) == len(kept)


class Keeps(Model):
    """Keeps what it returns."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found = super().forward(x)
        self.__dict__["kept"] = [found["cache"]]
        return found


class Names(Model):
    """Returns an object that it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["settings"] = Cache()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {**super().forward(x), "settings": self.__dict__["settings"]}


class Hides(Model):
    """Returns an object that hides a tensor in a closure."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found = super().forward(x)
        found["cache"].scale = lambda: found["out"]
        return found


@pytest.mark.parametrize("kind", [Keeps, Names, Hides])
def test_other_objects_keep_a_model_eager(capturing: Device, kind: type[Model]) -> None:
    report = compare(capturing, lambda device: loop(device, kind(), []))
    why = report.parts[0].why
    assert why is not None
    reason = "a function" if kind is Hides else "that it also keeps"
    assert reason in why
    assert report.parts[0].replays == 0


def test_a_distribution_is_what_a_replay_returns(capturing: Device) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small(4, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.distributions.Categorical:
            return torch.distributions.Categorical(logits=self.body(x), validate_args=False)

    model = Policy().to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for at in range(5):
            policy = model(batch(capturing, at))
            action = policy.sample()
            (policy.log_prob(action).mean() + policy.entropy().mean()).backward()
            assert policy.probs.shape == (6, 3)
        assert handle.report().parts[0].replays == 3


class Classifier(nn.Linear):
    """Returns its loss and what that was computed from."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(x)
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.parametrize("logits_too", [False, True])
def test_an_output_that_another_is_computed_from(capturing: Device, logits_too: bool) -> None:
    """In the eager calls its gradient is that from outside: the first backward has a graph."""

    def build(device: Device) -> Made:
        model = Classifier(4, 2).to(device.torch_device)
        optimizer = fused(model)

        def step(at: int) -> Any:
            made = model(batch(device, at))
            loss = made["loss"]
            (loss + made["logits"].sin().mean() if logits_too else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return (model, optimizer), step

    model = compare(capturing, build).parts[0]
    assert (model.captures, sum(model.eager.values())) == (1, 2)  # two first calls
