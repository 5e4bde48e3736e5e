"""Why a step cannot be captured as a graph, as far as that is known before it runs.

A graph repeats device work only. Whatever Python does in a step (counting, branching, logging)
happens once, at capture. `watch.py` finds what shows only while a step runs.
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
from torch.nn.utils import parametrizations
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from headrace.capture.state.capturable_optimizer import can_be_fused, scales_on_device
from headrace.capture.state.state import StepState
from headrace.errors import CaptureError

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    (torch_module, [f"_global{kind}" for kind in _MODULE_HOOKS], "of all modules"),
    (
        torch_optimizer,
        ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
        "of all optimizers",
    ),
)

# PyTorch numbers all hooks. So many of the numbers went to hooks that a look has registered.
_own_numbers = 0


def state_obstacle(state: StepState) -> str | None:
    """Why no step with these optimizers, scalers and hooks can be captured, and what to do."""
    for optimizer in state.optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            known = "capturable" in group or group.get("fused") or name == "SGD"
            if not known:
                other = "use SGD or an optimizer that has a `capturable` setting"
                return (
                    f"{name} may count its steps on the host, which no graph can repeat: "
                    f"{fused_or(other, optimizer)}"
                )
        if state.scalers and not scales_on_device(optimizer):
            return (
                f"with fp16 and {name} the host reads back after every step whether a gradient "
                f"was infinite: {fused_or('use bf16', optimizer)}"
            )
    if (sparse := _sparse_part(state)) is not None:
        return (
            f"{sparse} is sparse, and the memory of a sparse tensor changes from batch to batch: "
            "use a dense one"
        )
    for owner, hook in _hooks(state):
        if (newer := _parametrization_instead_of(hook)) is not None:
            return (
                f"torch.nn.utils.{newer} makes a new weight {owner} in each forward, and a graph "
                f"would keep reading an old one: use torch.nn.utils.parametrizations.{newer}"
            )
        if not _is_repeated(hook):
            return (
                f"a hook {owner} would not run in a replay ({_describe_hook(hook)}): "
                f"{_instead_of_hook(hook)}"
            )
    return None


def require_no_obstacle(state: StepState) -> None:
    """Raise `CaptureError` if there is one."""
    if (obstacle := state_obstacle(state)) is not None:
        raise CaptureError(obstacle)


def fused_or(other: str, optimizer: torch.optim.Optimizer) -> str:
    """Advice for an optimizer that is not fused: make it so if its class can, or `other`."""
    if can_be_fused(optimizer):
        return f"make the optimizer with fused=True, or {other}"
    return f"{type(optimizer).__name__} has no fused=True, so {other}"


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
        yield from ((where, hook) for hook in _accumulation_hooks(parameter))
    for optimizer in state.optimizers:
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(
                optimizer, kind, {}
            ).values()  # a wrapper's class may not have made them
            yield from (("of the optimizer", hook) for hook in hooks)


def hooks_so_far() -> int:
    """How many hooks have been registered in this process, on whatever. Those that a look for hooks
    registers itself do not count: else two engines in turns would each look at the other's."""
    return RemovableHandle.next_id - _own_numbers


def count_global_hooks() -> int:
    """How many hooks of all modules and optimizers there are."""
    return sum(len(getattr(owner, name)) for owner, names, _ in _GLOBAL_HOOKS for name in names)


def has_accumulation_hook(parameter: torch.Tensor) -> bool:
    """Whether the node that adds to a parameter's gradient has a hook that no replay would run."""
    return not all(map(_is_repeated, _accumulation_hooks(parameter)))


def _accumulation_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """The Python hooks of the autograd node that adds to a parameter's gradient. PyTorch shows them
    only to who adds one."""
    if is_lazy(parameter) or not (parameter.requires_grad and parameter.is_leaf):
        return []
    try:
        with torch.inference_mode(False), torch.enable_grad():
            node = get_gradient_edge(parameter).node
    except NotImplementedError:  # a kind of tensor that has no views: nobody gets at its node
        return []
    found: list[Callable[..., Any]] = []
    global _own_numbers
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(_no_hook)
        found += [hook for hook in handle.hooks_dict_ref().values() if hook is not _no_hook]
        handle.remove()
        _own_numbers += 1
    return found


def _no_hook(*gradients: object) -> None:
    """A hook that does nothing."""


def _is_repeated(hook: Callable[..., Any]) -> bool:
    """Whether a hook is PyTorch's or the package's own: those (weight normalization, say) only
    launch kernels, which a replay repeats. Those of `register_multi_grad_hook` call the user's."""
    module = getattr(_function(hook), "__module__", None) or type(hook).__module__
    is_own = module.partition(".")[0] in ("torch", __name__.partition(".")[0])
    return is_own and module != "torch.autograd.graph"


def _parametrization_instead_of(hook: Callable[..., Any]) -> str | None:
    """The name of the parametrization that has replaced a hook of PyTorch's, such as `weight_norm`.
    The hook assigns the weight anew before each forward; the parametrization computes it in it."""
    package, _, name = type(hook).__module__.rpartition(".")
    is_older = package == "torch.nn.utils" and hasattr(parametrizations, name)
    return name if is_older else None


def _instead_of_hook(hook: Callable[..., Any]) -> str:
    if "enable_input_require_grads" in getattr(_function(hook), "__qualname__", ""):
        return (
            "call model.disable_input_require_grads() after gradient_checkpointing_enable(); only "
            "reentrant checkpoints of a frozen model need the hook"
        )
    return "remove it, or do its work in the model"


def _describe_hook(hook: Callable[..., Any]) -> str:
    function = _function(hook)
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _function(hook: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(hook, partial):
        hook = hook.func
    return hook
