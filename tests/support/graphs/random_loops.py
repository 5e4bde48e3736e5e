"""Random training loops: models, calls, accumulation, shapes, schedules and changes, by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.device import Device
from support.graphs.sped_up import Made, batch


class Odd(nn.Module):
    """A model with tied weights, normalization, and outputs of several kinds."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = choice.choice([nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Identity()])
        self.drop = nn.Dropout(choice.choice([0.0, 0.3]))
        self.last = nn.Linear(4, 4)
        if choice.random() < 0.3:
            self.last.weight = self.first.weight
        self.kind = choice.choice(["tensor", "tuple", "dict"])

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.drop(self.norm(self.first(x)).tanh())
        out = self.last(hidden)
        if self.kind == "tensor":
            return out
        return (out, hidden) if self.kind == "tuple" else {"out": out, "hidden": hidden}


def outputs(result: Any) -> list[torch.Tensor]:
    if isinstance(result, dict):
        return list(result.values())
    return list(result) if isinstance(result, tuple) else [result]


def random_loop(seed: int, device: Device) -> Made:
    """A loop whose every decision comes from the seed. Those from 10,000 on do more: call a model
    up to four times, use an output at times, keep the forward for several backwards, train a weight
    outside of the models, and change a setting of PyTorch's for the backward."""
    choice, more = random.Random(seed), random.Random(seed + 0.5)
    does_more = seed >= 10_000
    where = device.torch_device
    models = [Odd(choice).to(where) for _ in range(choice.choice([1, 1, 2]))]
    parameters = [p for model in models for p in model.parameters()]
    kind = choice.choice(["adamw", "sgd"])
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        if kind == "adamw"
        else torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True)
    )
    scaled, scale = does_more and more.random() < 0.2, nn.Parameter(torch.ones((), device=where))
    if scaled:
        optimizer.add_param_group({"params": [scale]})
    scheduled = choice.random() < 0.4
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) if scheduled else None
    # Gradients that are sums within a call are rounded in the eager loop's order only.
    tied = any(model.last.weight is model.first.weight for model in models)
    calls = 1 if tied else choice.choice([1, 1, 2])
    calls = more.choice([calls, 4]) if does_more and not tied else calls
    accumulate = choice.choice([1, 1, 2, 3])
    to_none = choice.random() < 0.7
    rows = choice.choice([(6,), (6, 3), (6, 6, 2)])
    clips, keeps = choice.random() < 0.4, choice.random() < 0.5
    validates, hidden_every = choice.random() < 0.3, int(choice.random() < 0.5)
    hidden_every = more.choice([hidden_every, 2, 3]) if does_more else hidden_every
    split = does_more and more.random() < 0.2
    strict_every = more.choice([0, 0, 0, 1, 2]) if does_more else 0
    separate = choice.random() < 0.3
    change_at = choice.randrange(3, 9)
    change = choice.choice(["none", "freeze", "decay", "load", "move", "train", "hook"])
    scaler = torch.amp.GradScaler(where.type, init_scale=8.0, growth_interval=3)
    scales = choice.random() < 0.3
    kept: list[Any] = []

    def step(at: int) -> Any:
        if at == change_at:
            _change(change, models, optimizer)
        found = []
        uses_hidden = hidden_every > 0 and at % hidden_every == 0
        is_strict = strict_every > 0 and at % strict_every == 0
        for part in range(accumulate):
            losses = []
            for number, model in enumerate(models):
                for call in range(calls):
                    x = batch(device, 31 * at + 7 * part + call + number, rows[at % len(rows)])
                    made = outputs(model(x))
                    chosen = made if uses_hidden else made[:1]
                    if scaled:
                        chosen = [one * scale for one in chosen]
                    means = [one.square().mean() for one in chosen]
                    losses += means if split else [torch.stack(means).sum()]
                    if keeps:
                        kept[:] = [made, losses[-1]]
            if validates:
                models[0].eval()
                with torch.no_grad():
                    found.append(outputs(models[0](batch(device, at)))[0].sum())
                models[0].train()
            with _strict(is_strict):
                if separate:
                    for at_loss, loss in enumerate(losses, 1):
                        loss = scaler.scale(loss) if scales else loss
                        loss.backward(retain_graph=split and at_loss < len(losses))
                else:
                    total = torch.stack(losses).sum()
                    (scaler.scale(total) if scales else total).backward()
            found += [loss.detach() for loss in losses]
        if clips and scales:
            scaler.unscale_(optimizer)
        if clips:
            found.append(nn.utils.clip_grad_norm_(parameters, 0.5))
        if scales:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=to_none)
        return found

    return (*models, optimizer), step


@contextmanager
def _strict(is_on: bool) -> Iterator[None]:
    """A backward with another setting of PyTorch than its forward."""
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _change(what: str, models: list[Odd], optimizer: torch.optim.Optimizer) -> None:
    if what == "freeze":
        models[0].first.requires_grad_(False)
    elif what == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.1
        if "momentum" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["momentum"] = 0.5
    elif what == "load":
        models[0].load_state_dict({k: v * 0.5 for k, v in models[0].state_dict().items()})
    elif what == "move":
        for parameter in models[0].parameters():
            parameter.data = parameter.data.clone()
    elif what == "hook":
        models[0].last.weight.register_hook(lambda gradient: gradient * 0.5)
    elif what == "train":
        models[0].drop.eval()
