"""Training steps as graphs: forward, loss, backward, clipping and update, captured for each shape.

The first batches of a shape run eagerly and train as usual. The last two of them are watched, for
what no graph can repeat (a host wait, say) and for differences between them: a graph would repeat
what Python decided at capture. Then the step is captured, which runs nothing. From that batch on it
is replayed, as long as the Python values that it was captured with stay the same. With accumulation
the update is a graph of its own. A step that cannot be captured runs eagerly, and the log says why,
once.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from headrace.capture import (
    GRADIENTS_REPLACED,
    MEMORY_MOVES,
    CapturableOptimizer,
    CapturedWork,
    FrozenValues,
    GraphCache,
    GraphReport,
    StateBeforeCapture,
    StateMemory,
    StepTracer,
    StepWatch,
    describe_failure,
    join_reasons,
    log_rounding,
    map_tensors,
    settings_of_pytorch,
    signature,
    storages,
    warn_not_captured,
)
from headrace.data import Fetched, flatten_batch
from headrace.engine.compiled import CompiledLoss, loss_mode
from headrace.engine.graph_obstacles import capture_obstacle
from headrace.engine.graph_state import drop_gradients, release_graph_state, tensors_of
from headrace.engine.graph_timing import TIMED_STEPS, GraphTiming
from headrace.engine.loss_output import LossOutput
from headrace.engine.stages import Finished, Launched, Standing
from headrace.engine.step import EagerStep, StepParts
from headrace.errors import CaptureError
from headrace.plan import Plan

log = logging.getLogger("headrace")

_GRADIENT = operator.attrgetter("grad")
# In its first steps DDP rebuilds its buckets and measures itself.
_DDP_WARM_UP_STEPS = 11
_GRADIENTS_DIFFER = (
    "some parameters get a gradient from some batches only, and with accumulation a graph needs "
    "the same ones each time: use every parameter for every batch, or accumulate = 1"
)


class GraphedStep:
    """A step that replays the graph of a batch's shape, or runs eagerly if there is none.
    Weightless batches, which only keep the ranks in step, go to the `eager` step."""

    def __init__(self, eager: EagerStep, graphs: StepGraphs) -> None:
        self._eager, self._graphs = eager, graphs

    def __call__(self, fetched: Fetched) -> Launched:
        if fetched.weightless:
            return self._eager(fetched)
        lanes = self._eager.lanes
        with lanes.on(lanes.forward, "step"):
            return self._graphs.train(fetched)

    def finish(self) -> Finished | None:
        if self._eager.parts.group.is_open:
            lanes = self._eager.lanes
            with lanes.on(lanes.backward):
                self._graphs.drop_unreached_gradients()
        return self._eager.finish()

    def recover(self, counted: Standing) -> bool:
        return self._eager.recover(counted)


class StepGraphs:
    """The graphs of one training step under one plan. They stay from pass to pass."""

    def __init__(self, parts: StepParts, plan: Plan) -> None:
        self._parts, self._plan_name = parts, plan.name
        self._timing = GraphTiming() if plan.graphs == "auto" else None
        # Watch only after the warm-up, when steps are like those to come. The first batch compiles.
        compiles = isinstance(parts.forward.loss, CompiledLoss)
        warm_up = (_DDP_WARM_UP_STEPS if parts.parallelism == "ddp" else 0) + compiles
        self._watch_after = plan.graph_after + warm_up
        self._watch = StepWatch(max(self._watch_after - 1, 1 + compiles), self._watch_after)
        after = self._watch_after + (TIMED_STEPS if self._timing is not None else 0)
        device = parts.device
        self._graphs: GraphCache[LossOutput] = GraphCache(
            device, max_graphs=plan.graph_shapes, capture_after=after
        )
        self._updates: GraphCache[None] = GraphCache(device, max_graphs=1, capture_after=0)
        self._values = FrozenValues(parts.state, self._more_settings)
        self._pytorch = settings_of_pytorch(device)
        # Parameters whose gradients only the user replaces, and those gradients at capture: of
        # parameters that the optimizer does not have, and with accumulation of all.
        self._with_fixed_gradients: list[torch.Tensor] = []
        self._fixed_gradients: list[torch.Tensor | None] = []
        # Of the captured graphs: the memory they use, and with accumulation the parameters (by
        # `id`) to which each graph gives a gradient.
        self._memory: StateMemory | None = None
        self._reached_by: dict[Hashable, frozenset[int]] = {}
        self._capturable: CapturableOptimizer | None = None
        self._replays = self._one_by_one = 0
        self._was_new_shape = False
        self._why_eager: str | None = None
        obstacle = capture_obstacle(parts)
        if obstacle is not None:
            self._give_up(obstacle)

    def train(self, fetched: Fetched) -> Launched:
        """Train on one batch, on the current stream."""
        batch = fetched.batch
        key = self._key_for(batch) if self._why_eager is None else None
        captured = None if key is None else self._graph_for(key, batch)
        if key is not None and captured is not None:
            self._was_new_shape, leaves = False, flatten_batch(batch)
            if captured.suits(leaves):
                self._replays += 1
                return self._replay(key, captured, fetched, leaves)
        self._was_new_shape = key is not None and self._graphs.uses(key) == 1
        self._one_by_one += 1
        watched = key is not None and self._why_eager is None and self._should_watch(key)
        return self._run_watched(key, fetched) if watched else self._run_eagerly(key, fetched)

    def state_dict(self) -> dict[str, Any]:
        """What `graphs="auto"` has decided, since measuring again might decide otherwise, and
        whether the optimizer was made capturable (`prepared`)."""
        timing = self._timing
        return {
            "pays": None if timing is None else timing.pays,
            "decision": None if timing is None else timing.decision,
            "prepared": self._capturable is not None,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the decision, and drop all graphs: the optimizer has another state by now."""
        group, timing = self._parts.group, self._timing
        self._drop_graphs_and_rewatch()
        group.reached = self._with_gradients() if group.is_open else set()
        # An optimizer that was capturable stays so. In older states, without "prepared", all were.
        if state is not None and state.get("prepared", self._why_eager is None):
            self._make_capturable()
        elif self._capturable is not None:
            self._capturable, self._parts.update.rates = None, None
        if timing is None or state is None or self._why_eager is not None:
            return
        if state["pays"] is not None:
            timing.pays, timing.decision = state["pays"], state["decision"]
            self._apply(timing)

    def report(self) -> GraphReport:
        return GraphReport(
            shapes=len(self._graphs),
            captures=self._graphs.captures,
            evictions=self._graphs.evictions,
            replays=self._replays,
            one_by_one=self._one_by_one,
            memory_bytes=self._graphs.memory_bytes + self._updates.memory_bytes,
            why=self._why_eager,
            decision=None if self._timing is None else self._timing.decision,
            rounding=join_reasons(
                self._watch.rounding,
                None if self._capturable is None else self._capturable.rounding,
            ),
            seconds=self._graphs.seconds + self._updates.seconds,
        )

    def close(self) -> None:
        """Drop all graphs. Shapes are watched and captured again when they are due."""
        self._drop_graphs_and_rewatch()

    # --- one batch --------------------------------------------------------------------------------

    def _key_for(self, batch: Any) -> Hashable | None:
        """The key of a batch's graph; None if the step cannot be captured. Drops graphs that were
        captured with other values."""
        try:
            if self._capturable is not None and self._capturable.was_reset:
                self._drop_graphs_and_rewatch()
                self._make_capturable()
            # If the user has replaced a gradient, a graph would write to the old tensor.
            now = map(_GRADIENT, self._with_fixed_gradients)
            are_replaced = not all(map(operator.is_, now, self._fixed_gradients))
            replaced = GRADIENTS_REPLACED if are_replaced else None
            if self._has_moved():
                self._follow_memory()
                replaced = MEMORY_MOVES
            if self._values.check(replaced, after_new_shape=self._was_new_shape):
                self._drop_graphs_and_rewatch()
            carry, settings = self._parts.carry, tuple(map(operator.call, self._pytorch))
            if carry is None:
                return (signature(batch, self._parts.device), settings)
            carry.before(batch)  # now the state is in the memory that a graph would read
            return (signature(batch, self._parts.device), settings, carry.key())
        except CaptureError as problem:
            self._give_up(describe_failure(problem))
            return None

    def _has_moved(self) -> bool:
        """Whether the step uses other memory than graphs do, or has got other modules since its
        values were searched for."""
        return self._values.modules_changed() if self._memory is None else self._memory.has_moved()

    def _follow_memory(self) -> None:
        """Drop graphs whose memory is no longer the model's or the optimizer's."""
        self._drop_graphs_and_rewatch()
        self._values.find_again()
        group = self._parts.group
        for parameter in () if group.is_open else group.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # momentum would update it even with a gradient of zeros

    def _graph_for(self, key: Hashable, batch: Any) -> CapturedWork[LossOutput] | None:
        """The graph for this batch, captured now if it is due; None: run it eagerly."""
        captured = self._graphs.find(key)
        if captured is not None or not self._is_due(key):
            return captured
        try:
            return self._capture(key, batch)
        except CaptureError as problem:
            self._give_up(describe_failure(problem))
            return None

    def _is_due(self, key: Hashable) -> bool:
        agreed = self._watch.has_agreed(key)
        return agreed and self._graphs.is_due(key) and self._parts.group.updates > 0

    def _should_watch(self, key: Hashable) -> bool:
        return self._watch.wants(key, self._graphs.uses(key))

    def _run_eagerly(
        self, key: Hashable | None, fetched: Fetched, tracer: StepTracer | None = None
    ) -> Launched:
        parts, traced = self._parts, tracer or nullcontext()
        group = parts.group
        with self._timed(key, replay=False):
            averages = group.decide_averaging(ends_epoch=fetched.ends_epoch)
            with traced:
                loss = parts.forward(fetched.batch, averages=averages)
            if tracer is not None:
                tracer.forward_ends(loss.numbers())
            loss = loss.unaliased()
            parts.begin_batch()
            group.begin_backward()
            with self._recording_reached() if group.keeps_gradients else nullcontext(), traced:
                parts.backward(loss)
            group.end_backward()
            if updated := group.is_full:
                self.drop_unreached_gradients()
                parts.run_update()
            parts.keep_carried(loss)
        return parts.make_launched(fetched, loss, updated=updated)

    def _run_watched(self, key: Hashable, fetched: Fetched) -> Launched:
        """Train on a batch eagerly, and look for what no graph could repeat."""
        device = self._parts.device
        tracer = StepTracer(
            device, StepGraphs._run_eagerly.__code__, as_captured=self._watch.as_captured
        )
        known = storages([*self._known_tensors(), *flatten_batch(fetched.batch)])
        with loss_mode(self._parts.forward.loss, "plain"), device.watch() as obstacles:
            launched = self._run_eagerly(key, fetched, tracer)
        is_first = self._graphs.uses(key) == 1
        known |= storages(self._known_tensors())
        why = self._watch.learn(key, tracer.trace, obstacles, known, first=is_first)
        if why is not None:
            self._give_up(why)
        return launched

    def _known_tensors(self) -> list[torch.Tensor]:
        """Tensors that a step may read, since other checks notice if one is replaced."""
        parts = self._parts
        found = [*tensors_of(parts), *parts.own_tensors()]
        for parameter in (*parts.model.parameters(), *parts.group.parameters()):
            if parameter.grad is not None:
                found.append(parameter.grad)
        return found + self._values.tensors()

    def _replay(
        self,
        key: Hashable,
        captured: CapturedWork[LossOutput],
        fetched: Fetched,
        leaves: list[torch.Tensor],
    ) -> Launched:
        parts, group = self._parts, self._parts.group
        with self._timed(key, replay=True):
            parts.begin_batch()
            parts.update.write_rates()
            group.begin_update() if group.size == 1 else group.begin_backward()
            loss = captured.replay(leaves)
            if group.size == 1:
                updated = True
                group.end_step()
            else:
                group.end_backward()
                group.reached |= self._reached_by[key]
                if updated := group.is_full:
                    self.drop_unreached_gradients()
                    self._update()
            if parts.carry is not None:
                parts.carry.hold(loss.carried)
            if loss.outputs is not None:  # the next replay overwrites them
                loss = replace(loss, outputs=map_tensors(torch.clone, loss.outputs))
            launched = parts.make_launched(fetched, loss, updated=updated, replayed=True)
        if self._timing is not None and self._timing.is_complete():
            log.info("plan %s: %s", self._plan_name, self._timing.decide())
            self._apply(self._timing)
        return launched

    def _update(self) -> None:
        """Update with a full group's gradients, by a graph of its own."""
        parts, group = self._parts, self._parts.group
        if self._why_eager is not None:
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

    # --- capture ----------------------------------------------------------------------------------

    def _capture_update(self, key: Hashable) -> CapturedWork[None] | None:
        """Capture a full group's update. Returns None if it must run eagerly."""
        parts = self._parts
        with self._values.restoring_host_state() as undo:
            before = StateBeforeCapture(parts.state)
            try:
                update = self._updates.capture(key, (), lambda _: parts.update(parts.group))
                if before.optimizer_changed():
                    self._updates.drop(key)
                    return None
                self._values.require_unchanged()
            except CaptureError as problem:
                self._give_up(describe_failure(problem))
                return None
            finally:
                before.restore()
            undo.pop_all()
        return update

    def _capture(self, key: Hashable, batch: Any) -> CapturedWork[LossOutput] | None:
        """Capture the step on this batch. Returns None if it must run eagerly once more, because it
        creates something that stays, such as the optimizer's state of a parameter."""
        parts, group = self._parts, self._parts.group
        obstacle = capture_obstacle(parts)
        if obstacle is not None:
            raise CaptureError(obstacle)
        if group.size > 1 and not self._gradients_in_place():
            return None
        with self._ready_for_capture() as undo:
            before = StateBeforeCapture(self._values.state, self._values.tensors())
            try:
                captured = self._graphs.capture(
                    key,
                    batch,
                    self._work_to_capture,
                    self._known_tensors(),
                    parts.state.updated(),
                )
                before.require_in_place()
                if before.optimizer_changed():
                    self._graphs.drop(key)
                    return None
                if group.keeps_gradients and (
                    before.gradients_changed() or group.reached != self._with_gradients()
                ):
                    raise CaptureError(_GRADIENTS_DIFFER)
                self._reached_by[key] = frozenset(group.reached)
            finally:
                before.restore()
                group.reached.clear()
            self._values.require_unchanged()
            undo.pop_all()
        if self._graphs.captures == 1:
            log_rounding(self._plan_name, self.report().rounding)
        self._memory = StateMemory(
            self._values.state, (*tensors_of(parts), *self._values.tensors())
        )
        self._values.note_capture()
        own = set() if group.keeps_gradients else {id(p) for p in group.parameters()}
        self._with_fixed_gradients = [
            p for p in self._values.state.parameters() if p.grad is not None and id(p) not in own
        ]
        self._fixed_gradients = list(map(_GRADIENT, self._with_fixed_gradients))
        captured.uses = [*self._known_tensors(), *self._watch.read_by(key)]
        return captured

    def _ready_for_capture(self) -> ExitStack:
        """Make the optimizer capturable. The end of the returned context undoes this and what a
        capture has changed on the host; after a success, `pop_all()` keeps it."""
        undo = self._values.restoring_host_state()
        if self._capturable is None:
            self._make_capturable()
            undo.callback(self._make_plain)
        self._parts.update.write_rates()
        return undo

    def _make_capturable(self) -> None:
        """Make the optimizer capturable, and let updates read its learning rates on the device."""
        self._capturable = CapturableOptimizer(self._parts.device, self._parts.optimizer)
        self._parts.update.rates = self._capturable.rates

    def _make_plain(self) -> None:
        if self._capturable is not None:
            self._capturable.undo()
        self._capturable = self._parts.update.rates = None

    def _more_settings(self) -> tuple[tuple[str, Any], ...]:
        """What a graph of the engine's step freezes besides the optimizer's settings."""
        update = self._parts.update
        clip_norm = None if update.clipping is None else update.clipping.max_norm
        decay = None if update.ema is None else update.ema.decay
        return ("clip_norm", clip_norm), ("ema_decay", decay)

    def _work_to_capture(self, batch: Any) -> LossOutput:
        """What a graph repeats: the whole step, or with accumulation all but the update."""
        parts, group = self._parts, self._parts.group
        with loss_mode(parts.forward.loss, "compiled"):
            loss = parts.forward(batch)
        # A copy: a metric may be a view of a weight, which the update changes.
        result = loss.detached_copy()
        if group.size == 1:
            parts.backward(loss)
            parts.update(group)
        else:
            with self._recording_reached():
                parts.backward(loss)
        if parts.carry is None:
            return result
        return replace(result, carried=parts.carry.write(loss.carried, capturing=True))

    # --- accumulation: gradients that keep their memory -------------------------------------------

    def _gradients_in_place(self) -> bool:
        """Whether a group is about to begin and all its gradients exist, as zeros in memory that
        stays. The first call asks the group to keep that memory from now on."""
        group, state = self._parts.group, self._parts.optimizer.state
        if group.is_open:
            return False
        if not group.keeps_gradients:
            group.keeps_gradients = True  # this group's batches allocate it
            group.reached.clear()
            return False
        return not any(
            p.grad is None and p.requires_grad and state.get(p) for p in group.parameters()
        )

    def drop_unreached_gradients(self) -> None:
        """Call before an update. A gradient that keeps its memory is zero, not None, if no batch of
        the group has reached its parameter. If so, drop it and stop capturing."""
        group = self._parts.group
        if group.keeps_gradients and group.reached != self._with_gradients():
            drop_gradients(self._parts, keep=group.reached)
            self._give_up(_GRADIENTS_DIFFER)
        group.reached.clear()

    def _with_gradients(self) -> set[int]:
        return {id(p) for p in self._parts.group.parameters() if p.grad is not None}

    @contextmanager
    def _recording_reached(self) -> Iterator[None]:
        """Inside the block, `group.reached` collects the parameters to which backward gives a
        gradient."""
        group = self._parts.group
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: group.reached.add(id(p)))
            for p in group.parameters()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # --- when graphs are dropped ------------------------------------------------------------------

    def _give_up(self, why: str) -> None:
        """Stop capturing for good: run all further batches eagerly, and log why."""
        self._why_eager = why
        self._drop_graphs_and_rewatch()
        self._values.find_again()  # frees what it had found
        release_graph_state(self._parts)
        warn_not_captured(self._parts.device, self._plan_name, why)

    def _drop_graphs_and_rewatch(self) -> None:
        """Drop all graphs. Each shape is watched again before its next capture."""
        self._drop_graphs()
        self._watch.forget()

    def _drop_graphs(self) -> None:
        self._graphs.close()
        self._updates.close()
        self._with_fixed_gradients, self._fixed_gradients = [], []
        self._memory = None
        self._reached_by.clear()

    # --- graphs="auto" ----------------------------------------------------------------------------

    @contextmanager
    def _timed(self, key: Hashable | None, *, replay: bool) -> Iterator[None]:
        """Time the step in the block, alone on the device, if the decision still needs it."""
        timing, device = self._timing, self._parts.device
        if timing is None or key is None or self._why_eager is not None:
            yield
            return
        warmed_up = replay or self._graphs.uses(key) > self._watch_after
        if not warmed_up or not timing.wants(key, replay):
            yield
            return
        device.synchronize("auto_graphs")
        start = device.ledger.now_ns()
        yield
        launched = device.ledger.now_ns()
        device.synchronize("auto_graphs")
        timing.add(key, replay, launched - start, device.ledger.now_ns() - start)

    def _apply(self, timing: GraphTiming) -> None:
        """Give graphs up if they do not pay."""
        if not timing.pays:
            self._why_eager = timing.decision
            self._drop_graphs()
            release_graph_state(self._parts)
