"""The engine's training step, as a `CapturedFunction` sees it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from headrace.capture import (
    Capturable,
    CapturableOptimizer,
    CapturedFunction,
    CapturedWork,
    CaptureSettings,
    GraphCache,
    StateBeforeCapture,
    StepState,
    StepTracer,
    map_tensors,
)
from headrace.data import Fetched
from headrace.engine.graphs.fixed_gradients import FixedGradients
from headrace.engine.graphs.graph_obstacles import capture_obstacle
from headrace.engine.graphs.graph_state import release_graph_state, tensors_of
from headrace.engine.graphs.update_graph import ReachedGradients, UpdateGraph
from headrace.engine.loss.compiled import CompiledLoss, loss_mode
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Launched
from headrace.engine.step.eager import EagerStep
from headrace.engine.step.parts import StepParts
from headrace.plan import Plan

# In its first steps DDP rebuilds its buckets and measures itself.
_DDP_WARM_UP_STEPS = 11


class Training(NamedTuple):
    """A batch to train on, and the step that does so eagerly."""

    fetched: Fetched
    eager: EagerStep


class StepWork(Capturable[Training, LossOutput, Launched]):
    """What is captured of one training step under one plan, and its `graphs`."""

    def __init__(self, parts: StepParts, plan: Plan) -> None:
        self._parts = parts
        # Watch only after the warm-up, when steps are like those to come. The first batch compiles.
        compiles = isinstance(parts.forward.loss, CompiledLoss)
        warm_up = (_DDP_WARM_UP_STEPS if parts.parallelism == "ddp" else 0) + compiles
        watch_after = plan.graph_after + warm_up
        self.graphs: CapturedFunction[Training, LossOutput, Launched] = CapturedFunction(
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
        self._update = UpdateGraph(parts, self.graphs)
        self._fixed = FixedGradients()
        self._reached = ReachedGradients(parts)
        self._eager: EagerStep | None = None  # of the last batch

    def begin(self, eager: EagerStep) -> None:
        self._eager = eager  # which a capture records

    def tree(self, call: Training) -> Any:
        return call.fetched.batch

    def find_state(self) -> StepState:
        return self._parts.state

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
        return self._fixed.replaced()

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
            self._reached.note_replay(key)
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
            self._reached.recorded()

    def check(self, key: Hashable, before: StateBeforeCapture) -> None:
        self._reached.check(key, before)

    def keep(self, captured: CapturedWork[LossOutput], key: Hashable) -> None:
        group = self._parts.group
        own = set() if group.kept.are_kept else {id(p) for p in group.parameters()}
        guards = self.graphs.guards
        state = self._parts.state if guards is None else guards.state
        self._fixed.keep(p for p in state.parameters() if id(p) not in own)

    def dropped(self) -> None:
        self._update.cache.close()
        self._fixed.keep(())
        self._reached.clear()

    def given_up(self) -> None:
        release_graph_state(self._parts)

    @property
    def update_cache(self) -> GraphCache[None]:
        """The graph of a full group's update."""
        return self._update.cache

    def drop_unreached_gradients(self) -> None:
        """Call before an update: drop gradients that no batch of the group has written, and stop
        capturing if there are some."""
        why = self._reached.drop_others()
        if why is not None:
            self.graphs.give_up(why)
