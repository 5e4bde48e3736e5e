"""Checks what an engine is given, before it trains."""

from __future__ import annotations

import inspect
import os
import re

import torch

from headrace.device import Device
from headrace.errors import StepError
from headrace.schema import require_whole


def warn_of_expandable_segments(device: Device) -> None:
    """NCCL registers the memory of a captured collective, and segments that grow move under it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            device.warn_once(
                "expandable segments",
                "%s has expandable_segments:True, and the plan captures NCCL's collectives: a "
                "replay may crash or hang; unset it, or use a plan with graphs = off",
                name,
            )


def warn_of_half_precision(device: Device, optimizer: torch.optim.Optimizer) -> None:
    """Gradients of loss × weight may be larger than float16 can hold, where those of the loss are
    not. bfloat16 has the range of float32."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.dtype == torch.float16 for p in parameters):
        device.warn_once(
            "accumulation in float16",
            "parameters are float16, and accumulate multiplies each loss by its batch's weight: "
            "gradients over 65,504 become infinite. Use float32 parameters with precision='fp16', "
            "or accumulate_by='count'",
        )


def check_numbers(
    accumulate: object, accumulate_by: object, clip_norm: float | None, on_oom: object
) -> None:
    require_whole("accumulate", accumulate, 1, StepError)
    if accumulate_by not in ("weight", "count"):
        raise StepError(f"accumulate_by = {accumulate_by!r}: expected 'weight' or 'count'")
    if clip_norm is not None and not clip_norm > 0:
        raise StepError(f"clip_norm = {clip_norm!r}: expected a number above 0")
    if on_oom not in ("raise", "halve"):
        raise StepError(f"on_oom = {on_oom!r}: expected 'raise' or 'halve'")


def check_types(
    device: Device,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    has_scheduler: bool,
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise StepError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        without = "a scheduler without an optimizer: " if has_scheduler else ""
        raise StepError(
            f"{without}optimizer is a {type(optimizer).__name__}: expected one "
            "torch.optim.Optimizer (for several, or updates of your own, use Engine.from_step)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise StepError(
            f"{type(optimizer).__name__} needs a closure to compute the loss several times per "
            "step, which no plan supports. Use another optimizer, or Engine.from_step with a step "
            "of your own"
        )
    for parameter in model.parameters():
        if not device.holds(parameter):
            raise StepError(
                f"the model is on {parameter.device}, but the engine runs on {device}: call "
                f"model.to('{device.torch_device}') before you create the optimizer"
            )
