"""Why a step cannot be captured as a graph, as far as that is known before it runs.

A graph repeats device work only. Whatever Python does in a step (counting, branching, logging)
happens once, at capture. `graph_watch.py` finds what shows only while a step runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from headrace.engine.step import StepParts
from headrace.engine.step_state import StepState
from headrace.engine.update import scales_on_device

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    (torch_module, [f"_global{kind}" for kind in _MODULE_HOOKS], "of all modules"),
    (
        torch_optimizer,
        ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
        "of all optimizers",
    ),
)


def capture_obstacle(parts: StepParts) -> str | None:
    """Why the engine's step cannot be captured and what to do; None if nothing prevents it."""
    obstacle = _distributed_obstacle(parts) or state_obstacle(parts.state)
    if obstacle is None and parts.update.guard is not None and not parts.update.scales_on_device:
        return (
            f"with on_nonfinite and {type(parts.optimizer).__name__} the host reads back before "
            "every update whether to leave it out: make the optimizer with fused=True"
        )
    return obstacle


def state_obstacle(state: StepState) -> str | None:
    """Why no step with these optimizers, scalers and hooks can be captured, and what to do."""
    for optimizer in state.optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            known = "capturable" in group or group.get("fused") or name == "SGD"
            if not known:
                return (
                    f"{name} may count its steps on the host, which no graph can repeat: make the "
                    "optimizer with fused=True, or use SGD or one that has a `capturable` setting"
                )
        if state.scalers and not scales_on_device(optimizer):
            return (
                f"with fp16 and {name} the host reads back after every step whether a gradient "
                "was infinite: make the optimizer with fused=True, or use bf16"
            )
    if (sparse := _sparse_part(state)) is not None:
        return (
            f"{sparse} is sparse, and the memory of a sparse tensor changes from batch to batch: "
            "use a dense one"
        )
    for owner, hook in _hooks(state):
        if not _is_repeated(hook):
            return (
                f"a hook {owner} would not run in a replay ({_describe_hook(hook)}): remove it, or "
                "do its work in the model"
            )
    return None


def _distributed_obstacle(parts: StepParts) -> str | None:
    """PyTorch can capture DDP's steps, over NCCL and after a warm-up, but no FSDP2 step."""
    if parts.parallelism == "fsdp":
        return (
            "FSDP2 gathers and frees weights from the host during a step, which no graph can "
            "repeat: use DDP, or a plan with graphs = off"
        )
    if parts.parallelism == "ddp":
        if not parts.ranks.uses_nccl:
            return (
                "DDP's gradients are averaged by the hosts, not on the device: initialize the "
                "process group with the backend nccl"
            )
        if parts.group.size > 1:
            return (
                "with DDP and accumulation only a group's last batch averages gradients, so its "
                "batches differ: use accumulate = 1, or a plan with graphs = off"
            )
    return None


def _sparse_part(state: StepState) -> str | None:
    """A sparse parameter or buffer, or a module with sparse gradients, in words."""
    for model in state.modules:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.layout is not torch.strided and not tensor.is_nested:
                return f"{name!r}"
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
                return f"the gradient of {name!r}"
    return None


def _hooks(state: StepState) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All hooks that a step would run, each with what it is registered on, in words."""
    for owner, names, where in _GLOBAL_HOOKS:
        for name in names:
            yield from ((where, hook) for hook in getattr(owner, name).values())
    for model in state.modules:
        for name, module in model.named_modules():
            for kind in _MODULE_HOOKS:
                where = f"of module {name or type(module).__name__!r}"
                yield from ((where, hook) for hook in getattr(module, kind).values())
    known_as = {id(p): name for model in state.modules for name, p in model.named_parameters()}
    for at, parameter in enumerate(state.parameters()):
        where = f"of parameter {known_as.get(id(parameter), at)!r}"
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = (getattr(parameter, kind, None) or {}).values()
            yield from ((where, hook) for hook in hooks)
        if parameter.requires_grad and parameter.is_leaf:
            yield from ((where, hook) for hook in _accumulation_hooks(parameter))
    for optimizer in state.optimizers:
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(
                optimizer, kind, {}
            ).values()  # a wrapper's class may not have made them
            yield from (("of the optimizer", hook) for hook in hooks)


def _accumulation_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """The Python hooks of the autograd node that adds to a parameter's gradient. PyTorch shows them
    only to who adds one."""
    if is_lazy(parameter):
        return []
    try:
        with torch.inference_mode(False), torch.enable_grad():
            node = get_gradient_edge(parameter).node
    except NotImplementedError:  # a kind of tensor that has no views: nobody gets at its node
        return []
    found: list[Callable[..., Any]] = []
    number = RemovableHandle.next_id
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(_no_hook)
        found += [hook for hook in handle.hooks_dict_ref().values() if hook is not _no_hook]
        handle.remove()
    # PyTorch numbers all hooks, and other engines take a new number for a new hook: with two of
    # them in turns, each would look again at what the other's look has added.
    if RemovableHandle.next_id == number + 2:
        RemovableHandle.next_id = number
    return found


def _no_hook(*gradients: object) -> None:
    """A hook that does nothing."""


def _is_repeated(hook: Callable[..., Any]) -> bool:
    """Whether a hook is PyTorch's or the package's own: those (weight normalisation, say) only
    launch kernels, which a replay repeats. Those of `register_multi_grad_hook` call the user's."""
    module = getattr(_function(hook), "__module__", None) or type(hook).__module__
    is_own = module.partition(".")[0] in ("torch", __name__.partition(".")[0])
    return is_own and module != "torch.autograd.graph"


def _describe_hook(hook: Callable[..., Any]) -> str:
    function = _function(hook)
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _function(hook: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(hook, partial):
        hook = hook.func
    return hook
