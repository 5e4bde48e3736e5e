"""One optimizer step: autocast, loss, backward, clipping, update. No host wait among them.

`loss(model, batch)` returns a tensor, or a dict with `loss` (a mean), optionally `weight` (what the
mean is over: tokens, say), and metrics. Gradients of loss × weight are summed over an accumulation
group and divided once, on the device, by the group's total weight: that of all ranks, if the model
is DDP's or FSDP2's. With `accumulate_by="count"` each loss is divided by `accumulate` instead, as
most people write it, and a weight only weighs the means that are reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from headrace.device import Device
from headrace.engine.accelerated import plain_optimizer
from headrace.engine.clipping import Clipping
from headrace.engine.deferred import Scalar
from headrace.engine.ema import Ema
from headrace.engine.group_weight import GroupWeight
from headrace.engine.kept_buffers import KeptBuffers
from headrace.engine.learning_rates import LearningRates
from headrace.engine.loss_function import require_loss_function
from headrace.engine.loss_parts import LossParts
from headrace.engine.loss_watch import call_watched
from headrace.engine.nonfinite import Gate, NonFinitePolicy
from headrace.engine.schedules import Every, Scheduler, schedule_of
from headrace.errors import StepError
from headrace.parallel import bare, locals_of, ranks_of, spread_of, synchronise_gradients
from headrace.source_lines import described

LossFunction = Callable[[Any, Any], torch.Tensor | Mapping[str, Scalar]]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingStep:
    """Forward, backward and update of one model, to be put on whatever streams a plan says."""

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        precision: str | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        accumulate_by: Literal["weight", "count"] = "weight",
        scheduler: Scheduler | None = None,
        scheduler_every: Every = "step",
        ema: Ema | None = None,
        non_finite: NonFinitePolicy = NonFinitePolicy("report"),  # noqa: B008 - frozen
    ) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise StepError(f"accumulate = {accumulate!r}: expected a whole number, 1 or more")
        if accumulate_by not in ("weight", "count"):
            raise StepError(f"accumulate_by = {accumulate_by!r}: expected 'weight' or 'count'")
        optimizer = plain_optimizer(optimizer, accumulate)
        _check_parts(device, model, optimizer, has_scheduler=scheduler is not None)
        require_loss_function(loss)
        if clip_norm is not None and not clip_norm > 0:
            raise StepError(f"clip_norm = {clip_norm!r}: expected a number above 0")
        self.device = device
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.schedule = schedule_of(scheduler, scheduler_every, optimizer, accumulate)
        self.ema = ema
        self.updates = 0
        self.loss = loss
        #: The same, as the user wrote it, and as messages name it.
        self._written, self._described = loss, f"the loss function {described(loss)}"
        self._to_watch = 0
        #: Where the optimizer's rates are read from on the device; None: they are Python numbers.
        self.rates: LearningRates | None = None
        #: Whether gradients keep their memory from group to group, as a graph needs it.
        self.keeps_gradients = False
        #: Then: the parameters (by `id`) that the group's batches gave a gradient.
        self.reached: set[int] = set()
        #: Called before the update of a last partial group, which no batch asked for.
        self.before_last_update: Callable[[], None] | None = None
        self.clip_norm = clip_norm
        self.spread, self.ranks = spread_of(model), ranks_of(model)
        #: Whether the next batch is known to be the epoch's last, which ends its group.
        self.is_last = False
        self._averaged = True  # over ranks, the gradients gathered last
        #: Whether gradients are those of loss × weight, to be divided once a group.
        self._weighs = accumulate_by == "weight" and (accumulate > 1 or self.ranks.several)
        #: What a batch's loss is divided by; None: it is weighed instead.
        self.divided_by = accumulate if accumulate_by == "count" else None
        self._parted = False  # whether a batch of the group was trained on in parts
        self._clipping = Clipping(device, model, optimizer)
        #: What a scheduler raised after the last update, which was made: see `raise_late`.
        self._late: Exception | None = None
        #: What the group's batches weigh so far.
        self.weight = GroupWeight(device, self.ranks)
        self._in_group = 0
        self._torn = self._gathering = self._unclear = False
        self.scaler: torch.amp.GradScaler | None = None
        self.scales_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        #: What keeps updates that are not finite from being made; with fp16 the scaler does.
        self.gate: Gate | None = None
        #: What goes back if a batch fails; None: nobody will ask for a state then.
        self.buffers: KeptBuffers | None = None
        self._may_skip = non_finite.most
        self.set_precision(precision)

    def set_precision(self, precision: str | None) -> None:
        """What the model computes in from the next batch on: "fp32", "tf32", "bf16" or "fp16".
        None: float32, as PyTorch is set."""
        if precision == "fp16" and self.spread == "fsdp":
            raise StepError(
                "fp16 under FSDP2: each rank would see infinite gradients of its own shard alone; "
                "use bf16, or DDP"
            )
        self._precision = precision
        if precision != "fp16":
            self.scaler = None
        elif self.scaler is None:
            self.scaler = torch.amp.GradScaler(self.device.torch_device.type)
        if self.scaler is not None or self._may_skip is None:
            self.gate = None
        elif self.gate is None:
            self.gate = Gate(self.device, self._may_skip, self.scales_on_device)

    @property
    def group_is_open(self) -> bool:
        """Whether gradients were gathered that no update has used yet."""
        return self._in_group > 0

    @property
    def group_is_full(self) -> bool:
        return self._in_group == self.accumulate

    def batches_for(self, updates: int) -> int:
        """How many batches so many updates take, from here on."""
        return max(0, updates * self.accumulate - self._in_group)

    @property
    def progress(self) -> tuple[int, int]:
        """Updates, and batches in the open group: other numbers, another state."""
        return self.updates, self._in_group

    def begin_epoch(self) -> None:
        """Before a pass: the loss function, or the model's parameters, may be others than before.
        The first batches are watched: a second one may find gradients of a first."""
        self._to_watch = min(2, self.accumulate)
        self._late = None
        self._clipping.begin_epoch()

    def forward(self, batch: Any) -> LossParts:
        model = self.model
        if not torch.is_grad_enabled():
            model = bare(model)  # no other rank is needed
        elif self.spread != "plain":
            self._averaged = self.is_last or self._in_group + 1 >= self.accumulate
            synchronise_gradients(model, self._averaged)
        with autocast(self.device, self._precision):
            if self._to_watch and torch.is_grad_enabled():
                self._to_watch -= 1
                returned = call_watched(
                    self.loss,
                    model,
                    batch,
                    device=self.device,
                    optimizer=self.optimizer,
                    written=self._written,
                )
            else:
                returned = self.loss(model, batch)
        needs_grad = torch.is_grad_enabled()
        return LossParts.of(returned, self.device, needs_grad=needs_grad, by=self._described)

    def backward(self, parts: LossParts) -> None:
        """Add this batch's gradients to the group's."""
        self.begin()
        self._gathering = True
        self.gather(parts)
        self.gathered()

    def update(self) -> None:
        """Use the group's gradients: divide, clip, step, and begin a new group."""
        if self.rates is not None:
            self.rates.write()
        self._torn = True
        self.apply()
        self.applied()

    # --- the same in parts: a graph has the device's part in it, the host's is done each time ---

    def begin(self) -> None:
        """Before a batch: what an error left of the group before is cleared away."""
        if self._unclear:
            self._clear()
            if self.gate is not None:
                self.gate.forget()
            if self.scaler is not None:  # it may have unscaled what was never used
                self.scaler._per_optimizer_states.clear()
            self._unclear = False

    def tear(self) -> None:
        """From here on to `gathered`, an error leaves a state that is of no moment between two
        batches."""
        self._torn = True

    def gather(self, parts: LossParts, share: float | None = None) -> None:
        """The device's part of `backward`. `share` is given where a batch is trained on in parts:
        how much of the batch this one is, its weight unless the loss gives one."""
        target, weight = parts.loss, parts.weight
        if share is not None and not parts.weighted:
            weight = share
        weighs = self._weighs or share is not None
        if weighs:
            target = target * weight
        elif not parts.counts:
            target = target * 0
        elif self.accumulate > 1:
            target = target / self.accumulate
        if weighs and self.ranks.several:  # before backward, which it then hides behind
            self.weight.add(weight)
            if self._averaged:
                self.weight.start_total()
        if self.gate is not None:
            self.gate.see_loss(parts.loss)
        if self.scaler is not None:
            target = self.scaler.scale(target)
        target.backward()
        if weighs and not self.ranks.several:
            self.weight.add(weight)

    def join_parts(self) -> None:
        """After the parts of one batch, whose gradients are alone in place: divide them by what
        the parts weigh together, unless the group's batches are weighed as well."""
        self._parted = True
        if self._weighs:
            return
        _divide(locals_of(self._gradients()), self.weight.total() * self.accumulate)
        self.weight.clear(forget=True)

    def gathered(self) -> None:
        """The host's part of `backward`."""
        self._in_group += 1
        self._torn = self._gathering = False

    def apply(self) -> None:
        """The device's part of `update`."""
        self._divide_gradients()
        norm = None
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            norm = self._clipping.clip(self.clip_norm, divided=self._weighs or self._parted)
        if self.gate is not None:
            self.gate.see_gradients(locals_of(self._gradients()), norm, self.ranks)
        with self.rates.in_groups() if self.rates is not None else nullcontext():
            self._optimize()
        self._clear()
        if self.ema is not None:
            self.ema.update()

    def applied(self) -> None:
        """The host's part of `update`. What a scheduler raises is kept for `raise_late`: the update
        was made, and is to be counted first."""
        self._torn = True  # the gradients are used up
        self._in_group = 0
        self.updates += 1
        self._torn = False
        if self.schedule is not None:
            try:
                self.schedule.after_update(self.updates)
            except Exception as problem:
                self._late = self.schedule.explained(problem, f"update {self.updates:,}")

    def raise_late(self) -> None:
        """Once a batch is counted: what its update's scheduler raised, if it did."""
        if self._late is not None:
            problem, self._late = self._late, None
            raise problem

    def _optimize(self) -> None:
        if self.gate is not None:
            with self.gate.before(self.optimizer) as is_open:
                if is_open:
                    self.optimizer.step()
            return
        if self.scaler is None:
            self.optimizer.step()
            return
        # Only fused optimizers keep "was there an infinity" on the device; others read it.
        fused = self.scales_on_device
        with nullcontext() if fused else self.device.ledger.waiting("fp16_found_inf"):
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.weight.clear(forget=not self._weighs)
        self._parted = False

    def _divide_gradients(self) -> None:
        """By what the group weighs, if it is weighed at all."""
        if self.ranks.several and not self._averaged:
            self._average_open_group()
        if self.weight.value is None:
            return
        _divide(locals_of(self._gradients()), self.weight.total())

    def _average_open_group(self) -> None:
        """The loop was left inside a group, whose last batch was not known to be the last."""
        if self.spread == "fsdp":
            raise StepError(
                f"the loop was left after {self._in_group} of a group's {self.accumulate} batches: "
                "under FSDP2 their gradients are of no use then; leave it after an update"
            )
        self.ranks.average_gradients(self._gradients(), self.device.ledger)
        self.weight.start_total()

    def state_dict(self) -> dict[str, Any]:
        """Where the step stands in its accumulation group, gradients included."""
        gathered = self._in_group > 0
        if gathered and self.ranks.several:
            raise StepError(
                f"a state was asked for after {self._in_group} of a group's {self.accumulate} "
                "batches: with several ranks it is taken between two updates"
            )
        return {
            "updates": self.updates,
            "in_group": self._in_group,
            "weight": self.weight.value if gathered else None,
            "gradients": [self._gathered(p) for p in self.parameters()] if gathered else None,
            "divided_by": self.divided_by,
            "outside": {} if self.clip_norm is None else self._clipping.gradients_outside(),
            "gate": None if self.gate is None else self.gate.state_dict(begun=not self._unclear),
        }

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The group's gradient so far; None if no batch gave one, also where zeros are kept."""
        kept = self.keeps_gradients and id(parameter) not in self.reached
        return None if kept else parameter.grad

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._torn = self._gathering = self._unclear = False
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"])
        self.updates, self._in_group = state["updates"], state["in_group"]
        self.weight.clear(forget=not self._weighs)
        if state["weight"] is not None:
            self.weight.add(state["weight"].to(self.device.torch_device))
        gradients = state["gradients"] or [None] * len(self.parameters())
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            # Its own memory: what was stored may be used for more than one engine.
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        if self.clip_norm is not None:
            self._clipping.set_gradients_outside(state.get("outside") or {})

    def end_epoch(self, epochs: int, mean_loss: float) -> None:
        """Tell the scheduler that the `epochs`-th epoch has ended."""
        if self.schedule is None:
            return
        try:
            self.schedule.after_epoch(epochs, mean_loss)
        except Exception as problem:
            found = self.schedule.explained(problem, f"epoch {epochs:,}")
            if found is problem:
                raise
            raise found from problem

    def recover(self, *, of_batch: bool) -> bool:
        """After an error in a batch, or in an update: gradients that it left half made are
        forgotten, so that they cannot leak into the next group. Whole ones, of batches before the
        failed one, stay to be used. Returns whether the state is whole, that before the failed
        batch: also if its backward failed, as long as there were no others' gradients."""
        self.weight.lose_total()
        torn = self._torn or (self._gathering and self.group_is_open)
        self._unclear = self._unclear or self._torn or self._gathering
        self._torn = self._gathering = False
        if torn:
            self._in_group = 0
        went_back = not of_batch or self.buffers is None or self.buffers.put_back()
        return went_back and not torn

    def parameters(self) -> list[torch.Tensor]:
        """What the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def own_tensors(self) -> list[torch.Tensor]:
        """What a step reads that is neither the model's nor the optimizer's, but ours."""
        found = [] if self.weight.value is None else [self.weight.value]
        if self.gate is not None:
            found += self.gate.tensors()
        scale = None if self.scaler is None else self.scaler._scale
        return found if scale is None else [*found, scale]

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]


def autocast(device: Device, precision: str | None) -> AbstractContextManager[object]:
    """Inside the block a model computes in bf16 or fp16, if that is the precision."""
    dtype = None if precision is None else _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.torch_device.type, dtype)


def _divide(gradients: list[torch.Tensor], weight: torch.Tensor) -> None:
    if gradients:
        # A group of weight 0 has gradients of 0: they stay that.
        weight = weight.to(gradients[0].dtype).clamp(min=torch.finfo(torch.float32).tiny)
        torch._foreach_div_(gradients, weight)


def _check_parts(
    device: Device,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    has_scheduler: bool,
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise StepError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        without = "a scheduler without an optimizer: " if has_scheduler else ""
        raise StepError(
            f"{without}optimizer is a {type(optimizer).__name__}: expected one "
            "torch.optim.Optimizer (for several, or updates of your own, use Engine.from_step)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise StepError(
            f"{type(optimizer).__name__} calls the loss itself, through a closure: that cannot be "
            "planned. Use another optimizer, or Engine.from_step with a step of your own"
        )
    for parameter in model.parameters():
        if not device.holds(parameter):
            raise StepError(
                f"the model is on {parameter.device}, the engine runs on {device}: call "
                f"model.to('{device.torch_device}') before the optimizer is made"
            )
