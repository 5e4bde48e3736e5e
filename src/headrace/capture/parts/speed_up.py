"""`speed_up(model, optimizer)`: a loop's parts as graphs, and the loop as it is.

    handle = hr.speed_up(model, optimizer)
    for batch in loader:
        loss = loss_fn(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(handle.report())

Forward and backward of the model and the optimizer's step are replayed as graphs. Everything else,
such as the loss, clipping, schedules and logging, runs as it always does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch

from headrace.capture.models.compiled_forward import CompiledForward
from headrace.capture.models.graphed_model import GraphedModel
from headrace.capture.models.model_trials import GraphOptions
from headrace.capture.parts.accelerated import copies_by_itself, optimizer_inside
from headrace.capture.parts.given_parts import device_of, names_of
from headrace.capture.parts.handle import SpeedUpHandle
from headrace.capture.updates.graphed_update import GraphedUpdate
from headrace.data import prefetch
from headrace.device import Device, available_devices, open_device
from headrace.errors import StepError
from headrace.plan import PLAN_VARIABLE, graphs_are_asked_for

#: How many graphs a model has, unless it is told.
MAX_SHAPES = 16


def speed_up(
    *parts: torch.nn.Module | torch.optim.Optimizer,
    loader: Iterable[Any] | None = None,
    plan: Literal["auto", "graph"] = "auto",
    compile: bool = False,  # noqa: A002
    device: Device | str | torch.device | None = None,
    after: int = 2,
    shapes: int = MAX_SHAPES,
    recheck: int = 1000,
    check: int = 0,
) -> SpeedUpHandle:
    """Replay models' forward and backward, and optimizers' steps, as graphs, in your own loop.

    Call it once before the loop, with all models and optimizers that train: nothing else changes.

    - `loader`: wrapped by `prefetch`; iterate over `.loader` of what this returns. One that
      Accelerate has prepared copies batches itself, and is told not to wait for that.
    - `plan`: "auto" runs some of the first steps with graphs and some without, in turns, and keeps
      what is faster, which `report()` says. Each turn takes two host waits; there are none after
      that. It needs an optimizer, whose update ends a step. "graph" keeps graphs without asking,
      as do `compile`, whose results differ from the plain loop's, and `check`.
    - `compile`: compile the models with `torch.compile` first.
    - `device`: where they train. Default: the device of the first parameter; if that is the CPU and
      no `loader` is given, the accelerator that they may be moved to before the first step.
    - `after`: how many calls with a shape run eagerly before it is captured.
    - `shapes`: how many graphs a model has at most.
    - `recheck`: at its replays 10, 30, 100, 300 and then after each `recheck` of them, a graph is
      compared with a call that runs eagerly; 0: never.
    - `check`: how many of the first replays of each part are compared with the part run eagerly;
      `report()` says what differs.

    What no graph can repeat runs eagerly, and `report()` of the result says why. With
    `HEADRACE_PLAN=baseline` in the environment, and on a CPU, it does nothing.
    """
    models = [one for one in parts if isinstance(one, torch.nn.Module)]
    optimizers = [one for one in parts if isinstance(one, torch.optim.Optimizer)]
    odd = [one for one in parts if one not in (*models, *optimizers)]
    if plan not in ("auto", "graph"):
        raise StepError(f"speed_up: plan = {plan!r}; expected auto or graph")
    if odd or not parts:
        found = type(odd[0]).__name__ if odd else "nothing"
        raise StepError(f"speed_up was given {found}; expected models and optimizers")
    if after < 1 or shapes < 1 or recheck < 0 or check < 0:
        raise StepError(
            f"speed_up: shapes = {shapes}, after = {after}, recheck = {recheck}, check = {check}; "
            "expected at least 1 for the first two, and 0 or more for the others"
        )
    if device is None:
        device = device_of(models, optimizers)
        if device.type == "cpu" and loader is None:
            device = available_devices()[0].partition(":")[0]  # the current one of its kind
    opened = open_device(device)
    off = None
    if os.environ.get(PLAN_VARIABLE) == "baseline":
        off = f"{PLAN_VARIABLE}=baseline is set"
    elif not opened.captures:
        off = f"graphs need a GPU, and this trains on {opened}"
    if off is not None:
        opened.warn_once(f"speed_up: {off}", "speed_up does nothing: %s", off)
        return SpeedUpHandle([], [], off, loader)
    if loader is not None and not copies_by_itself(loader):
        loader = prefetch(loader, opened)
    names = names_of((*models, *optimizers))
    # A compiled forward is compiled in the first call, before it is watched.
    graphed, options = [], GraphOptions(after + compile, shapes, recheck, check)
    for model in models:
        forward = CompiledForward(model.forward) if compile else model.forward
        graphed.append((model, GraphedModel(model, forward, opened, names[id(model)], options)))
    updates = []
    for one in optimizers:
        inner, name = optimizer_inside(one), names[id(one)]
        update = GraphedUpdate(inner, opened, name=name, after=after, recheck=recheck, check=check)
        updates.append((one, update))
    handle = SpeedUpHandle(graphed, updates, None, loader)
    if plan == "auto" and not (graphs_are_asked_for() or compile or check):
        handle.choose(opened, shapes)
    return handle
