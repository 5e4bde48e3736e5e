"""`on_oom="halve"`: a batch that does not fit on the device is trained on in halves.

    whole   forward ─ backward: no memory
    halves  forward ─ backward, forward ─ backward, then one update

Gradients of loss × weight are summed over the halves and divided by their weights' sum, as those
of an accumulation group are: the update is the whole batch's, to rounding. A loss without a weight
is taken for a mean over the batch's rows. Halves that do not fit are halved again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.data import Fetched, flatten_batch, is_plain_tensor, rebuild_batch
from headrace.engine.deferred import Scalar
from headrace.engine.loss_parts import LossParts
from headrace.engine.stages import Finished, Launched
from headrace.engine.step import EagerStep
from headrace.errors import StepError
from headrace.plan import Plan


def require_halvable(model: torch.nn.Module, plan: Plan) -> None:
    """Raise `StepError` where two halves would not be the same step, or could not be agreed on."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise StepError(
                f"on_oom = 'halve': {name or 'the model'} is a {type(module).__name__}, whose mean "
                "over a half is not that of the whole: expected a model without batch norm"
            )
    if plan.graphs != "off":
        raise StepError(
            f"on_oom = 'halve': plan {plan.name} has graphs = {plan.graphs!r}, whose memory is "
            "taken when they are captured: expected 'off'"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise StepError(
                f"on_oom = 'halve': this is one of {ranks} processes, and the others would wait "
                "for a step that it makes twice: expected one"
            )


@dataclass(slots=True)
class _Done:
    """A part that was trained on, and what it weighs in the batch's means."""

    loss: LossParts
    weight: Scalar


class HalvingStep:
    """Trains on a batch whole if it fits, else in parts."""

    def __init__(self, eager: EagerStep) -> None:
        self._eager, self._parts, self._lanes = eager, eager.parts, eager.lanes

    def __call__(self, fetched: Fetched) -> Launched:
        parts, lanes = self._parts, self._lanes
        group, guard = parts.group, parts.update.guard
        parts.begin()
        kept = self._set_aside()
        with lanes.on(lanes.backward):
            weight = None if group.weight.value is None else group.weight.value.clone()
            seen = None if guard is None else guard.seen()
        try:
            done = self._passes(fetched.batch, rows=None, of=None)
        except BaseException:  # the group is as it was: this batch is not in it
            self._put_back(kept)
            with lanes.on(lanes.backward):
                group.weight.set(weight)
                if guard is not None:
                    guard.forget(seen)
            raise
        if len(done) > 1:
            with lanes.on(lanes.backward):
                group.join_parts()
        self._add_back(kept)
        with lanes.on(lanes.backward, "backward"):
            group.gathered()
            if updated := group.is_full:
                parts.use()
        lanes.backward_to_forward()
        with lanes.on(lanes.forward):
            loss = done[0].loss if len(done) == 1 else _together(done)
        return parts.launched(fetched, loss, updated=updated)

    def finish(self) -> Finished | None:
        return self._eager.finish()

    def recover(self, counted: tuple[int, int]) -> bool:
        return self._eager.recover(counted)

    def _passes(self, batch: Any, *, rows: int | None, of: int | None) -> list[_Done]:
        """Gather the gradients of `batch`, which is `rows` rows of a batch of `of`."""
        parts, lanes = self._parts, self._lanes
        share = None if rows is None or of is None else rows / of
        kept = self._set_aside()
        problem = ""
        try:
            with lanes.on(lanes.forward, "forward"):
                loss = parts.forward(batch).unaliased()
            lanes.forward_to_backward()
            with lanes.on(lanes.backward, "backward"):
                parts.gather(loss, share)
            lanes.backward_to_forward()
        except torch.OutOfMemoryError as found:
            # Not to be kept: its traceback holds all that the step had allocated so far.
            problem = str(found)
        if not problem:
            self._add_back(kept)
            weight = share if share is not None and not loss.weighted else loss.weight
            return [_Done(_detached(loss), weight)]
        loss = None  # type: ignore[assignment]
        self._put_back(kept)
        halves = split(batch)
        if halves is None:
            raise torch.OutOfMemoryError(problem)
        parts.device.warn_once(
            "halved",
            "a batch found no memory on %s and is trained on in two halves; so will others, "
            "which costs time: smaller batches do not",
            parts.device,
        )
        parts.device.release_unused()
        total = of or sum(count for count, _ in halves)
        return [done for count, half in halves for done in self._passes(half, rows=count, of=total)]

    # --- gradients of what was trained on before ------------------------------------------------

    def _set_aside(self) -> list[torch.Tensor | None] | None:
        """A backward that fails leaves gradients half added to: so they are not there meanwhile."""
        kept = [p.grad for p in self._parts.group.parameters()]
        if all(gradient is None for gradient in kept):
            return None
        for parameter in self._parts.group.parameters():
            parameter.grad = None
        return kept

    def _put_back(self, kept: list[torch.Tensor | None] | None) -> None:
        parameters = self._parts.group.parameters()
        for parameter, gradient in zip(parameters, kept or [None] * len(parameters), strict=True):
            parameter.grad = gradient

    def _add_back(self, kept: list[torch.Tensor | None] | None) -> None:
        if kept is None:
            return
        lanes = self._lanes
        with lanes.on(lanes.backward), torch.no_grad():
            for parameter, gradient in zip(self._parts.group.parameters(), kept, strict=True):
                if gradient is not None and parameter.grad is not None:
                    gradient.add_(parameter.grad)
                if gradient is not None:
                    parameter.grad = gradient
        lanes.backward_to_forward()


def split(batch: Any) -> list[tuple[int, Any]] | None:
    """Two halves of a batch along the first dimension of its tensors, each with its rows; None if
    it has one row, or its tensors do not all have the same number of them."""
    leaves = flatten_batch(batch)
    tensors = [leaf for leaf in leaves if is_plain_tensor(leaf) and leaf.dim() > 0]
    counts = {len(tensor) for tensor in tensors}
    movable = [leaf for leaf in leaves if not is_plain_tensor(leaf)]
    rows = counts.pop() if len(counts) == 1 else 0
    if rows < 2 or movable:
        return None
    middle = (rows + 1) // 2
    halves = []
    for start, end in ((0, middle), (middle, rows)):
        part = [leaf[start:end] if leaf.dim() > 0 else leaf for leaf in leaves]
        halves.append((end - start, rebuild_batch(batch, part)))
    return halves


def _detached(loss: LossParts) -> LossParts:
    values = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in loss.values.items()
    }
    return LossParts(loss.loss.detach(), loss.weight, loss.weighted, values)


def _together(done: list[_Done]) -> LossParts:
    """What the whole batch would have reported: means by weight, and the weights' sum."""
    first = done[0].loss
    total = sum(one.weight for one in done)
    values: dict[str, Scalar] = {}
    for name in first.values:
        if name == "weight":
            values[name] = total
        else:
            values[name] = sum(one.loss.values[name] * one.weight for one in done) / total
    loss = values["loss"]
    assert isinstance(loss, torch.Tensor)
    return LossParts(loss, total if first.weighted else 1, first.weighted, values)
