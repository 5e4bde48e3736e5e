"""Engines that are stopped in the middle of training, and the states they leave."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch

from headrace.device import Device
from headrace.engine import Engine
from headrace.plan import Plan
from support.training.engines import make_engine
from support.training.loaders import BATCHES


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def new(device: Device, plan: str | Plan = "pipeline", **options: Any) -> Engine:
    """An engine whose model has dropout, with seeded generators."""
    seeded(3)
    engine = make_engine(device, plan, deterministic=True, **options)
    seeded(4)
    return engine


def losses_of(engine: Engine, loader: Any, epochs: int) -> list[float]:
    return [one for _ in range(epochs) for one in engine.epoch(loader).losses]


def stopped(engine: Engine, loader: Any, at: int) -> tuple[list[float], Any]:
    """Train up to batch `at`, counted over epochs. Returns the losses that have arrived, and the
    state."""
    seen: list[float] = []
    while engine.epochs < at // BATCHES:
        seen += engine.epoch(loader).losses
    if at % BATCHES == 0:
        return seen, copy.deepcopy(engine.state_dict())
    for info in engine.steps(loader):
        seen += [entry.values["loss"] for entry in info.arrived]
        if info.batch + 1 == at % BATCHES:
            return seen, copy.deepcopy(engine.state_dict())
    raise AssertionError("not reached")


def pending_in(state: Any) -> list[int]:
    """The batches whose values a state holds because they were not handed out yet."""
    return [step for block in state["deferred"] for step in block["steps"]]
