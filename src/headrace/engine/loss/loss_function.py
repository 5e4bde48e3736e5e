"""Checks that an engine's loss is a function of the model and a batch.

Many people pass a criterion instead: a function of outputs and targets. If its type or signature
shows that, creating the engine raises an error; otherwise the first failed call explains it.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.loss import _Loss

from headrace.errors import StepError
from headrace.source_lines import describe_function, users_line

_HOW_TO_WRITE = (
    "write a function that calls the model: def loss(model, batch): inputs, targets = batch; "
    "return criterion(model(inputs), targets)"
)
_OUTPUTS = re.compile(r"(y_?)?(input|output|out|pred|prediction|logit|score|hat|prob)s?")
_TARGETS = re.compile(r"(y_?)?(target|label|true|truth|gt|gold)s?|y")


def require_loss_function(loss: object, *, carries: bool) -> None:
    """Raise `StepError` if `loss` is a criterion, or cannot be called as `loss(model, batch)`. If
    the engine `carries` state, the call is `loss(model, batch, carried)`."""
    if not callable(loss):
        raise StepError(
            f"loss is a {type(loss).__name__} (given at {users_line()}): expected a function that "
            "takes the model and a batch, and returns the loss"
        )
    inner: object = loss
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, type) and issubclass(inner, torch.nn.Module):
        raise StepError(
            f"loss is the class {inner.__name__} (given at {users_line()}), but the engine calls "
            f"loss(model, batch): {_HOW_TO_WRITE}"
        )
    if _is_torch_criterion(inner):
        raise _criterion_error(loss)
    _check_signature(loss, carries)


def _is_torch_criterion(loss: object) -> bool:
    if isinstance(loss, torch.nn.Module):
        own = type(loss).__module__.startswith("torch.nn.modules.")
        return own and isinstance(loss, _Loss)
    return str(getattr(loss, "__module__", "")) == "torch.nn.functional"


def _check_signature(loss: Any, carries: bool) -> None:
    try:
        called = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError):  # not written in Python: nothing to check before its first call
        return
    try:
        bound = called.bind(*[object()] * (3 if carries else 2))
    except TypeError as problem:
        names = [str(parameter) for parameter in called.parameters.values()]
        call = "loss(model, batch, carried)" if carries else "loss(model, batch)"
        raise StepError(
            f"the engine calls {call}, but {describe_function(loss)} takes ({', '.join(names)}): "
            f"{problem}. Let it take the whole batch, and unpack it inside"
        ) from None
    if carries:
        return
    outputs, targets, *_ = *(name.lower() for name in bound.arguments), "", ""
    if _OUTPUTS.fullmatch(outputs) and _TARGETS.fullmatch(targets):
        raise _criterion_error(loss)


def _criterion_error(loss: object) -> StepError:
    name = describe_function(loss)
    if isinstance(loss, torch.nn.Module):
        name = f"{type(loss).__name__}()"
    return StepError(
        f"loss is {name} (given at {users_line()}), a criterion of outputs and targets, but the "
        f"engine calls loss(model, batch): {_HOW_TO_WRITE}"
    )


def explain_call_error(
    problem: Exception, loss: object, model: torch.nn.Module
) -> StepError | None:
    """The error to raise instead of `problem`, if the first call failed because the loss function
    takes the model for its outputs. None if `problem` has another cause."""
    if not isinstance(problem, TypeError | AttributeError):
        return None
    missing = re.search(r"has no attribute '(\w+)'", str(problem))
    if missing is not None and not hasattr(torch.Tensor, missing[1]):
        return None  # no tensor has this attribute either
    if _raised_in(model, problem.__traceback__):
        return None
    # DDP and torch.compile wrap the model: the error may name the wrapper or the wrapped class.
    wrapped = (getattr(model, name, model) for name in ("module", "_orig_mod"))
    names = {type(module).__name__ for module in (model, *wrapped)}
    if not any(re.search(rf"\b{re.escape(name)}\b", str(problem)) for name in names):
        return None
    text = str(problem).strip().splitlines()[0]
    return StepError(
        f"the loss function {describe_function(loss)} raised {type(problem).__name__}: {text}. "
        "The engine calls loss(model, batch), with the model itself, not its outputs: if that is a "
        f"criterion, {_HOW_TO_WRITE}"
    )


def _raised_in(model: torch.nn.Module, where: TracebackType | None) -> bool:
    """Whether the model's own forward raised the error."""
    own = {id(module) for module in model.modules()}
    while where is not None:
        frame = where.tb_frame
        if frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in own:
            return True
        where = where.tb_next
    return False
