"""`on_oom="halve"`: train on a batch that does not fit on the device in two halves.

    whole   forward ─ backward: out of memory
    halves  forward ─ backward, forward ─ backward, then one update

Gradients of loss × weight are summed over the halves and divided by the sum of their weights, as in
an accumulation group. So the update is that of the whole batch, up to rounding. A loss without a
weight is taken for a mean over the batch's rows. Halves that do not fit are halved again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.data import Fetched, flatten_batch, is_plain_tensor, rebuild_batch
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Finished, Launched, Standing
from headrace.engine.step.eager import EagerStep
from headrace.engine.values.arrived import Scalar
from headrace.errors import StepError
from headrace.plan import Plan


def require_halvable(model: torch.nn.Module, plan: Plan, *, carries: bool) -> None:
    """Raise `StepError` if halves would train differently from the whole batch, or if other ranks
    would not know of them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise StepError(
                f"on_oom = 'halve': {name or 'the model'} is a {type(module).__name__}, whose mean "
                "over a half batch differs from that over the whole: expected a model without "
                "batch norm"
            )
    if plan.graphs != "off":
        raise StepError(
            f"on_oom = 'halve': plan {plan.name} has graphs = {plan.graphs!r}, and a graph's "
            "memory is fixed at capture: expected graphs = 'off'"
        )
    if carries:
        raise StepError(
            "on_oom = 'halve' with a `carry`: the state of a batch cannot be halved: expected "
            "on_oom = 'raise'"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise StepError(
                f"on_oom = 'halve': this is one of {ranks} processes, and the others would wait "
                "while it trains on halves: expected a single process"
            )


@dataclass(slots=True)
class _TrainedSlice:
    """A slice of a batch that was trained on, and its weight in the batch's means."""

    loss: LossOutput
    weight: Scalar


class HalvingStep:
    """Trains on the whole batch if it fits, else on its halves, quarters and so on."""

    def __init__(self, eager: EagerStep) -> None:
        self._eager, self._parts, self._lanes = eager, eager.parts, eager.lanes

    def __call__(self, fetched: Fetched) -> Launched:
        parts, lanes = self._parts, self._lanes
        group, guard = parts.group, parts.update.guard
        parts.begin_batch()
        earlier = self._set_gradients_aside()
        with lanes.on(lanes.backward):
            weight = None if group.weight.value is None else group.weight.value.clone()
            seen = None if guard is None else guard.snapshot()
        try:
            trained = self._train_slices(fetched.batch, rows=None, batch_rows=None)
        except BaseException:  # leave the group as it was, without this batch
            self._put_gradients_back(earlier)
            with lanes.on(lanes.backward):
                group.weight.set(weight)
                if guard is not None and seen is not None:
                    guard.restore(seen)
            raise
        if len(trained) > 1:
            with lanes.on(lanes.backward):
                group.join_split_batch()
        self._add_gradients_back(earlier)
        group.end_backward()
        with lanes.on(lanes.forward):
            loss = trained[0].loss if len(trained) == 1 else _combined(trained)
        return self._eager.end_batch(fetched, loss)

    def finish(self) -> Finished | None:
        return self._eager.finish()

    def recover(self, counted: Standing) -> bool:
        return self._eager.recover(counted)

    def _train_slices(
        self, batch: Any, *, rows: int | None, batch_rows: int | None
    ) -> list[_TrainedSlice]:
        """Accumulate the gradients of `batch`, in halves if it does not fit. It has `rows` of the
        `batch_rows` rows of the whole batch; None if it is the whole batch."""
        parts, lanes = self._parts, self._lanes
        share = None if rows is None or batch_rows is None else rows / batch_rows
        earlier = self._set_gradients_aside()
        problem = ""
        try:
            loss = self._eager.add_gradients(batch, share=share, begins=False)
            lanes.backward_to_forward()
        except torch.OutOfMemoryError as found:
            # Keep only its text: its traceback keeps alive what the step has allocated so far.
            problem = str(found)
        if not problem:
            self._add_gradients_back(earlier)
            weight = share if share is not None and not loss.weighted else loss.weight
            return [_TrainedSlice(_detached(loss), weight)]
        loss = None  # type: ignore[assignment]
        self._put_gradients_back(earlier)
        halves = split(batch)
        if halves is None:
            raise torch.OutOfMemoryError(problem)
        parts.device.warn_once(
            "halved",
            "a batch did not fit into the memory of %s and is trained on in two halves, which "
            "takes longer: use smaller batches if this happens often",
            parts.device,
        )
        parts.device.release_unused()
        total = batch_rows or sum(count for count, _ in halves)
        return [
            trained
            for count, half in halves
            for trained in self._train_slices(half, rows=count, batch_rows=total)
        ]

    # --- gradients of earlier batches and slices -------------------------------------------------

    def _set_gradients_aside(self) -> list[torch.Tensor | None] | None:
        """Take the gradients away, so that a backward that fails cannot leave them half summed.
        Returns them; None if there are none."""
        earlier = [p.grad for p in self._parts.group.parameters()]
        if all(gradient is None for gradient in earlier):
            return None
        for parameter in self._parts.group.parameters():
            parameter.grad = None
        return earlier

    def _put_gradients_back(self, earlier: list[torch.Tensor | None] | None) -> None:
        """Replace the present gradients by the earlier ones."""
        parameters = self._parts.group.parameters()
        for parameter, gradient in zip(
            parameters, earlier or [None] * len(parameters), strict=True
        ):
            parameter.grad = gradient

    def _add_gradients_back(self, earlier: list[torch.Tensor | None] | None) -> None:
        """Add the present gradients to the earlier ones."""
        if earlier is None:
            return
        lanes = self._lanes
        with lanes.on(lanes.backward), torch.no_grad():
            for parameter, gradient in zip(self._parts.group.parameters(), earlier, strict=True):
                if gradient is not None and parameter.grad is not None:
                    gradient.add_(parameter.grad)
                if gradient is not None:
                    parameter.grad = gradient
        lanes.backward_to_forward()


def split(batch: Any) -> list[tuple[int, Any]] | None:
    """Split a batch in two along the first dimension of its tensors. Returns each half with its
    number of rows; None if the batch has one row, or tensors with different numbers of rows."""
    leaves = flatten_batch(batch)
    tensors = [leaf for leaf in leaves if is_plain_tensor(leaf) and leaf.dim() > 0]
    counts = {len(tensor) for tensor in tensors}
    rows = counts.pop() if len(counts) == 1 else 0
    if rows < 2 or not all(map(is_plain_tensor, leaves)):
        return None
    middle = (rows + 1) // 2
    halves = []
    for start, end in ((0, middle), (middle, rows)):
        part = [leaf[start:end] if leaf.dim() > 0 else leaf for leaf in leaves]
        halves.append((end - start, rebuild_batch(batch, part)))
    return halves


def _detached(loss: LossOutput) -> LossOutput:
    values = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in loss.values.items()
    }
    return replace(loss, loss=loss.loss.detach(), values=values)


def _combined(trained: list[_TrainedSlice]) -> LossOutput:
    """What the whole batch would have reported: means by weight, and the sum of the weights. The
    outputs of the slices are joined along their first dimension."""
    first = trained[0].loss
    total = sum(one.weight for one in trained)
    values: dict[str, Scalar] = {}
    for name in first.values:
        if name == "weight":
            values[name] = total
        else:
            values[name] = sum(one.loss.values[name] * one.weight for one in trained) / total
    loss = values["loss"]
    assert isinstance(loss, torch.Tensor)
    weight = total if first.weighted else 1
    outputs = _joined([one.loss.outputs for one in trained])
    return LossOutput(loss, weight, first.weighted, values, outputs=outputs)


def _joined(outputs: list[Any]) -> Any:
    if outputs[0] is None:
        return None
    columns = zip(*map(flatten_batch, outputs), strict=True)
    return rebuild_batch(outputs[0], [torch.cat(list(map(torch.atleast_1d, c))) for c in columns])
