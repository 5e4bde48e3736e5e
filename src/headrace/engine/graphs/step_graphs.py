"""Training steps as graphs: forward, loss, backward, clipping and update, captured for each shape.

`capture/` says when the engine's step is watched, captured and replayed. Here is what is special
about it: with accumulation, gradients keep their memory and the update is a graph of its own, and
the optimizer reads its learning rates on the device.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from headrace.capture import (
    GRADIENTS_REPLACED,
    CapturableOptimizer,
    CapturedFunction,
    CapturedWork,
    CaptureSettings,
    GraphCache,
    GraphReport,
    Guards,
    StateBeforeCapture,
    StepState,
    StepTracer,
    describe_failure,
    map_tensors,
)
from headrace.data import Fetched
from headrace.engine.graphs.graph_obstacles import capture_obstacle
from headrace.engine.graphs.graph_state import release_graph_state, tensors_of
from headrace.engine.loss.compiled import CompiledLoss, loss_mode
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Launched
from headrace.engine.step.eager import EagerStep
from headrace.engine.step.parts import StepParts
from headrace.errors import CaptureError
from headrace.plan import Plan

_GRADIENT = operator.attrgetter("grad")
# In its first steps DDP rebuilds its buckets and measures itself.
_DDP_WARM_UP_STEPS = 11
_GRADIENTS_DIFFER = (
    "some parameters get a gradient from some batches only, and with accumulation a graph needs "
    "the same ones each time: use every parameter for every batch, or accumulate = 1"
)


class Training(NamedTuple):
    """A batch to train on, and the step that does so eagerly."""

    fetched: Fetched
    eager: EagerStep


class StepGraphs:
    """The graphs of one training step under one plan. They stay from pass to pass."""

    def __init__(self, parts: StepParts, plan: Plan) -> None:
        self._parts = parts
        # Watch only after the warm-up, when steps are like those to come. The first batch compiles.
        compiles = isinstance(parts.forward.loss, CompiledLoss)
        warm_up = (_DDP_WARM_UP_STEPS if parts.parallelism == "ddp" else 0) + compiles
        watch_after = plan.graph_after + warm_up
        self._graphs: CapturedFunction[Training, LossOutput, Launched] = CapturedFunction(
            self,
            parts.device,
            CaptureSettings(
                plan_name=plan.name,
                max_graphs=plan.graph_shapes,
                watch_first=max(watch_after - 1, 1 + compiles),
                watch_last=watch_after,
                capture_after=watch_after,
                recheck=plan.recheck,
                cautious=plan.graphs == "auto",
            ),
        )
        self._updates: GraphCache[None] = GraphCache(parts.device, max_graphs=1, capture_after=0)
        # Parameters whose gradients only the user replaces, and those gradients at capture: of
        # parameters that the optimizer does not have, and with accumulation of all.
        self._with_fixed_gradients: list[torch.Tensor] = []
        self._fixed_gradients: list[torch.Tensor | None] = []
        # With accumulation, the parameters (by `id`) to which each graph gives a gradient.
        self._reached_by: dict[Hashable, frozenset[int]] = {}
        # Of the last capture.
        self._eager: EagerStep | None = None
        self._reached: frozenset[int] = frozenset()
        self._graphs.look_for_obstacles()

    def train(self, fetched: Fetched, eager: EagerStep) -> Launched:
        """Train on one batch, on the current stream."""
        self._eager = eager
        return self._graphs(Training(fetched, eager))

    def train_eagerly(self, fetched: Fetched, eager: EagerStep) -> Launched:
        """Train on one batch without a graph, also if there is one."""
        return self._graphs.run(Training(fetched, eager))

    @property
    def why(self) -> str | None:
        """Why the step is not captured (any more)."""
        return self._graphs.why

    def give_up(self, why: str) -> None:
        """Capture nothing any more."""
        self._graphs.give_up(why, quietly=True)

    def state_dict(self) -> dict[str, Any]:
        """What later bits depend on: whether the optimizer was made capturable (`prepared`), and
        what code that asks whether it is captured was told."""
        return {
            "prepared": self._graphs.optimizers.are_capturable,
            "as_captured": self._graphs.trials.watch.as_captured,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Drop all graphs: the optimizer has another state by now."""
        self._graphs.drop()
        self._parts.group.kept.assume_reached(is_open=self._parts.group.is_open)
        # An optimizer that was capturable stays so. In older states, without "prepared", all were.
        if state is not None and state.get("prepared", self._graphs.why is None):
            self._graphs.make_capturable()
        elif self._graphs.optimizers.are_capturable:
            self._graphs.optimizers.forget()
        if state is not None and state.get("as_captured"):
            self._graphs.trials.watch.answer_as_captured()

    def report(self) -> GraphReport:
        found = self._graphs.report(more_bytes=self._updates.memory_bytes)
        return replace(found, seconds=found.seconds + self._updates.seconds)

    def close(self) -> None:
        """Drop all graphs. Shapes are watched and captured again when they are due."""
        self._graphs.drop()

    # --- what is captured -------------------------------------------------------------------------

    def tree(self, call: Training) -> Any:
        return call.fetched.batch

    def find_state(self) -> StepState:
        return self._parts.state

    def found(self, guards: Guards) -> None:
        pass

    def settings(self) -> tuple[tuple[str, Any], ...]:
        update = self._parts.update
        clip_norm = None if update.clipping is None else update.clipping.max_norm
        decay = None if update.ema is None else update.ema.decay
        return ("clip_norm", clip_norm), ("ema_decay", decay)

    def obstacle(self, state: StepState) -> str | None:
        return capture_obstacle(self._parts)

    def key(self, call: Training) -> tuple[Hashable, ...]:
        carry = self._parts.carry
        if carry is None:
            return ()
        carry.before(call.fetched.batch)  # now the state is in the memory that a graph would read
        return (carry.key(),)

    def graph_key(self, key: Hashable) -> Hashable | None:
        return key

    def tensors(self) -> list[torch.Tensor]:
        parts = self._parts
        found = [*tensors_of(parts), *parts.own_tensors()]
        for parameter in (*parts.model.parameters(), *parts.group.parameters()):
            if parameter.grad is not None:
                found.append(parameter.grad)
        return found

    def held(self) -> list[torch.Tensor]:
        return tensors_of(self._parts)

    def replaced(self) -> str | None:
        now = map(_GRADIENT, self._with_fixed_gradients)
        are_same = all(map(operator.is_, now, self._fixed_gradients))
        return None if are_same else GRADIENTS_REPLACED

    def memory_moves(self) -> None:
        group = self._parts.group
        for parameter in () if group.is_open else group.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # momentum would update it even with a gradient of zeros

    def write_rates(self) -> None:
        self._parts.update.write_rates()

    def use_optimizers(self, capturable: Sequence[CapturableOptimizer]) -> None:
        """Let updates read the learning rates on the device."""
        self._parts.update.use_rates(capturable[0].rates if capturable else None)

    def run(self, call: Training) -> Launched:
        return self._run(call, None)

    def run_watched(
        self, call: Training, key: Hashable, tracer: StepTracer
    ) -> tuple[Launched, bool]:
        with loss_mode(self._parts.forward.loss, "plain"):
            return self._run(call, tracer), True

    def run_compared(self, call: Training) -> tuple[Launched, str | None] | None:
        """Compiled code is not traced: it would round otherwise. Its own guards say whether a value
        that it reads has changed."""
        loss = self._parts.forward.loss
        if not isinstance(loss, CompiledLoss) or loss.report().why is not None:
            return None
        before = loss.report().compilations
        launched = self._run(call, None)
        if loss.report().compilations == before:
            return launched, None
        return launched, "PyTorch compiled it again, since a Python value that it reads has changed"

    def _run(self, call: Training, tracer: StepTracer | None) -> Launched:
        loss = call.eager.add_batch(call.fetched, tracer)
        if self._parts.group.is_full:
            self.drop_unreached_gradients()
        return call.eager.end_batch(call.fetched, loss)

    def replay(
        self,
        captured: CapturedWork[LossOutput],
        key: Hashable,
        call: Training,
        leaves: list[torch.Tensor],
    ) -> Launched:
        parts, group = self._parts, self._parts.group
        parts.begin_batch()
        parts.update.write_rates()
        group.begin_update() if group.size == 1 else group.begin_backward()
        loss = captured.replay(leaves)
        if group.size == 1:
            updated = True
            group.end_step()
        else:
            group.end_backward()
            group.kept.note_reached(self._reached_by[key])
            if updated := group.is_full:
                self.drop_unreached_gradients()
                self._update()
        if parts.carry is not None:
            parts.carry.hold(loss.carried)
        if loss.outputs is not None:  # the next replay overwrites them
            loss = replace(loss, outputs=map_tensors(torch.clone, loss.outputs))
        return parts.make_launched(call.fetched, loss, updated=updated, replayed=True)

    def ready(self) -> bool:
        """Whether an update was made, and with accumulation a group is about to begin whose
        gradients all exist, as zeros in memory that stays. The first call asks the group to keep
        that memory from now on."""
        group, state = self._parts.group, self._parts.optimizer.state
        if group.updates == 0:
            return False
        if group.size == 1:
            return True
        if group.is_open:
            return False
        if not group.kept.are_kept:
            group.kept.keep()
            return False
        return not any(
            p.grad is None and p.requires_grad and state.get(p) for p in group.parameters()
        )

    def record(self, tree: Any) -> LossOutput:
        group = self._parts.group
        assert self._eager is not None
        group.kept.forget_reached()
        try:
            return self._eager.record(tree)
        finally:
            self._reached = frozenset(group.kept.reached)
            group.kept.forget_reached()

    def check(self, key: Hashable, before: StateBeforeCapture) -> None:
        group = self._parts.group
        if group.kept.are_kept and (
            before.gradients_changed() or self._reached != group.kept.existing()
        ):
            raise CaptureError(_GRADIENTS_DIFFER)
        self._reached_by[key] = self._reached

    def keep(self, captured: CapturedWork[LossOutput], key: Hashable) -> None:
        group = self._parts.group
        own = set() if group.kept.are_kept else {id(p) for p in group.parameters()}
        guards = self._graphs.guards
        state = self._parts.state if guards is None else guards.state
        self._with_fixed_gradients = [
            p for p in state.parameters() if p.grad is not None and id(p) not in own
        ]
        self._fixed_gradients = list(map(_GRADIENT, self._with_fixed_gradients))

    def dropped(self) -> None:
        self._updates.close()
        self._with_fixed_gradients, self._fixed_gradients = [], []
        self._reached_by.clear()

    def given_up(self) -> None:
        release_graph_state(self._parts)

    # --- accumulation -----------------------------------------------------------------------------

    def drop_unreached_gradients(self) -> None:
        """Call before an update. A gradient that keeps its memory is zero, not None, if no batch of
        the group has reached its parameter. If so, drop it and stop capturing."""
        group = self._parts.group
        if group.kept.are_kept and group.kept.reached != group.kept.existing():
            group.kept.drop(but=group.kept.reached)
            self._graphs.give_up(_GRADIENTS_DIFFER)
        group.kept.forget_reached()

    def _update(self) -> None:
        """Update with a full group's gradients, by a graph of its own."""
        parts, group = self._parts, self._parts.group
        if self._graphs.why is not None:
            parts.run_update()
            return
        parts.update.write_rates()
        # By the gradients' addresses: a graph would neither use nor clear others.
        key = tuple(p.grad.data_ptr() if p.grad is not None else 0 for p in group.parameters())
        update = self._updates.find(key)
        if update is None:
            update = self._capture_update(key)
        if update is None:
            parts.run_update()
        else:
            group.begin_update()
            update.replay([])
            group.end_update()

    def _capture_update(self, key: Hashable) -> CapturedWork[None] | None:
        """Capture a full group's update. Returns None if it must run eagerly."""
        parts, guards = self._parts, self._graphs.guards
        assert guards is not None
        with guards.restoring_host_state() as undo:
            before = StateBeforeCapture(parts.state)
            try:
                update = self._updates.capture(key, (), lambda _: parts.update(parts.group))
                if before.optimizer_changed():
                    self._updates.drop(key)
                    return None
                guards.require_unchanged()
            except CaptureError as problem:
                self._graphs.give_up(describe_failure(problem))
                return None
            finally:
                before.restore()
            undo.pop_all()
        return update
