"""Training steps as graphs: forward, loss, backward, clipping and update, captured by shape.

A shape's first batches are launched one by one, and train as ever. The last two are watched: for
what no graph can repeat (a host wait, say), and for what differs between them, since a graph would
repeat what Python decided at capture. Then the step is captured, which runs nothing, and from that
batch on it is replayed, for as long as the Python values that it was captured with stay the same.
With accumulation the update is a graph of its own. A step that cannot be captured is launched one
by one, as if no graph had been asked for, and the log says why, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.data import Fetched, flatten_batch, host_rng_states, set_host_rng_states
from headrace.device import Device
from headrace.engine import graph_rules
from headrace.engine.compiled import CompiledLoss, loss_as
from headrace.engine.graph_cache import Captured, GraphCache, signature
from headrace.engine.graph_trial import TRIAL_STEPS, Trial
from headrace.engine.graph_values import FrozenValues
from headrace.engine.graph_watch import StepWatch
from headrace.engine.loss_parts import LossParts
from headrace.engine.stages import Finished, Launched
from headrace.engine.step import EagerStep, Parts
from headrace.engine.step_trace import Tracing, storages
from headrace.errors import CaptureError
from headrace.plan import Plan
from headrace.source_lines import line_of_error

log = logging.getLogger("headrace")

_DDP_WARM_UP = 11
_SOME_ONLY = "some parameters get gradients from some batches only"


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What became of a plan's graphs. `one_by_one` are batches whose kernels were launched one by
    one; `why` says why nothing is captured (any more), `decision` what `graphs="auto"` measured.
    Memory in bytes."""

    shapes: int
    captures: int
    evictions: int
    replays: int
    one_by_one: int
    memory_bytes: int
    why: str | None
    decision: str | None


class GraphedStep:
    """A step that replays a batch's graph, or launches it one by one where there is none. A batch
    that only keeps other ranks company is left to the `eager` step."""

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
                self._graphs.forget_unreached()
        return self._eager.finish()

    def recover(self, counted: tuple[int, int]) -> bool:
        return self._eager.recover(counted)


