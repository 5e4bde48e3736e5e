"""Random training steps: the same step as a plain loop and under `hr.graphed`.

A `Recipe` says what a step does. `train` builds it on a device and runs it, by hand, with
`hr.graphed` or under `Engine.from_step`, and returns everything that can be compared.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import headrace as hr
from headrace.device import Device

WIDTH = 4

#: What no graph can repeat, each with words that the reason must have.
REFUSED = {
    "item": "the host waits",
    "if": "the host waits",
    "mask index": "the host waits",
    "host copy": "host memory is copied",
    "host random": "random",
    "counter": "hidden['count']",
    "grows": "hidden['seen']",
    "kept tensor": "copy_()",
    "attribute": "calls",
    "replaced buffer": "copy_()",
    "iterator": "iterator",
    "annealed": "hidden['beta']",
    "hook": "hook",
    "scheduler inside": "inside[0].last_epoch",
}

OPTIMIZERS: dict[str, Callable[[Any, Any], torch.optim.Optimizer]] = {
    "adamw": lambda p, device: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam amsgrad": lambda p, device: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "sgd": lambda p, device: torch.optim.SGD(p, lr=1e-2, fused=True),
    "momentum": lambda p, device: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "plain momentum": lambda p, device: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "foreach nesterov": lambda p, device: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "capturable": lambda p, device: torch.optim.Adam(
        p, lr=torch.tensor(1e-2).to(device.torch_device), capturable=True
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A step: what it has, what it does, and what happens between its calls."""

    models: tuple[str, ...] = ("dropout",)
    optimizers: tuple[str, ...] = ("adamw",)
    shared_optimizer: bool = False
    zero_grad: str = "start"
    draws: str = "none"
    losses: str = "one"
    penalty: str = "none"
    clips: bool = False
    averages: str = "none"
    buffer: str = "none"
    autocast: bool = False
    scales: bool = False
    writes: bool = False
    asks: bool = False
    returns: str = "dict"
    arguments: str = "tensor"
    every: int = 1
    schedule: str = "none"
    sizes: tuple[int, ...] = (3,)
    between: tuple[str, ...] = ()
    given: bool = False
    through: str = "graphed"
    refused: str | None = None


def _possible(recipe: Recipe) -> Recipe:
    """Without what the plain loop could not do either: a scaler needs gradients to unscale, from
    `backward()`, and fused optimizers to stay on the device."""
    scales = recipe.losses in ("one", "several", "retained") and recipe.zero_grad != "never"
    fused = {"adamw", "adam amsgrad", "sgd", "momentum"}
    if recipe.scales and not (scales and fused.issuperset(recipe.optimizers)):
        return replace(recipe, scales=False)
    return recipe


def recipes(refused: bool = True) -> st.SearchStrategy[Recipe]:
    one_of = st.sampled_from
    changes = ("rate", "eval", "freeze", "load", "load optimizer", "clear", "value", "evaluate")
    changes = (*changes, "write", "new data", "scale gradients")
    rarely = st.none() | st.none() | one_of(list(REFUSED))
    return st.builds(
        Recipe,
        models=st.lists(
            one_of(["plain", "dropout", "norm", "recurrent", "shared"]), min_size=1, max_size=3
        ).map(tuple),
        optimizers=st.lists(one_of(list(OPTIMIZERS)), min_size=1, max_size=3).map(tuple),
        shared_optimizer=st.booleans(),
        zero_grad=one_of(["start", "end", "zeros", "zeros at start", "never", "module", "each"]),
        draws=one_of(["none", "randn_like", "rand", "bernoulli_", "randperm"]),
        losses=one_of(["one", "several", "retained", "grad", "by hand"]),
        penalty=one_of(["none", "none", "input", "weight"]),
        clips=st.booleans(),
        averages=one_of(["none", "module", "tensors", "foreach"]),
        buffer=one_of(["none", "none", "in place", "centre"]),
        autocast=one_of([False, False, False, True]),
        scales=one_of([False, False, False, True]),
        writes=one_of([False, False, False, True]),
        asks=one_of([False, False, False, True]),
        returns=one_of(["dict", "tensor", "nothing", "weights", "number", "nested"]),
        arguments=one_of(["tensor", "pair", "dict", "host values"]),
        every=st.integers(1, 3),
        schedule=one_of(["none", "none", "outside", "by hand", "two rates"]),
        sizes=one_of([(3,), (3,), (3, 2), (3, 3, 2), (4, 2, 3)]),
        between=st.lists(one_of(changes), max_size=2, unique=True).map(tuple),
        given=one_of([False, False, True]),
        through=one_of(["graphed", "graphed", "engine"]),
        refused=rarely if refused else st.none(),
    ).map(_possible)


