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

from headrace.engine.learning_rates import LearningRates
from headrace.engine.step import Parts

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    (torch_module, [f"_global{kind}" for kind in _MODULE_HOOKS], "of all modules"),
    (
        torch_optimizer,
        ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
        "of all optimizers",
    ),
)
# Not settings: what a scheduler remembers, the tensors themselves, and what a capture itself sets.
_NO_SETTINGS = ("params", "capturable", "initial_lr", "max_lr", "min_lr", "swa_lr")


def why_not(parts: Parts) -> str | None:
    """Why this step cannot be captured, as far as that can be told without running it."""
    name = type(parts.optimizer).__name__
    spread = _why_not_spread(parts)
    if spread is not None:
        return spread
    for group in parts.optimizer.param_groups:
        known = "capturable" in group or group.get("fused") or name == "SGD"
        if not known:
            return (
                f"{name} may count its steps on the host: an optimizer can be captured if it has "
                "`capturable` among its settings, is made with fused=True, or is SGD"
            )
    if parts.update.scaler is not None and not parts.update.scales_on_device:
        return (
            f"fp16 with {name} reads back after every step whether a gradient was infinite: make "
            "the optimizer with fused=True, or use bf16"
        )
    if parts.update.guard is not None and not parts.update.scales_on_device:
        return (
            f"on_nonfinite with {name} reads back before every update whether to leave it out: "
            "make the optimizer with fused=True"
        )
    for where, hook in _hooks(parts.model, parts.optimizer):
        if not _is_torchs(hook):
            return f"a hook {where} would not run in a replay: {_place(hook)}"
    return None


def _why_not_spread(parts: Parts) -> str | None:
    """PyTorch captures DDP's steps, over NCCL and after some warm-up, and no other kind's."""
    if parts.spread == "fsdp":
        return "FSDP2 gathers and frees weights from the host as it goes: that cannot be captured"
    if parts.spread == "ddp":
        if not parts.ranks.uses_nccl:
            return "DDP's gradients are averaged by the hosts here, not by NCCL on the device"
        if parts.group.size > 1:
            return (
                "under DDP with accumulation a group's batches differ: only the last averages "
                "gradients"
            )
    return None


