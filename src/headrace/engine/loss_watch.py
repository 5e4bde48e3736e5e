"""A loss function's first calls, watched for what the engine does itself.

`backward()`, `optimizer.step()` and `scaler.scale(loss)` belong to the loop that the loss function
was cut out of. Left in it, they would train twice, or on gradients 65,536 times too large, and
mostly without an error. Later calls are not watched: nothing is paid for it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.device import Device
from headrace.engine import loss_function
from headrace.errors import StepError
from headrace.source_lines import Site, described, users_line

_ENGINES_OWN = "the engine calls backward(), optimizer.step() and zero_grad() itself"
_RETURN_ONLY = (
    f"only return the loss, {_ENGINES_OWN}. (For a step that does all of it use Engine.from_step)"
)


@dataclass(slots=True)
class _Seen:
    """What a call did: `backward()`s, what they began at and whether they kept the graph, and what
    scalers returned. Tensors are held, so that no other can be taken for one of them."""

    backwards: list[tuple[Site, tuple[torch.Tensor, ...], bool]] = field(default_factory=list)
    scaled: list[tuple[Site, torch.amp.GradScaler, torch.Tensor]] = field(default_factory=list)


def call_watched(
    loss: Callable[[Any, Any], Any],
    model: torch.nn.Module,
    batch: Any,
    *,
    device: Device,
    optimizer: torch.optim.Optimizer,
    written: object,
) -> Any:
    """What `loss(model, batch)` returns, while gradients are wanted. Raises `StepError` if it did
    what is the engine's to do. `written` is the function as the user wrote it, for messages."""
    parameters = _parameters(model, optimizer)
    before = [(p, p.grad, _version(p.grad)) for p in parameters]
    seen = _Seen()
    try:
        with (
            _noting_backward(seen),
            _noting_scales(seen),
            _refusing_steps(seen, optimizer, written),
        ):
            returned = loss(model, batch)
        _refuse_backward(seen, before, _loss_in(returned), written)
        _refuse_scaled(seen, _loss_in(returned), device, written)
    except StepError:
        for parameter, gradient, _ in before:  # nothing of it is to be left for another engine
            parameter.grad = gradient
        raise
    except Exception as problem:
        told = loss_function.explained(problem, written, model)
        if told is None:
            raise
        raise told from problem
    return returned


def _parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in (*model.parameters(), *own)}.values())


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _loss_in(returned: object) -> torch.Tensor | None:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    return loss if isinstance(loss, torch.Tensor) else None


# --- backward and step ----------------------------------------------------------------------------


def _refuse_backward(
    seen: _Seen,
    before: list[tuple[torch.Tensor, torch.Tensor | None, int]],
    loss: torch.Tensor | None,
    written: object,
) -> None:
    """A backward of something else (an adversarial input, say) is fine, as long as it leaves the
    gradients as they were."""
    used_up = [
        site
        for site, roots, keeps in seen.backwards
        if not keeps and any(root is loss for root in roots)
    ]
    changed = any(p.grad is not was or _version(p.grad) != n for p, was, n in before)
    if not used_up and not changed:
        return
    if not seen.backwards:
        raise StepError(
            f"the loss function {described(written)} changed gradients that the batches before it "
            "in the accumulation group have left (with zero_grad(), say): leave them alone, "
            f"{_ENGINES_OWN}"
        )
    site = used_up[0] if used_up else seen.backwards[0][0]
    raise StepError(
        f"the loss function {described(written)} calls backward() at {site}: {_RETURN_ONLY}"
    )


@contextmanager
def _noting_backward(seen: _Seen) -> Iterator[None]:
    original = torch.autograd.backward

    def noted(tensors: Any, *args: Any, **options: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        keeps = bool((args[1] if len(args) > 1 else None) or options.get("retain_graph"))
        keeps = keeps or bool((args[2] if len(args) > 2 else None) or options.get("create_graph"))
        seen.backwards.append((users_line(), roots, keeps))
        original(tensors, *args, **options)

    torch.autograd.backward = noted
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def _refusing_steps(
    seen: _Seen, optimizer: torch.optim.Optimizer, written: object
) -> Iterator[None]:
    def refuse(*_: object) -> None:
        calls = [f"backward() at {site}" for site, _, _ in seen.backwards[:1]]
        calls.append(f"optimizer.step() at {users_line()}")
        raise StepError(
            f"the loss function {described(written)} calls {' and '.join(calls)}: {_RETURN_ONLY}"
        )

    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # not quite one of PyTorch's
        yield
        return
    handle = optimizer.register_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


# --- somebody's GradScaler ------------------------------------------------------------------------


@contextmanager
def _noting_scales(seen: _Seen) -> Iterator[None]:
    """Whatever class of scaler: PyTorch's, its older ones, other libraries' subclasses."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler.is_enabled():
                found = scaled if isinstance(scaled, list | tuple) else (scaled,)
                tensors = (one for one in found if isinstance(one, torch.Tensor))
                seen.scaled.extend((users_line(), scaler, one) for one in tensors)
            return scaled

        return scale

    with ExitStack() as patches:
        for kind in _kinds(torch.amp.GradScaler):
            if "scale" in vars(kind):
                original = kind.scale
                kind.scale = noting(original)
                patches.callback(setattr, kind, "scale", original)
        yield


def _kinds(kind: type[Any]) -> list[type[Any]]:
    """A class and all that were derived from it."""
    return [kind, *(one for derived in kind.__subclasses__() for one in _kinds(derived))]


def _refuse_scaled(seen: _Seen, loss: torch.Tensor | None, device: Device, written: object) -> None:
    """A loss that was scaled and divided again is as it was: what counts is by how much its
    gradients would be too large."""
    for site, scaler, scaled in seen.scaled:
        if loss is None:
            continue
        slope = torch.ones(()) if scaled is loss else _slope(loss, scaled)
        if slope is None:
            continue
        with device.ledger.waiting("grad_scaler"):
            scale = scaler.get_scale()
            factor = float(slope.detach().abs().max()) * scale
        if factor > max(1.0, scale**0.5):
            raise StepError(
                f"the loss function {described(written)} returns a loss that a GradScaler has "
                f"scaled at {site}: its gradients would be {factor:,.0f} times too large, since "
                "the engine knows nothing of that scaler and does not unscale them. Return the "
                "loss itself, without a scaler of your own, and give the engine (or its plan) "
                "precision='fp16': it then scales and unscales by itself"
            )


def _slope(loss: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor | None:
    """The derivative of the loss by what a scaler returned; None: it does not depend on it."""
    if not loss.requires_grad or not scaled.requires_grad:
        return None
    (slope,) = torch.autograd.grad(loss.sum(), scaled, retain_graph=True, allow_unused=True)
    return slope
