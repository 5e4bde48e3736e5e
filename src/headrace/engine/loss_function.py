"""What may be given to an engine as a loss: a function of the model and a batch.

Most people have a criterion, a function of outputs and targets. Wherever a signature or a type
shows that, it is said when the engine is made; otherwise, after the first call has failed.
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
from headrace.source_lines import described, users_line

_WRITE = (
    "write a function that calls the model: def loss(model, batch): inputs, targets = batch; "
    "return criterion(model(inputs), targets)"
)
_OUTPUTS = re.compile(r"(y_?)?(input|output|out|pred|prediction|logit|score|hat|prob)s?")
_TARGETS = re.compile(r"(y_?)?(target|label|true|truth|gt|gold)s?|y")


def require_loss_function(loss: object) -> None:
    """Raise `StepError` for what cannot be called as `loss(model, batch)`, or is a criterion."""
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
            f"loss is the class {inner.__name__} (given at {users_line()}), and the engine calls "
            f"loss(model, batch): {_WRITE}"
        )
    if _is_torchs_criterion(inner):
        raise _is_a_criterion(loss)
    _check_signature(loss)


def _is_torchs_criterion(loss: object) -> bool:
    if isinstance(loss, torch.nn.Module):
        own = type(loss).__module__.startswith("torch.nn.modules.")
        return own and isinstance(loss, _Loss)
    return str(getattr(loss, "__module__", "")) == "torch.nn.functional"


def _check_signature(loss: Any) -> None:
    try:
        called = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError):  # not written in Python: its first call will tell
        return
    try:
        bound = called.bind(object(), object())
    except TypeError as problem:
        names = [str(parameter) for parameter in called.parameters.values()]
        raise StepError(
            f"the engine calls loss(model, batch), and {described(loss)} takes "
            f"({', '.join(names)}): {problem}. {_with_two_arguments(called)}"
        ) from None
    outputs, targets, *_ = *(name.lower() for name in bound.arguments), "", ""
    if _OUTPUTS.fullmatch(outputs) and _TARGETS.fullmatch(targets):
        raise _is_a_criterion(loss)


def _with_two_arguments(called: inspect.Signature) -> str:
    """How a function of other arguments is to be written."""
    usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    empty = inspect.Parameter.empty
    names = [p.name for p in called.parameters.values() if p.kind in usual and p.default is empty]
    if len(names) < 3:
        return "Write it as def loss(model, batch)"
    first, *rest = names
    return (
        f"Let it take the batch whole and unpack it: def loss({first}, batch): "
        f"{', '.join(rest)} = batch"
    )


def _is_a_criterion(loss: object) -> StepError:
    name = described(loss)
    if isinstance(loss, torch.nn.Module):
        name = f"{type(loss).__name__}()"
    return StepError(
        f"loss is {name} (given at {users_line()}), a criterion of outputs and targets, and the "
        f"engine calls loss(model, batch): {_WRITE}"
    )


def explained(problem: Exception, loss: object, model: torch.nn.Module) -> StepError | None:
    """What is to be said of an error in the first call, if it shows that the model was taken for
    its outputs; None: it is the user's own, and speaks for itself."""
    if not isinstance(problem, TypeError | AttributeError):
        return None
    missing = re.search(r"has no attribute '(\w+)'", str(problem))
    if missing is not None and not hasattr(torch.Tensor, missing[1]):
        return None  # it was taken for something else than a tensor
    if _comes_from(problem.__traceback__, model):
        return None
    # The model itself, and the one inside it where it is DDP's or compiled.
    inside = (getattr(model, name, model) for name in ("module", "_orig_mod"))
    names = {type(module).__name__ for module in (model, *inside)}
    if not any(re.search(rf"\b{re.escape(name)}\b", str(problem)) for name in names):
        return None
    text = str(problem).strip().splitlines()[0]
    return StepError(
        f"the loss function {described(loss)} raised {type(problem).__name__}: {text}. The engine "
        "calls loss(model, batch), with the model itself, not its outputs: if that is a criterion, "
        f"{_WRITE}"
    )


def _comes_from(where: TracebackType | None, model: torch.nn.Module) -> bool:
    """Whether an error came out of the model's forward: then it is not about how it was called."""
    own = {id(module) for module in model.modules()}
    while where is not None:
        frame = where.tb_frame
        if frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in own:
            return True
        where = where.tb_next
    return False
