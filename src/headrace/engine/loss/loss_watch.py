"""Watches a loss function's first calls for work that the engine does itself.

A loss function is often cut out of a training loop. If `backward()`, `optimizer.step()` or
`scaler.scale(loss)` stay in it, the model trains twice, or on gradients that are 65,536 times too
large, usually without any error. Only the first calls are watched, so later ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.loss import loss_function
from headrace.engine.loss.gradients_before import GradientsBefore
from headrace.errors import StepError
from headrace.source_lines import Site, describe_function, users_line

_OWN_HOOK = object()
_ENGINE_CALLS = "the engine calls backward(), optimizer.step() and zero_grad() itself"
_RETURN_ONLY = (
    f"only return the loss; {_ENGINE_CALLS}. (If your step does all of that, use Engine.from_step)"
)


@dataclass(slots=True)
class _Calls:
    """What a loss function called: each `backward()` with its roots and whether it kept the
    autograd graph, and each `GradScaler.scale()` with its result. The tensors are kept alive,
    because they are compared by identity."""

    backwards: list[tuple[Site, tuple[torch.Tensor, ...], bool]] = field(default_factory=list)
    scaled: list[tuple[Site, torch.amp.GradScaler, torch.Tensor]] = field(default_factory=list)


def call_watched(
    loss: Callable[..., Any],
    model: torch.nn.Module,
    *inputs: Any,
    device: Device,
    optimizer: torch.optim.Optimizer,
    user_loss: object,
) -> Any:
    """Return `loss(model, *inputs)`. Raise `StepError` if the call did the engine's work.
    `user_loss` is the loss function as the user wrote it, for messages."""
    before = GradientsBefore(optimizer)
    calls = _Calls()
    try:
        with (
            _recording_backwards(calls),
            _recording_scales(calls),
            _refusing_steps(calls, optimizer, user_loss),
        ):
            returned = loss(model, *inputs)
        _refuse_backward(calls, before, _loss_in(returned), user_loss)
        _refuse_scaled(calls, _loss_in(returned), device, user_loss)
    except StepError:
        before.restore()  # the user may continue with another engine
        raise
    except Exception as problem:
        explained = loss_function.explain_call_error(problem, user_loss, model)
        if explained is None:
            raise
        raise explained from problem
    return returned


def _loss_in(returned: object) -> torch.Tensor | None:
    if isinstance(returned, tuple) and returned:  # the loss, and what it carries
        returned = returned[0]
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    return loss if isinstance(loss, torch.Tensor) else None


# --- backward and step ----------------------------------------------------------------------------


def _refuse_backward(
    calls: _Calls,
    before: GradientsBefore,
    loss: torch.Tensor | None,
    user_loss: object,
) -> None:
    """Raise if the call changed gradients, or freed the loss's autograd graph. Any other backward,
    of an adversarial input for example, is fine."""
    freed = [
        site
        for site, roots, keeps in calls.backwards
        if not keeps and any(root is loss for root in roots)
    ]
    if not freed and not before.have_changed():
        return
    if not calls.backwards:
        raise StepError(
            f"the loss function {describe_function(user_loss)} changed the gradients of earlier "
            "batches in the accumulation group (with zero_grad(), for example): leave them alone; "
            f"{_ENGINE_CALLS}"
        )
    site = freed[0] if freed else calls.backwards[0][0]
    raise StepError(
        f"the loss function {describe_function(user_loss)} calls backward() at {site}: "
        f"{_RETURN_ONLY}"
    )


@contextmanager
def _recording_backwards(calls: _Calls) -> Iterator[None]:
    original = torch.autograd.backward

    def recorded(tensors: Any, *args: Any, **options: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        keeps = bool((args[1] if len(args) > 1 else None) or options.get("retain_graph"))
        keeps = keeps or bool((args[2] if len(args) > 2 else None) or options.get("create_graph"))
        calls.backwards.append((users_line(), roots, keeps))
        original(tensors, *args, **options)

    torch.autograd.backward = recorded
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def _refusing_steps(
    calls: _Calls, optimizer: torch.optim.Optimizer, user_loss: object
) -> Iterator[None]:
    def refuse(*_: object) -> None:
        found = [f"backward() at {site}" for site, _, _ in calls.backwards[:1]]
        found.append(f"optimizer.step() at {users_line()}")
        raise StepError(
            f"the loss function {describe_function(user_loss)} calls {' and '.join(found)}: "
            f"{_RETURN_ONLY}"
        )

    # Not `register_step_pre_hook`: it advances PyTorch's number of hooks, and graphs would look for
    # a new one.
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if hooks is None:  # a class that PyTorch's hooks do not support
        yield
        return
    hooks[_OWN_HOOK] = refuse
    try:
        yield
    finally:
        del hooks[_OWN_HOOK]


# --- GradScaler -----------------------------------------------------------------------------------


@contextmanager
def _recording_scales(calls: _Calls) -> Iterator[None]:
    """Inside the block, note every `scale()` of `GradScaler` and all classes derived from it."""

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler.is_enabled():
                found = scaled if isinstance(scaled, list | tuple) else (scaled,)
                tensors = (one for one in found if isinstance(one, torch.Tensor))
                calls.scaled.extend((users_line(), scaler, one) for one in tensors)
            return scaled

        return scale

    with ExitStack() as patches:
        for scaler_class in _classes(torch.amp.GradScaler):
            if "scale" in vars(scaler_class):
                original = scaler_class.scale
                scaler_class.scale = recording(original)
                patches.callback(setattr, scaler_class, "scale", original)
        yield


def _classes(kind: type[Any]) -> list[type[Any]]:
    """A class and all classes derived from it."""
    return [kind, *(one for derived in kind.__subclasses__() for one in _classes(derived))]


def _refuse_scaled(
    calls: _Calls, loss: torch.Tensor | None, device: Device, user_loss: object
) -> None:
    """Raise if a scaler made the gradients of the returned loss too large. A loss that was scaled
    and divided again is fine, so measure the factor."""
    for site, scaler, scaled in calls.scaled:
        if loss is None:
            continue
        slope = torch.ones((), device="cpu") if scaled is loss else _slope(loss, scaled)
        if slope is None:
            continue
        with device.ledger.waiting("grad_scaler"):
            scale = scaler.get_scale()
            factor = float(slope.detach().abs().max()) * scale
        if factor > max(1.0, scale**0.5):
            raise StepError(
                f"the loss function {describe_function(user_loss)} returns a loss that a "
                f"GradScaler has scaled at {site}: its gradients would be {factor:,.0f} times too "
                "large, because the engine does not know that scaler. Return the loss without a "
                "scaler of your own, and give the engine (or its plan) precision='fp16': it then "
                "scales and unscales by itself"
            )


def _slope(loss: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor | None:
    """The derivative of the loss with respect to what a scaler returned; None if there is none."""
    if not loss.requires_grad or not scaled.requires_grad:
        return None
    (slope,) = torch.autograd.grad(loss.sum(), scaled, retain_graph=True, allow_unused=True)
    return slope
