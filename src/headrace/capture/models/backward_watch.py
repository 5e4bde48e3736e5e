"""Backward passes that name their inputs, seen by graphed models.

A graphed model's output hangs on one small tensor and not on the parameters, so a call such as
`autograd.grad(loss, model.parameters())` or `loss.backward(inputs=[weight])` would find no way to
them. PyTorch's entry into its engine is replaced: such a call is given the small tensor instead,
and what the model's backward computes is put in the parameters' places.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge

_ENTRY = "_engine_run_backward"


class BackwardOwner(Protocol):
    """A graphed model, as a backward pass sees it."""

    anchor: torch.Tensor

    def owned(self, tensors: Iterable[object]) -> list[torch.Tensor]:
        """Those that are its parameters."""

    def is_pending(self) -> bool:
        """Whether a call of it waits for its backward."""

    def requested(
        self, parameters: Sequence[torch.Tensor]
    ) -> AbstractContextManager[dict[int, torch.Tensor]]:
        """In the block, backward passes put the gradients of these parameters into the dict, by
        the `id` of the parameter, and nowhere else."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_backwards(owner: BackwardOwner) -> None:
    """Let `owner` take part in backward passes that name its parameters, until it is freed."""
    _owners.add(owner)
    truth = getattr(torch.autograd, _ENTRY)
    if getattr(truth, "__module__", None) == __name__:
        return

    def run(outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *rest: Any,
            **options: Any) -> Any:  # fmt: skip
        arguments = (outputs, gradients, keep, create)
        owners = [one for one in list(_owners) if one.is_pending()] if inputs else []
        asked = [(one, one.owned(map(_tensor, inputs))) for one in owners]
        asked = [(one, parameters) for one, parameters in asked if parameters]
        if not asked:
            return truth(*arguments, inputs, *rest, **options)
        return _run_for(truth, arguments, tuple(inputs), asked, rest, options)

    setattr(torch.autograd, _ENTRY, run)


def _tensor(named: Any) -> Any:
    """The tensor that an input names: itself, or the leaf of an edge of the graph."""
    return getattr(named.node, "variable", None) if isinstance(named, GradientEdge) else named


def _run_for(
    truth: Any, arguments: Any, inputs: tuple[Any, ...], asked: Any, rest: Any, options: Any
) -> Any:
    """Run a backward that names parameters of graphed models."""
    accumulates = options.get("accumulate_grad", False)
    # For `grad`, whether an input may be left without a gradient; `backward` always lets it.
    may_be_unused = options.get("allow_unreachable", rest[0] if rest else False)
    found: list[dict[int, torch.Tensor]] = []
    with ExitStack() as stack:
        found = [stack.enter_context(one.requested(parameters)) for one, parameters in asked]
        named = (*inputs, *(one.anchor for one, _ in asked))
        if "allow_unreachable" in options:
            result = truth(*arguments, named, *rest, **{**options, "allow_unreachable": True})
        else:
            result = truth(*arguments, named, True, *rest[1:], **options)
    if accumulates:
        with torch.set_grad_enabled(bool(arguments[3])):
            for of_model, (_, parameters) in zip(found, asked, strict=True):
                for parameter in parameters:
                    accumulate(parameter, of_model.pop(id(parameter), None))
        return result
    gradients = list(result[: len(inputs)])
    with torch.set_grad_enabled(bool(arguments[3])):
        for at, named_input in enumerate(inputs):
            for of_model in found:
                part = of_model.get(id(_tensor(named_input)))
                if part is not None:
                    gradients[at] = part if gradients[at] is None else gradients[at] + part
    if not may_be_unused and any(one is None for one in gradients):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(gradients)


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add a gradient to `p.grad`, as autograd does."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    elif torch.is_grad_enabled():
        parameter.grad = parameter.grad + gradient
    else:
        parameter.grad.add_(gradient)