class Noted(nn.Module):
    """A model with a buffer, and an attribute that a step may change."""

    def __init__(self, inner: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.inner, self.kind, self.calls = inner, recipe.buffer, 0
        self.asks, self.refused = recipe.asks, recipe.refused
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        if self.kind == "in place":
            with torch.no_grad():
                self.mean.lerp_(out.detach().mean(0).float(), 0.1)
            out = out + self.mean.clone()
        elif self.kind == "centre":
            out = out - self.mean
        if self.asks and not torch.cuda.is_current_stream_capturing() and (x > 1e9).any():
            out = out * 2
        if self.refused == "attribute":
            self.calls += 1
        if self.refused == "replaced buffer":
            self.mean = self.mean * 0.5 + out.detach().mean(0)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.cells(x[None])[0][0]
        return out


def _inner(kind: str, before: list[nn.Module]) -> nn.Module:
    if kind == "shared" and before:  # the same layer in two models
        layer = next(one for one in before[0].modules() if list(one.parameters(recurse=False)))
        if isinstance(layer, nn.Linear):
            return nn.Sequential(layer, nn.Tanh())
    if kind == "recurrent":
        return Recurrent()
    middle = {"dropout": nn.Dropout(0.3), "norm": nn.BatchNorm1d(WIDTH)}.get(kind, nn.Identity())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@dataclass
class Built:
    """A step with all that can change around it."""

    step: Callable[..., Any]
    models: list[Noted]
    optimizers: list[torch.optim.Optimizer]
    averages: list[torch.Tensor]
    settings: dict[str, float]
    hidden: dict[str, Any]
    schedulers: list[Any] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)