class Prepared:
    """An optimizer that keeps all it counts on the device, and reads its learning rates from there.

    Fused optimizers give the same numbers, bit for bit, either way; of the others the capturable
    kind differs from the plain one in the last digits. So this is done when a graph is captured,
    and undone if that comes to nothing.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._rates = parts, parts.update.rates
        groups: list[dict[str, Any]] = parts.optimizer.param_groups
        self._plain = [g for g in groups if "capturable" in g and not g["capturable"]]
        for group in self._plain:
            group["capturable"] = True
        #: The counts, and products of counts, that lay on the host.
        self._counts: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for state in parts.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    self._counts.append((state, name, value))
        if any(not parts.device.holds(value) for _, _, value in self._counts):
            with parts.device.ledger.waiting("capture"):  # once: a copy from ordinary host memory
                for state, name, value in self._counts:
                    state[name] = value.to(parts.device.torch_device)
        # It would warn that steps run uncaptured: some are meant to.
        parts.optimizer._warned_capturable_if_run_uncaptured = True
        by_tensor = _takes_rates_as_tensors(parts)
        parts.update.rates = LearningRates(parts.device, parts.optimizer) if by_tensor else None

    @property
    def is_undone(self) -> bool:
        """Whether a state of a plain optimizer has been loaded since, or a group added."""
        groups = self._parts.optimizer.param_groups
        return not all(group.get("capturable", True) for group in groups)

    def undo(self) -> None:
        """The optimizer is what it was: no update has been made since."""
        for group in self._plain:
            group["capturable"] = False
        for state, name, value in self._counts:
            state[name] = value
        self._parts.update.rates = self._rates


def _takes_rates_as_tensors(parts: Parts) -> bool:
    groups = parts.optimizer.param_groups
    return all("capturable" in group or group.get("fused") for group in groups)


def release(parts: Parts) -> None:
    """Let go of what only graphs need. An optimizer that has trained as a capturable one stays
    that: it would count on from another number."""
    parts.update.rates = None
    if parts.group.keeps_gradients:
        parts.group.keeps_gradients = False
        if not parts.group.is_open:
            forget_gradients(parts, keep=set())


def forget_gradients(parts: Parts, *, keep: set[int]) -> None:
    """Of parameters that no batch of this group has reached: their gradients are zeros that were
    kept, and an optimizer goes on moving what has a gradient, be it zero."""
    for parameter in parts.group.parameters():
        if id(parameter) not in keep:
            parameter.grad = None


def settings(parts: Parts) -> tuple[Hashable, ...]:
    """The settings that a graph would keep as they were when it was captured: the optimizer's,
    and ours."""
    by_tensor = _takes_rates_as_tensors(parts)
    decay = None if parts.update.ema is None else parts.update.ema.decay
    clip_norm = None if parts.update.clipping is None else parts.update.clipping.max_norm
    frozen: list[tuple[str, Any]] = [("clip_norm", clip_norm), ("ema_decay", decay)]
    for group in parts.optimizer.param_groups:
        for name, value in group.items():
            if name in _NO_SETTINGS or (name == "lr" and by_tensor):
                continue
            frozen.append((name, id(value) if isinstance(value, torch.Tensor) else value))
    return tuple(frozen)


def changed_setting(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """The name of the first setting that differs."""
    differing = (one[0] for one, other in zip(before, after, strict=False) if one != other)
    return str(next(differing, "the number of groups"))


def tensors_of(parts: Parts) -> list[torch.Tensor]:
    """All memory that a graph of this step uses and that is there before and after it."""
    found: dict[int, torch.Tensor] = {}
    for tensor in (*parts.model.parameters(), *parts.group.parameters(), *parts.model.buffers()):
        found[id(tensor)] = tensor
        if parts.group.keeps_gradients and tensor.grad is not None:
            found[id(tensor.grad)] = tensor.grad
    for state in parts.optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        found |= {id(value): value for value in values if isinstance(value, torch.Tensor)}
    if parts.update.ema is not None:
        found |= {id(average): average for average in parts.update.ema.averages}
    return list(found.values())


def addresses(parts: Parts) -> tuple[Hashable, ...]:
    """Where all that memory lies, and what else a graph was captured with. Another value means
    that the graph is of yesterday's model or optimizer."""
    memory = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors_of(parts))
    modules = tuple((id(module), module.training) for module in parts.model.modules())
    return (memory, modules)


class Kept:
    """What stands before a capture and must stand after it, since nothing of it has run: gradients,
    the optimizer's state, buffers and tensors that modules hold, the scaler's notes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        parameters = {id(p): p for p in (*parts.model.parameters(), *parts.group.parameters())}
        self._gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
        self._state = {key: dict(value) for key, value in parts.optimizer.state.items()}
        self._modules = [
            (module, dict(module._buffers), _tensor_attributes(module))
            for module in parts.model.modules()
        ]
        self._scaler = None
        if parts.update.scaler is not None:
            notes = parts.update.scaler._per_optimizer_states
            self._scaler = {key: dict(value) for key, value in notes.items()}

    def state_changed(self) -> bool:
        """Whether the optimizer has made or replaced part of its state."""
        state = self._parts.optimizer.state
        if state.keys() != self._state.keys():
            return True
        return any(_differ(state[key], before) for key, before in self._state.items())

    def gradients_changed(self) -> bool:
        return any(parameter.grad is not before for parameter, before in self._gradients)

    def replaced(self) -> str | None:
        """The name of a buffer or attribute that the model's forward has replaced."""
        for module, buffers, attributes in self._modules:
            for before, now in (
                (buffers, module._buffers),
                (attributes, _tensor_attributes(module)),
            ):
                for name in before.keys() | now.keys():
                    if before.get(name) is not now.get(name):
                        return f"{type(module).__name__}.{name}"
        return None

    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        state = self._parts.optimizer.state
        state.clear()
        state.update(self._state)
        for module, buffers, attributes in self._modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in _tensor_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        if self._parts.update.scaler is not None and self._scaler is not None:
            notes = self._parts.update.scaler._per_optimizer_states
            notes.clear()
            notes.update(self._scaler)


def _tensor_attributes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() != other.keys() or any(
        value is not other[name] for name, value in one.items() if isinstance(value, torch.Tensor)
    )


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
