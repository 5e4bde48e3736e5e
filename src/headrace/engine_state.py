"""All that an engine must know to go on as if it had never stopped, as plain values and tensors."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch

from headrace.checkpoint import PerRank, StoredTensor
from headrace.device import Device
from headrace.ema import Ema
from headrace.errors import StepError
from headrace.ranks import Ranks
from headrace.step import TrainingStep
from headrace.wrapped import bare, is_sharded, local, place, shard_like

FORMAT = 1


def state_of(step: TrainingStep, ema: Ema | None, *, epoch: int, batch: int) -> dict[str, Any]:
    """The state between two batches. Tensors are the live ones: copy them before going on."""
    scheduler, scaler = step.scheduler, step.scaler
    drawn = random_states(step.device)
    return {
        "format": FORMAT,
        "epoch": epoch,
        "batch": batch,
        "model": dict(bare(step.model).state_dict()),
        "optimizer": step.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "ema": None if ema is None else ema.state(),
        "step": step.state_dict(),
        "random": PerRank(own=drawn) if step.ranks.several else drawn,
    }


def restore(state: dict[str, Any], step: TrainingStep, ema: Ema | None) -> None:
    """Bring a step to `state`, all but the random generators."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise StepError(f"this is no engine's state of format {FORMAT}: found {found!r}")
    for name, part in (("scheduler", step.scheduler), ("scaler", step.scaler), ("ema", ema)):
        if (state[name] is None) != (part is None):
            has, had = ("none" if part is None else "one"), ("one" if part is None else "none")
            raise StepError(f"{name}: this engine has {has}, the stored state has {had}")
    model = bare(step.model)
    own = model.state_dict()
    model.load_state_dict(
        {name: _placed(value, own.get(name)) for name, value in state["model"].items()}
    )
    step.optimizer.load_state_dict(_for_this_optimizer(state["optimizer"], step.optimizer))
    if step.scheduler is not None:
        step.scheduler.load_state_dict(state["scheduler"])
    if step.scaler is not None:
        step.scaler.load_state_dict(state["scaler"])
    if ema is not None:
        for average, weight, stored in zip(ema.averages, ema.weights, state["ema"], strict=True):
            average.copy_(local(_placed(stored, weight)))
    step.load_state_dict(state["step"])


def _for_this_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`capturable` is about the plan and the device, not about what was learned: ours stays."""
    groups = [dict(group) for group in state["param_groups"]]
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        if "capturable" in own:
            group["capturable"] = own["capturable"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_parameter = {
        number: _of_parameter(values, parameters[number])
        if isinstance(number, int) and number < len(parameters)
        else values
        for number, values in state["state"].items()
    }
    return {**state, "state": by_parameter, "param_groups": groups}


def _of_parameter(values: Any, parameter: torch.Tensor) -> Any:
    """An optimizer's state of one parameter, sharded as that one is, if at all."""
    if not isinstance(values, dict):
        return values
    return {
        name: _placed(value, parameter if _shape(value) == tuple(parameter.shape) else None)
        for name, value in values.items()
    }


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor | StoredTensor) else None


def _placed(stored: Any, target: torch.Tensor | None) -> Any:
    """A stored tensor as `target` is: whole, or this rank's part of it."""
    if target is None or not is_sharded(target) or _shape(stored) != tuple(target.shape):
        return stored.whole() if isinstance(stored, StoredTensor) else stored
    if is_sharded(stored):
        return stored
    offset, shape = place(target)
    if isinstance(stored, StoredTensor):
        part = stored.part(offset, shape)
    else:
        ends = (begin + size for begin, size in zip(offset, shape, strict=True))
        part = stored[tuple(map(slice, offset, ends))]
    return shard_like(target, part.to(target.device))


def random_states(device: Device) -> dict[str, Any]:
    """Where all random generators stand that a training step may draw from."""
    generator: Any = numpy.random.get_state()
    name, words, position, has_gauss, gauss = generator
    return {
        "host": torch.get_rng_state(),
        "device": device.random_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.astype("int64")), position, has_gauss, gauss),
    }


def own_random_states(stored: Any, ranks: Ranks) -> dict[str, Any]:
    """What this rank is to draw from: what it drew from before or, on another number of ranks, a
    seed that follows from the stored state and the rank."""
    if not isinstance(stored, PerRank):
        states = [stored]
    elif stored.all:
        states = list(stored.all)
    else:  # was never written: a state that was taken a moment ago
        return dict(stored.own)
    if len(states) == ranks.size:
        return dict(states[ranks.rank])
    host = states[0]["host"].numpy().tobytes()
    text = host + f"rank {ranks.rank} of {ranks.size}".encode()
    return {"seed": int.from_bytes(hashlib.sha256(text).digest()[:4], "little")}


def set_random_states(device: Device, states: dict[str, Any]) -> None:
    if "seed" in states:
        torch.manual_seed(states["seed"])
        random.seed(states["seed"])
        numpy.random.seed(states["seed"])
        return
    host = torch.device("cpu")
    torch.set_rng_state(states["host"].to(host))
    device.set_random_state(states["device"].to(host))
    random.setstate(_tuples(states["python"]))
    name, words, *rest = states["numpy"]
    numpy.random.set_state((name, words.to(host).numpy().astype("uint32"), *rest))


def _tuples(value: Any) -> Any:
    """Lists become tuples: what has been through JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