def build(device: Device, recipe: Recipe) -> Built:
    models: list[Noted] = []
    for kind in recipe.models:
        models.append(Noted(_inner(kind, list(models)), recipe).to(device.torch_device))
    optimizers = _optimizers(device, recipe, models)
    averaged = [copy.deepcopy(model) for model in models] if recipe.averages == "module" else []
    averages = [p for model in averaged for p in model.parameters()]
    weights = [p for model in models for p in model.parameters()]
    if recipe.averages in ("tensors", "foreach"):
        averages = [p.detach().clone() for p in weights]
    settings = {"weight": 1.0}
    hidden: dict[str, Any] = {"count": 0, "seen": [], "h": None, "beta": 1.0}
    if recipe.refused == "iterator":
        hidden["numbers"] = iter(range(10**9))
    scaler = torch.amp.GradScaler(device.torch_device.type, 8.0) if recipe.scales else None
    inside, outside = (
        [torch.optim.lr_scheduler.StepLR(one, 4, 0.5) for one in optimizers if wanted]
        for wanted in (recipe.refused == "scheduler inside", recipe.schedule == "outside")
    )
    if recipe.refused == "hook":
        models[0].register_forward_hook(lambda *_: None)

    def draw(x: torch.Tensor) -> torch.Tensor:
        if recipe.draws == "randn_like":
            return x + torch.randn_like(x)
        if recipe.draws == "rand":
            return x * torch.rand(x.shape[0], 1, device=device.torch_device)
        if recipe.draws == "bernoulli_":
            return x * torch.empty_like(x).bernoulli_(0.5)
        if recipe.draws == "randperm":
            return x[torch.randperm(x.shape[0], device=device.torch_device)]
        return x

    def do_what_is_refused(loss: torch.Tensor) -> torch.Tensor:
        what = recipe.refused
        if what == "item":
            loss = loss + 0 * loss.item()
        elif what == "if":
            loss = loss * 2 if loss > 1e9 else loss
        elif what == "mask index":
            loss = loss + 0 * averages_or(weights)[loss.detach().reshape(1) > 0].sum()
        elif what == "host copy":
            loss = loss * torch.tensor(1.5, device=device.torch_device)
        elif what == "host random":
            loss = loss * random.random()
        elif what == "counter":
            hidden["count"] += 1
        elif what == "grows":
            hidden["seen"].append(1)
        elif what == "kept tensor":
            loss = loss if hidden["h"] is None else loss + 0.1 * hidden["h"]
            hidden["h"] = loss.detach()
        elif what == "iterator":
            loss = loss * (1 + next(hidden["numbers"]))
        elif what == "annealed":
            hidden["beta"] *= 0.9
            loss = loss * hidden["beta"]
        return loss

    def averages_or(weights: list[torch.Tensor]) -> torch.Tensor:
        return weights[0].detach().reshape(-1)[:1]

    def losses_of(model: Noted, x: torch.Tensor) -> list[torch.Tensor]:
        out = model(draw(x))
        loss = out.square().mean() * settings["weight"]
        if recipe.penalty == "input" and model.inner.__class__ is not Recurrent:
            point = x.detach().clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
            loss = loss + slope.square().mean()
        elif recipe.penalty == "weight":
            trained = [p for p in model.parameters() if p.requires_grad]
            slopes = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
            loss = loss + sum(s.square().sum() for s in slopes if s is not None)
        return [loss, out.abs().mean()] if recipe.losses in ("several", "retained") else [loss]

    def backward(model: Noted, losses: list[torch.Tensor]) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if recipe.losses == "grad" and trained:
            found = torch.autograd.grad(losses[0], trained, allow_unused=True)
            for parameter, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    parameter.grad = gradient
        elif recipe.losses == "by hand" and trained:
            found = torch.autograd.grad(losses[0], trained, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(trained, found, strict=True):
                    if gradient is not None:
                        parameter.sub_(gradient, alpha=0.01)
        else:
            for at, loss in enumerate(losses):
                if loss.requires_grad:
                    loss = loss if scaler is None else scaler.scale(loss)
                    loss.backward(retain_graph=at < len(losses) - 1)

    def clear(model: Noted | None, when: str) -> None:
        if recipe.zero_grad != when:
            return
        if when == "each" and model is not None:
            for parameter in model.parameters():
                parameter.grad = None
        elif when == "module" and model is not None:
            model.zero_grad()
        else:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=not when.startswith("zeros"))

    def step(batch: Any, update: bool = True) -> Any:
        x = batch if isinstance(batch, torch.Tensor) else batch["x" if type(batch) is dict else 0]
        found = {}
        if recipe.arguments == "host values" and recipe.through == "graphed":
            x = x[: batch[1].tolist()[0]] * batch[2]
        clear(None, "start")
        clear(None, "zeros at start")
        for at, model in enumerate(models):
            clear(model, "module")
            clear(model, "each")
            kind = device.torch_device.type
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=recipe.autocast):
                losses = losses_of(model, x)
            losses[0] = do_what_is_refused(losses[0])
            backward(model, losses)
            found[f"loss{at}"] = losses[0].detach()
        if update:
            if recipe.clips:
                for optimizer in optimizers if scaler is not None else ():
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(weights, 0.5)
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            clear(None, "end")
            clear(None, "zeros")
        for scheduler in inside:
            scheduler.step()
        with torch.no_grad():
            if recipe.averages == "foreach":
                torch._foreach_lerp_(averages, weights, 0.1)
            else:
                for average, weight in zip(averages, weights if averages else [], strict=True):
                    average.lerp_(weight, 0.1)
        if recipe.writes:
            x.mul_(0.5)
        return returned(found, x)

    def returned(found: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        total = sum(found.values())
        if recipe.through == "engine":
            return {"loss": total, **found}
        if recipe.returns == "nothing":
            return None
        if recipe.returns == "weights":
            return {"loss": total, "weight": weights[0], "gradient": weights[0].grad, "x": x}
        if recipe.returns == "number":
            return {"loss": total, "rows": x.shape[0], "name": "step"}
        if recipe.returns == "nested":
            return [total, (found, [x + 1])]
        return found if recipe.returns == "dict" else total

    return Built(step, models, optimizers, averages, settings, hidden, outside)


def _optimizers(device: Device, recipe: Recipe, models: list[Noted]) -> list[torch.optim.Optimizer]:
    kinds = [recipe.optimizers[at % len(recipe.optimizers)] for at in range(len(models))]
    if recipe.shared_optimizer:
        seen: set[int] = set()
        groups: list[dict[str, Any]] = []
        for model in models:
            own = [p for p in model.parameters() if id(p) not in seen]
            seen |= {id(p) for p in own}
            groups += [{"params": own}] if own else []
        if recipe.schedule == "two rates":
            for at, group in enumerate(groups):
                group["weight_decay"] = 0.01 * at
        return [OPTIMIZERS[kinds[0]](groups, device)]
    pairs = zip(kinds, models, strict=True)
    return [OPTIMIZERS[kind](list(model.parameters()), device) for kind, model in pairs]


# --- what happens between calls -------------------------------------------------------------------


def _rate(built: Built, at: int) -> None:
    for optimizer in built.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5


def _eval(built: Built, at: int) -> None:
    built.models[0].train(not built.models[0].training)


def _freeze(built: Built, at: int) -> None:
    parameter = next(built.models[-1].parameters())
    parameter.requires_grad_(not parameter.requires_grad)


def _load(built: Built, at: int) -> None:
    built.models[0].load_state_dict(copy.deepcopy(built.models[0].state_dict()))


def _load_optimizer(built: Built, at: int) -> None:
    built.optimizers[0].load_state_dict(copy.deepcopy(built.optimizers[0].state_dict()))


def _clear(built: Built, at: int) -> None:
    for model in built.models:
        model.zero_grad(set_to_none=at % 2 == 0)


def _value(built: Built, at: int) -> None:
    built.settings["weight"] += 0.5


def _evaluate(built: Built, at: int) -> None:
    with torch.no_grad():
        for model in built.models:
            model(torch.ones_like(model.mean).expand(2, WIDTH))


def _write(built: Built, at: int) -> None:
    with torch.no_grad():
        for parameter in built.models[0].parameters():
            parameter.mul_(0.9)


def _new_data(built: Built, at: int) -> None:
    parameter = next(built.models[0].parameters())
    parameter.data = parameter.data.clone()


def _scale_gradients(built: Built, at: int) -> None:
    for model in built.models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5 if at % 2 else parameter.grad.mul_(0.5)


BETWEEN: dict[str, Callable[[Built, int], None]] = {
    "rate": _rate,
    "eval": _eval,
    "freeze": _freeze,
    "load": _load,
    "load optimizer": _load_optimizer,
    "clear": _clear,
    "value": _value,
    "evaluate": _evaluate,
    "write": _write,
    "new data": _new_data,
    "scale gradients": _scale_gradients,
}


# --- running --------------------------------------------------------------------------------------


def batch_of(recipe: Recipe, x: torch.Tensor, at: int) -> Any:
    if recipe.arguments == "host values" and recipe.through == "graphed":
        return x, torch.tensor([2]), torch.tensor(1.0 if at < 9 else 2.0)
    if recipe.arguments == "dict":
        return {"x": x, "y": x.sum(1)}
    return (x, x.shape[0]) if recipe.arguments == "pair" else x


def train(
    device: Device, recipe: Recipe, *, captured: bool, count: int
) -> tuple[list[Any], hr.GraphReport | None]:
    """Everything that the step leaves, with a report if it was to be captured."""
    torch.manual_seed(0)
    random.seed(0)
    built = build(device, recipe)
    generator = torch.Generator().manual_seed(1)
    sizes = [recipe.sizes[at % len(recipe.sizes)] for at in range(count)]
    data = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    if recipe.through == "engine":
        return _train_by_engine(device, recipe, built, data, captured)
    step: Any = built.step
    if captured:
        options: dict[str, Any] = {}
        if recipe.given:
            options = {"modules": built.models, "optimizers": built.optimizers}
        step = hr.graphed(built.step, device=device, **options)
    returned, batches = [], []
    for at, x in enumerate(data):
        x = x.to(device.torch_device)
        batch = batch_of(recipe, x, at)
        update = (at + 1) % recipe.every == 0
        one = step(batch, update) if recipe.every > 1 else step(batch)
        # A plain step returns the weight itself, which later steps change; a replay, a copy.
        returned.append(_host(one) if recipe.returns == "weights" else one)
        batches.append(batch)
        _between(recipe, built, at)
    report = step.report() if captured else None
    return [_host(returned), *_state(built), _host(batches)], report


def _train_by_engine(
    device: Device, recipe: Recipe, built: Built, data: list[torch.Tensor], captured: bool
) -> tuple[list[Any], hr.GraphReport | None]:
    plan = "graph" if captured else "pipeline"
    losses: list[Any] = []
    engine = hr.Engine.from_step(
        built.step, device=device, plan=plan, on_values=lambda at, values: losses.append(values)
    )
    loader = [batch_of(recipe, x, at) for at, x in enumerate(data)]
    for at, _ in enumerate(engine.steps(loader)):
        _between(recipe, built, at)
    return [losses, *_state(built)], engine.graphs


def _between(recipe: Recipe, built: Built, at: int) -> None:
    if recipe.schedule == "by hand":
        for optimizer in built.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(1e-2 / (at + 1))
                elif group.get("fused"):
                    group["lr"] = 1e-2 / (at + 1)
    if recipe.schedule == "outside":
        for scheduler in built.schedulers:
            scheduler.step()
    for position, name in enumerate(recipe.between):
        if at % 14 == 6 + 3 * position:
            BETWEEN[name](built, at)


def _state(built: Built) -> list[Any]:
    parameters = [p for model in built.models for p in model.parameters()]
    states = [_host(state) for optimizer in built.optimizers for state in optimizer.state.values()]
    buffers = [b for model in built.models for b in model.buffers()]
    gradients = [p.grad for p in parameters]
    return [_host(part) for part in (parameters, gradients, buffers, built.averages, states)] + [
        torch.rand(2).tolist(),
        built.hidden["count"],
        len(built.hidden["seen"]),
        [model.calls for model in built.models],
        _host(built.hidden["h"]),
    ]


def _host(value: Any) -> Any:
    """The bits: as text, so that NaN equals NaN."""
    if isinstance(value, torch.Tensor):
        return repr(value.detach().cpu().tolist())
    if isinstance(value, dict):
        return {name: _host(part) for name, part in value.items()}
    return [_host(part) for part in value] if isinstance(value, list | tuple) else value
