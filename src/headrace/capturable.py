"""Which steps can be captured as a graph, said before anything is tried.

A graph repeats device work alone. Whatever Python does in a step (counts, branches, logs) is done
once, when the step is captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from headrace.rates import LearningRates
from headrace.step import TrainingStep

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    (torch_module, [f"_global{kind}" for kind in _MODULE_HOOKS], "of all modules"),
    (
        torch_optimizer,
        ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
        "of all optimizers",
    ),
)
# Not settings: what a scheduler remembers, and the tensors themselves.
_NO_SETTINGS = ("params", "initial_lr", "max_lr", "min_lr", "swa_lr")


def why_not(step: TrainingStep) -> str | None:
    """Why this step cannot be captured, as far as that can be told without running it."""
    name = type(step.optimizer).__name__
    for group in step.optimizer.param_groups:
        known = "capturable" in group or group.get("fused") or name == "SGD"
        if not known:
            return (
                f"{name} may count its steps on the host: an optimizer can be captured if it has "
                "`capturable` among its settings, is made with fused=True, or is SGD"
            )
    if step.scaler is not None and not step.scales_on_device:
        return (
            f"fp16 with {name} reads back after every step whether a gradient was infinite: make "
            "the optimizer with fused=True, or use bf16"
        )
    for where, hook in _hooks(step.model, step.optimizer):
        if not _is_torchs(hook):
            return f"a hook {where} would not run in a replay: {_place(hook)}"
    return None


def prepare(step: TrainingStep) -> None:
    """Let the optimizer keep all it counts on the device, and read its rates from there.

    Fused optimizers give the same numbers, bit for bit, either way; of the others the capturable
    kind differs from the plain one in the last digits.
    """
    by_tensor = all(
        "capturable" in group or group.get("fused") for group in step.optimizer.param_groups
    )
    for group in step.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for state in step.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(step.device.torch_device)
    # It would warn that steps run uncaptured: some are meant to.
    step.optimizer._warned_capturable_if_run_uncaptured = True
    step.rates = LearningRates(step.device, step.optimizer) if by_tensor else None
    step.keeps_gradients = step.accumulate > 1


def release(step: TrainingStep) -> None:
    """Undo `prepare`, as far as a plan without graphs is better without it."""
    step.rates = None
    step.keeps_gradients = False


def settings(step: TrainingStep) -> tuple[Hashable, ...]:
    """The optimizer's settings that a graph would keep as they were when it was captured."""
    frozen = []
    for group in step.optimizer.param_groups:
        for name, value in group.items():
            if name in _NO_SETTINGS or (name == "lr" and step.rates is not None):
                continue
            frozen.append((name, id(value) if isinstance(value, torch.Tensor) else value))
    return tuple(frozen)


def changed_setting(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """The name of the first setting that differs."""
    differing = (one[0] for one, other in zip(before, after, strict=False) if one != other)
    return str(next(differing, "the number of groups"))


def addresses(step: TrainingStep) -> tuple[Hashable, ...]:
    """Where all memory lies that a graph of this step uses, and what else it was captured with.
    Another value means that the graph is of yesterday's model or optimizer."""
    model, found = step.model, []
    for tensor in (*model.parameters(), *model.buffers()):
        found.append((tensor.data_ptr(), tensor.requires_grad))
        if step.keeps_gradients and tensor.grad is not None:
            found.append((tensor.grad.data_ptr(), False))
    for state in step.optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        found += [(v.data_ptr(), False) for v in values if isinstance(v, torch.Tensor)]
    if step.ema is not None:
        found += [(average.data_ptr(), False) for average in step.ema.averages]
    return (tuple(found), tuple(module.training for module in model.modules()))


def _hooks(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Callable[..., Any]]]:
    for owner, names, where in _GLOBAL_HOOKS:
        for name in names:
            yield from ((where, hook) for hook in getattr(owner, name).values())
    for name, module in model.named_modules():
        for kind in _MODULE_HOOKS:
            hooks = getattr(module, kind).values()
            yield from ((f"of module {name or type(module).__name__!r}", hook) for hook in hooks)
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = (getattr(parameter, kind, None) or {}).values()
            yield from ((f"of parameter {name!r}", hook) for hook in hooks)
    for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        yield from (("of the optimizer", hook) for hook in getattr(optimizer, kind).values())


def _is_torchs(hook: Callable[..., Any]) -> bool:
    """PyTorch's own hooks (weight normalisation, say) only launch device work."""
    module = getattr(_function(hook), "__module__", None) or type(hook).__module__
    return module == "torch" or module.startswith("torch.")


def _place(hook: Callable[..., Any]) -> str:
    function = _function(hook)
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _function(hook: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(hook, partial):
        hook = hook.func
    return hook