class StepGraphs:
    """The graphs of one training step under one plan; they stay from pass to pass."""

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self._parts, self._plan_name = parts, plan.name
        self._trial = Trial() if plan.graphs == "auto" else None
        # DDP arranges its buckets anew, and measures itself, in its first steps: after those, a
        # step is what it will be. A loss that is compiled, is so with its first batch.
        compiles = isinstance(parts.forward.loss, CompiledLoss)
        warm_up = (_DDP_WARM_UP if parts.spread == "ddp" else 0) + compiles
        self._watch_after = plan.graph_after + warm_up
        self._watch = StepWatch(max(self._watch_after - 1, 1 + compiles), self._watch_after)
        after = self._watch_after + (TRIAL_STEPS if self._trial is not None else 0)
        device = parts.device
        self._graphs: GraphCache[LossParts] = GraphCache(
            device, most=plan.graph_shapes, after=after
        )
        self._updates: GraphCache[None] = GraphCache(device, most=1, after=0)
        self._values = FrozenValues(parts)
        # With what graphs were captured: where memory lay, what must not be freed, and (with
        # accumulation) the parameters that each graph reaches.
        self._addresses: tuple[Hashable, ...] | None = None
        self._held: list[torch.Tensor] = []
        self._reached_by: dict[Hashable, frozenset[int]] = {}
        self._prepared: graph_rules.Prepared | None = None
        self._replays = self._one_by_one = 0
        self._why: str | None = None
        obstacle = graph_rules.why_not(parts)
        if obstacle is not None:
            self._give_up(obstacle)

    def train(self, fetched: Fetched) -> Launched:
        """Train on one batch, on the current stream."""
        batch = fetched.batch
        key = self._look(batch) if self._why is None else None
        captured = None if key is None else self._captured(key, batch)
        if key is None or captured is None:
            self._one_by_one += 1
            watched = key is not None and self._why is None and self._is_to_be_watched(key)
            return self._launch_watched(key, fetched) if watched else self._launch(key, fetched)
        self._replays += 1
        return self._replay(key, captured, fetched)

    def begin_epoch(self) -> None:
        """Graphs of memory that is not the model's or the optimizer's any more are dropped."""
        if self._why is not None:
            return
        obstacle = graph_rules.why_not(self._parts)
        if obstacle is not None:
            self._give_up(obstacle)
        elif self._addresses is not None and graph_rules.addresses(self._parts) != self._addresses:
            self._forget_graphs()
            self._values.look_anew()
            for parameter in self._parts.group.parameters():
                if not parameter.requires_grad:
                    parameter.grad = None  # one of zeros would still be updated, by its momentum

    def state_dict(self) -> dict[str, Any]:
        """What `graphs="auto"` has decided: measured anew, it might decide otherwise."""
        trial = self._trial
        return {
            "pays": None if trial is None else trial.pays,
            "decision": None if trial is None else trial.decision,
            "prepared": self._prepared is not None,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Also: the optimizer has another state, and the settings that came with it."""
        group, trial = self._parts.group, self._trial
        self._drop_graphs()
        group.reached = self._with_gradients() if group.is_open else set()
        # An optimizer that had been made capturable goes on as one, as all did in older states.
        if state is not None and state.get("prepared", self._why is None):
            self._prepared = graph_rules.Prepared(self._parts)
        elif self._prepared is not None:
            self._prepared, self._parts.update.rates = None, None
        if trial is None or state is None or self._why is not None:
            return
        if state["pays"] is not None:
            trial.pays, trial.decision = state["pays"], state["decision"]
            self._follow(trial)

    def report(self) -> GraphReport:
        return GraphReport(
            shapes=len(self._graphs),
            captures=self._graphs.captures,
            evictions=self._graphs.evictions,
            replays=self._replays,
            one_by_one=self._one_by_one,
            memory_bytes=self._graphs.memory_bytes + self._updates.memory_bytes,
            why=self._why,
            decision=None if self._trial is None else self._trial.decision,
        )

    def close(self) -> None:
        """Let go of all graphs. Steps go on, one by one at first."""
        self._drop_graphs()

    # --- one batch --------------------------------------------------------------------------------

    def _look(self, batch: Any) -> Hashable | None:
        """Before a batch: the key of its graph; None if there is to be none. Graphs that were
        captured with other values are dropped."""
        try:
            if self._prepared is not None and self._prepared.is_undone:
                self._forget_graphs()
                self._prepared = graph_rules.Prepared(self._parts)
            if self._values.look():
                self._forget_graphs()
            return signature(batch)
        except CaptureError as problem:
            self._give_up(_told(problem))
            return None

    def _captured(self, key: Hashable, batch: Any) -> Captured[LossParts] | None:
        """The graph for this batch, made now if it is due."""
        captured = self._graphs.find(key)
        if captured is not None or not self._is_due(key):
            return captured
        try:
            return self._capture(key, batch)  # None: not yet
        except CaptureError as problem:
            self._give_up(_told(problem))
            return None

    def _is_due(self, key: Hashable) -> bool:
        agreed = self._watch.has_agreed(hash(key))
        return agreed and self._graphs.is_due(key) and self._parts.group.updates > 0

    def _is_to_be_watched(self, key: Hashable) -> bool:
        return self._watch.wants(hash(key), self._graphs.uses(key))

    def _launch(
        self, key: Hashable | None, fetched: Fetched, tracing: Tracing | None = None
    ) -> Launched:
        parts, traced = self._parts, tracing or nullcontext()
        group = parts.group
        with self._timed(key, replay=False):
            averages = group.averages(ends_epoch=fetched.ends_epoch)
            with traced:
                loss = parts.forward(fetched.batch, averages=averages)
            if tracing is not None:
                tracing.forward_ends(loss.numbers())
            loss = loss.unaliased()
            parts.begin()
            group.gathering()
            with self._noting_reached() if group.keeps_gradients else nullcontext(), traced:
                parts.gather(loss)
            group.gathered()
            if updated := group.is_full:
                self.forget_unreached()
                parts.use()
        return parts.launched(fetched, loss, updated=updated)

    def _launch_watched(self, key: Hashable, fetched: Fetched) -> Launched:
        """Train on a batch, and look for what a graph could not repeat."""
        device = self._parts.device
        tracing = Tracing(device, until=StepGraphs._launch.__code__)
        known = storages([*self._known(), *flatten_batch(fetched.batch)])
        with loss_as(self._parts.forward.loss, "plain"), device.watch() as obstacles:
            launched = self._launch(key, fetched, tracing)
        is_first = self._graphs.uses(key) == 1
        if obstacles:
            why = None if is_first else "; ".join(dict.fromkeys(map(str, obstacles[:3])))
        else:
            known |= storages(self._known())
            why = self._watch.learn(hash(key), tracing.trace, known, first=is_first)
        if why is not None:
            self._give_up(why)
        return launched

    def _known(self) -> list[torch.Tensor]:
        """Tensors that a step may read: they stay where they are, or it is noticed."""
        parts = self._parts
        found = [*graph_rules.tensors_of(parts), *parts.own_tensors()]
        for parameter in (*parts.model.parameters(), *parts.group.parameters()):
            if parameter.grad is not None:
                found.append(parameter.grad)
        return found + self._values.tensors()

    def _replay(self, key: Hashable, captured: Captured[LossParts], fetched: Fetched) -> Launched:
        parts, group = self._parts, self._parts.group
        with self._timed(key, replay=True):
            parts.begin()
            parts.update.write_rates()
            group.updating() if group.size == 1 else group.gathering()
            loss = captured.replay(flatten_batch(fetched.batch))
            if group.size == 1:
                updated = True
                group.gathered_and_used()
            else:
                group.gathered()
                group.reached |= self._reached_by[key]
                if updated := group.is_full:
                    self.forget_unreached()
                    self._update()
            launched = parts.launched(fetched, loss, updated=updated, replayed=True)
        if self._trial is not None and self._trial.is_over():
            log.info("plan %s: %s", self._plan_name, self._trial.decide())
            self._follow(self._trial)
        return launched

    def _update(self) -> None:
        """The update at the end of a group, a graph of its own."""
        parts, group = self._parts, self._parts.group
        if self._why is not None:
            parts.use()
            return
        parts.update.write_rates()
        # Gradients that this graph knows nothing of would be neither used nor cleared.
        key = tuple(p.grad.data_ptr() if p.grad is not None else 0 for p in group.parameters())
        update = self._updates.find(key)
        if update is None:
            kept = graph_rules.Kept(parts)
            try:
                update = self._updates.capture(key, (), lambda _: parts.update(group))
                if kept.state_changed():
                    self._updates.drop(key)
                    update = None
            except CaptureError as problem:
                self._give_up(_told(problem))
            finally:
                kept.restore()
        if update is None:
            parts.use()
        else:
            group.updating()
            update.replay([])
            group.used()

    # --- capture ----------------------------------------------------------------------------------

    def _capture(self, key: Hashable, batch: Any) -> Captured[LossParts] | None:
        """A graph of the step on this batch; None if the step first has to run as it is, because
        it would make something that stays, such as the optimizer's state of a parameter."""
        parts, group = self._parts, self._parts.group
        obstacle = graph_rules.why_not(parts)
        if obstacle is not None:
            raise CaptureError(obstacle)
        if group.size > 1 and not self._gradients_are_kept():
            return None
        with self._preparing() as succeeded:
            kept = graph_rules.Kept(parts)
            try:
                captured = self._graphs.capture(key, batch, self._device_part)
                replaced = kept.replaced()
                if replaced is not None:
                    raise CaptureError(
                        f"the model replaces {replaced} in its forward, and a graph would go on "
                        "with the old one: write to it in place"
                    )
                if kept.state_changed():
                    self._graphs.drop(key)
                    return None
                if group.keeps_gradients and (
                    kept.gradients_changed() or group.reached != self._with_gradients()
                ):
                    raise CaptureError(_SOME_ONLY)
                self._reached_by[key] = frozenset(group.reached)
            finally:
                kept.restore()
                group.reached.clear()
            self._values.require_unchanged()
            succeeded()
        self._addresses = graph_rules.addresses(parts)
        self._values.captured()
        # A graph must not outlive its memory.
        self._held += [*self._known(), *self._watch.read_by(hash(key))]
        return captured

    @contextmanager
    def _preparing(self) -> Iterator[Callable[[], None]]:
        """Inside the block the step can be captured. Unless what is yielded is called, all is then
        as before: the optimizer, the host's random generators, and what the loss function keeps."""
        drawn_from, succeeded = host_rng_states(), []
        prepared = graph_rules.Prepared(self._parts) if self._prepared is None else None
        self._parts.update.write_rates()
        try:
            yield lambda: succeeded.append(True)
        finally:
            if succeeded:
                self._prepared = self._prepared or prepared
            else:
                set_host_rng_states(drawn_from)
                self._values.put_back()
                if prepared is not None:
                    prepared.undo()

    def _device_part(self, batch: Any) -> LossParts:
        """What a graph repeats: all of a step, or with accumulation all but the update."""
        parts, group = self._parts, self._parts.group
        with loss_as(parts.forward.loss, "compiled"):
            loss = parts.forward(batch)
        # As they are now: a metric may be a view of a weight, which the update changes.
        values = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in loss.values.items()
        }
        if group.size == 1:
            parts.gather(loss)
            parts.update(group)
        else:
            with self._noting_reached():
                parts.gather(loss)
        return replace(loss, loss=loss.loss.detach(), values=values)

    # --- accumulation: gradients that keep their memory -------------------------------------------

    def _gradients_are_kept(self) -> bool:
        """Whether a group is about to begin with all its gradients in place, at zero."""
        group, state = self._parts.group, self._parts.optimizer.state
        if group.is_open:
            return False
        if not group.keeps_gradients:
            group.keeps_gradients = True  # from this group on: it makes them
            group.reached.clear()
            return False
        return not any(
            p.grad is None and p.requires_grad and state.get(p) for p in group.parameters()
        )

    def forget_unreached(self) -> None:
        """Before an update: a gradient that is kept cannot say that no batch has reached it. Where
        that happens, none are kept any more."""
        group = self._parts.group
        if group.keeps_gradients and group.reached != self._with_gradients():
            graph_rules.forget_gradients(self._parts, keep=group.reached)
            self._give_up(_SOME_ONLY)
        group.reached.clear()

    def _with_gradients(self) -> set[int]:
        return {id(p) for p in self._parts.group.parameters() if p.grad is not None}

    @contextmanager
    def _noting_reached(self) -> Iterator[None]:
        """Note the parameters that backward gives a gradient: which, must not depend on the batch,
        since a gradient that is kept cannot say that there was none."""
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
        """From now on, one by one."""
        self._why = why
        self._drop_graphs()
        graph_rules.release(self._parts)
        say_uncaptured(self._parts.device, self._plan_name, why)

    def _forget_graphs(self) -> None:
        """Drop all graphs, and watch each shape anew."""
        self._drop_graphs()
        self._watch.forget()

    def _drop_graphs(self) -> None:
        self._graphs.close()
        self._updates.close()
        self._values.drop_graphs()
        self._addresses = None
        self._held = []
        self._reached_by.clear()

    # --- graphs="auto" ----------------------------------------------------------------------------

    @contextmanager
    def _timed(self, key: Hashable | None, *, replay: bool) -> Iterator[None]:
        """Time the step in the block, alone on the device, if the trial still wants it."""
        trial, device = self._trial, self._parts.device
        if trial is None or key is None or self._why is not None:
            yield
            return
        warmed_up = replay or self._graphs.uses(key) > self._watch_after
        if not warmed_up or not trial.takes(key, replay):
            yield
            return
        device.synchronize("auto_graphs")
        start = device.ledger.now_ns()
        yield
        launched = device.ledger.now_ns()
        device.synchronize("auto_graphs")
        trial.add(key, replay, launched - start, device.ledger.now_ns() - start)

    def _follow(self, trial: Trial) -> None:
        if not trial.pays:
            self._why = trial.decision
            self._drop_graphs()
            graph_rules.release(self._parts)


def say_uncaptured(device: Device, plan_name: str, why: str) -> None:
    """Log once why a plan's step does not run as a graph."""
    device.say_once(
        f"graphs: {why}",
        "plan %s: the step's kernels are launched one by one, not as a graph: %s",
        plan_name,
        why,
    )


def _told(problem: CaptureError) -> str:
    """A failed capture in words: what was raised, and on which line of the user's."""
    cause = problem.__cause__
    if cause is None:
        return str(problem)
    text = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
    site = line_of_error(cause.__traceback__)
    return f"{type(cause).__name__}: {text}" + ("" if site is None else f", at {site}")
