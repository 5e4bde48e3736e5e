"""When a call of a graphed model runs eagerly, whatever its arguments are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from headrace.device import Device
from headrace.errors import CaptureError, StepError
from headrace.parallel import parallelism_of

_DDP: Any = torch.nn.parallel.DistributedDataParallel

DOUBLE_BACKWARD = (
    "its gradients are differentiated again (create_graph=True), and a graph's cannot be"
)


class _Running(threading.local):
    """Whether a graphed model's forward runs in this thread, inside which others stay eager."""

    inside: bool = False


_running = _Running()


@contextmanager
def running_inside(is_inside: bool = True) -> Iterator[None]:
    """In this block graphed models run eagerly, as parts of something else."""
    before, _running.inside = _running.inside, _running.inside or is_inside
    try:
        yield
    finally:
        _running.inside = before


def why_eager_now(device: Device, model: torch.nn.Module) -> str | None:
    """Why a call cannot be a replay here and now; None if nothing is in the way."""
    if not torch.is_grad_enabled():
        return "gradients are off"
    if not model.training:
        return "the model is in eval()"
    if _running.inside or device.is_capturing():
        return "called inside another captured part"
    if torch._C._current_graph_task_id() != -1:
        return "called inside a backward, as checkpointing does"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors are on (checkpointing or offloading around the model)"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "called inside a functorch transform"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is tracing it"
    if _DDP._active_ddp_module is not None:
        return "called inside DistributedDataParallel, which averages gradients by hooks"
    return None


def why_never(model: torch.nn.Module) -> str | None:
    """Why no call of the model comes to what replaces its forward."""
    if getattr(model, "_compiled_call_impl", None) is None:
        return None
    return (
        "model.compile() has compiled it in place, with what speed_up installs inside: pass "
        "compile=True to speed_up instead"
    )


def why_not_yet(model: torch.nn.Module) -> str | None:
    """Why it cannot be said at this call what the model's graphs will use."""
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return "its lazy parameters are made by the first call"
    if not all(one.is_leaf for one in model.parameters()):
        return "its parameters are results of other operations, as functional_call passes them"
    return None


def require_plain_model(model: torch.nn.Module) -> None:
    """Raise `CaptureError` if no graph can take the model's parameters as they are."""
    try:
        kind = parallelism_of(model)
    except StepError as problem:  # it is sharded in some other way
        raise CaptureError(str(problem)) from None
    if kind != "plain":
        raise CaptureError(f"it is wrapped in {kind.upper()}, which averages gradients by hooks")
    odd = [one for one in model.parameters() if type(one.data) is not torch.Tensor]
    if odd:
        raise CaptureError(f"a parameter of it is a {type(odd[0]).__name__}")
