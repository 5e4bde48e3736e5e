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
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.data import flatten_batch, host_states, set_host_states
from headrace.engine import graph_rules
from headrace.engine.compiled import CompiledLoss, loss_as, loss_of
from headrace.engine.graph_cache import Captured, GraphCache, signature
from headrace.engine.graph_trial import TRIAL_STEPS, Trial
from headrace.engine.loss_parts import LossParts
from headrace.engine.python_state import PythonState
from headrace.engine.step import TrainingStep
from headrace.engine.step_trace import StepTrace, Storage, Tracing, storages
from headrace.errors import CaptureError
from headrace.parallel import bare
from headrace.plan import Plan
from headrace.source_lines import line_of_error

log = logging.getLogger("headrace")
Report = Callable[[LossParts], None]

# Settings that change oftener than every so many batches leave a graph no use.
_STEADY_BATCHES = 10
_MOST_CHANGES = 3
_DDP_WARM_UP = 11
# Two batches of a shape in a row must do the same: so many are compared before it is given up.
_MOST_WATCHED = 6
# A batch's operations take memory to remember: shapes of which one batch was watched so far.
_MOST_REMEMBERED = 8
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
    """Trains on a batch by replaying its shape's graph, or one by one where there is none."""

    def __init__(self, step: TrainingStep, plan: Plan) -> None:
        self._step = step
        self._device = step.device
        self._plan = plan
        self._trial = Trial() if plan.graphs == "auto" else None
        # DDP arranges its buckets anew, and measures itself, in its first steps: after those, a
        # step is what it will be. A loss that is compiled, is so with its first batch.
        compiles = isinstance(step.loss, CompiledLoss)
        warm_up = (_DDP_WARM_UP if step.spread == "ddp" else 0) + compiles
        self._watch_after = plan.graph_after + warm_up
        self._watch_from = max(self._watch_after - 1, 1 + compiles)
        after = self._watch_after + (TRIAL_STEPS if self._trial is not None else 0)
        self._graphs: GraphCache[LossParts] = GraphCache(
            self._device, most=plan.graph_shapes, after=after
        )
        self._updates: GraphCache[None] = GraphCache(self._device, most=1, after=0)
        self._settings: tuple[Hashable, ...] | None = None
        self._addresses: tuple[Hashable, ...] | None = None
        self._held: list[torch.Tensor] = []
        self._reached_by: dict[Hashable, frozenset[int]] = {}  # parameters each graph reaches
        self._since_change = self._changes = 0
        self._replays = self._one_by_one = 0
        self._key: Hashable = None
        # What the loss function can read besides the batch, and what its last runs computed.
        self._python: PythonState | None = None
        self._traces: dict[int, StepTrace] = {}  # by a shape's hash
        self._differences: Counter[int] = Counter()
        # Shapes of which two batches did the same, and what else they read.
        self._agreed: dict[int, list[torch.Tensor]] = {}
        self._made: set[Storage] = set()
        # Gradients that nobody clears, of parameters that the optimizer does not have.
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._prepared: graph_rules.Prepared | None = None
        self._decision: str | None = None
        self._why: str | None = None
        step.before_last_update = self._forget_unreached
        obstacle = graph_rules.why_not(step)
        if obstacle is not None:
            self._give_up(obstacle)

    def train(self, batch: Any, report: Report) -> bool:
        """Train on one batch, on the current stream. Whether it was a replay."""
        captured = self._captured(batch) if self._why is None else None
        if captured is not None:
            self._replays += 1
            self._replay(captured, batch, report)
            return True
        self._one_by_one += 1
        if self._why is None and self._is_to_be_watched():
            self._watch(batch, report)
        else:
            self._launch(batch, report)
        return False

    def begin_epoch(self) -> None:
        """Graphs of memory that is not the model's or the optimizer's any more are dropped."""
        if self._why is not None:
            return
        obstacle = graph_rules.why_not(self._step)
        if obstacle is not None:
            self._give_up(obstacle)
        elif self._addresses is not None and graph_rules.addresses(self._step) != self._addresses:
            self._forget_graphs()
            self._python = None  # other modules have other attributes
            for parameter in self._step.parameters():
                if not parameter.requires_grad:
                    parameter.grad = None  # one of zeros would still be updated, by its momentum

    def state_dict(self) -> dict[str, Any]:
        """What `graphs="auto"` has decided: measured anew, it might decide otherwise."""
        pays = None if self._trial is None else self._trial.pays
        return {
            "pays": pays,
            "decision": self._decision,
            "prepared": self._prepared is not None,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Also: the optimizer has another state, and the settings that came with it."""
        self._drop_graphs()
        self._step.reached = self._with_gradients() if self._step.group_is_open else set()
        # An optimizer that had been made capturable goes on as one, as all did in older states.
        if state is not None and state.get("prepared", self._why is None):
            self._prepared = graph_rules.Prepared(self._step)
        elif self._prepared is not None:
            self._prepared, self._step.rates = None, None
        pays = None if state is None else state["pays"]
        if self._trial is not None and pays is not None and self._why is None:
            self._trial.pays, self._decision = pays, state["decision"] if state else None
            self._follow_decision(self._trial)

    def report(self) -> GraphReport:
        return GraphReport(
            shapes=len(self._graphs),
            captures=self._graphs.captures,
            evictions=self._graphs.evictions,
            replays=self._replays,
            one_by_one=self._one_by_one,
            memory_bytes=self._graphs.memory_bytes + self._updates.memory_bytes,
            why=self._why,
            decision=self._decision,
        )

    def close(self) -> None:
        """Let go of all graphs. Steps go on, one by one at first."""
        self._drop_graphs()

    # --- one batch --------------------------------------------------------------------------------

    def _captured(self, batch: Any) -> Captured[LossParts] | None:
        """The graph for this batch, made now if it is due."""
        try:
            self._look_at_settings()
            self._key = signature(batch)
            captured = self._graphs.find(self._key)
            if captured is None and self._is_due():
                captured = self._capture(batch)  # None: not yet
        except CaptureError as problem:
            self._give_up(_told(problem))
            return None
        return captured

    def _is_due(self) -> bool:
        agreed = hash(self._key) in self._agreed
        return agreed and self._graphs.is_due(self._key) and self._step.updates > 0

    def _launch(self, batch: Any, report: Report, tracing: Tracing | None = None) -> None:
        step, traced = self._step, tracing or nullcontext()
        with self._timed(replay=False):
            with traced:
                parts = step.forward(batch)
            if step.gate is None:
                report(parts)
            if tracing is not None:
                tracing.forward_ends(parts.numbers())
            with self._noting_reached() if step.keeps_gradients else nullcontext(), traced:
                step.backward(parts)
            if updated := step.group_is_full:
                self._forget_unreached()
                step.update()
            if step.gate is not None:
                report(step.gate.marked(parts, updated=updated))

    # --- before a capture: would a graph repeat what the step does? -------------------------------

    def _is_to_be_watched(self) -> bool:
        uses, key = self._graphs.uses(self._key), hash(self._key)
        if key in self._agreed or uses < self._watch_from:
            return False
        # A loader that never repeats a shape must not be watched for ever.
        return (
            key in self._traces or uses >= self._watch_after or len(self._traces) < _MOST_REMEMBERED
        )

    def _watch(self, batch: Any, report: Report) -> None:
        """Train on a batch, and look for what a graph could not repeat."""
        tracing = Tracing(self._device, until=GraphedStep._launch.__code__)
        known = storages([*self._known(), *flatten_batch(batch)])
        with loss_as(self._step, "plain"), self._device.watch() as obstacles:
            self._launch(batch, report, tracing)
        # A shape's first batch may be the one in which something is set up, once for all.
        is_first = self._graphs.uses(self._key) == 1
        if obstacles:
            if not is_first:
                self._give_up("; ".join(dict.fromkeys(map(str, obstacles[:3]))))
            return
        trace = tracing.trace
        known |= storages(self._known())
        trace.read = {one: read for one, read in trace.read.items() if one not in known}
        for storage, read in trace.read.items():
            if storage in self._made:
                where = "" if read.line is None else f" at {read.line}"
                self._give_up(
                    f"the step reads{where} a tensor that it made for an earlier batch, and a "
                    "graph would go on with the old one: keep one tensor, and write to it in place"
                )
                return
        if not is_first:
            self._made = {one for one in self._made | trace.survivors() if not one.expired()}
        self._compare(trace)

    def _compare(self, trace: StepTrace) -> None:
        """With the batch of this shape before. Two that did the same may be captured."""
        key = hash(self._key)
        before = self._traces.pop(key, None)
        difference = None if before is None else trace.difference(before)
        if before is not None and difference is None:
            self._agreed[key] = [read.tensor for read in trace.read.values()]
            return
        if difference is not None:
            self._differences[key] += 1
            if self._differences[key] == _MOST_WATCHED - 1:
                self._give_up(f"the step is not the same for each batch: {difference}")
                return
        if len(self._traces) == _MOST_REMEMBERED:
            self._traces.pop(next(iter(self._traces)))
        self._traces[key] = trace

    def _known(self) -> list[torch.Tensor]:
        """Tensors that a step may read: they stay where they are, or it is noticed."""
        step = self._step
        found = [*graph_rules.tensors_of(step), *step.own_tensors()]
        for parameter in (*step.model.parameters(), *step.parameters()):
            if parameter.grad is not None:
                found.append(parameter.grad)
        return found + (self._python.tensors() if self._python is not None else [])

    def _replay(self, captured: Captured[LossParts], batch: Any, report: Report) -> None:
        step = self._step
        with self._timed(replay=True):
            step.begin()
            if step.rates is not None:
                step.rates.write()
            step.tear()
            parts = captured.replay(flatten_batch(batch))
            if step.gate is None:
                report(parts)
            step.gathered()
            updated = step.group_is_full
            if step.accumulate == 1:
                step.applied()
            else:
                self._step.reached |= self._reached_by[self._key]
                if updated:
                    self._forget_unreached()
                    self._update()
            if step.gate is not None:
                report(step.gate.marked(parts, updated=updated))
        if self._trial is not None and self._trial.is_over():
            self._decide(self._trial)

    def _update(self) -> None:
        """The update at the end of a group, a graph of its own."""
        step = self._step
        if self._why is not None:
            step.update()
            return
        if step.rates is not None:
            step.rates.write()
        # Gradients that this graph knows nothing of would be neither used nor cleared.
        key = tuple(p.grad.data_ptr() if p.grad is not None else 0 for p in step.parameters())
        update = self._updates.find(key)
        if update is None:
            kept = graph_rules.Kept(step)
            try:
                update = self._updates.capture(key, (), lambda _: step.apply())
                if kept.state_changed():
                    self._updates.drop(key)
                    update = None
            except CaptureError as problem:
                self._give_up(_told(problem))
            finally:
                kept.restore()
        if update is None:
            step.update()
        else:
            update.replay([])
            step.applied()

    # --- capture ----------------------------------------------------------------------------------

    def _capture(self, batch: Any) -> Captured[LossParts] | None:
        """A graph of the step on this batch; None if the step first has to run as it is, because
        it would make something that stays, such as the optimizer's state of a parameter."""
        step = self._step
        obstacle = graph_rules.why_not(step)
        if obstacle is not None:
            raise CaptureError(obstacle)
        if step.accumulate > 1 and not self._gradients_are_kept():
            return None
        with self._preparing() as succeeded:
            kept = graph_rules.Kept(step)
            try:
                captured = self._graphs.capture(self._key, batch, self._device_part)
                replaced = kept.replaced()
                if replaced is not None:
                    raise CaptureError(
                        f"the model replaces {replaced} in its forward, and a graph would go on "
                        "with the old one: write to it in place"
                    )
                if kept.state_changed():
                    self._graphs.drop(self._key)
                    return None
                if step.keeps_gradients and (
                    kept.gradients_changed() or self._step.reached != self._with_gradients()
                ):
                    raise CaptureError(_SOME_ONLY)
                self._reached_by[self._key] = frozenset(self._step.reached)
            finally:
                kept.restore()
                self._step.reached.clear()
            if self._python is not None and (changed := self._python.changed_so_far()):
                raise CaptureError(str(changed))
            succeeded()
        self._addresses = graph_rules.addresses(step)
        self._settings = graph_rules.settings(step)
        own = {id(p) for p in step.parameters()}
        self._outside = [
            (p, p.grad) for p in step.model.parameters() if p.grad is not None and id(p) not in own
        ]
        # A graph must not outlive its memory.
        self._held += [*self._known(), *self._agreed[hash(self._key)]]
        return captured

    @contextmanager
    def _preparing(self) -> Iterator[Callable[[], None]]:
        """Inside the block the step can be captured. Unless what is yielded is called, all is then
        as before: the optimizer, the host's random generators, and what the loss function keeps."""
        drawn_from, succeeded = host_states(), []
        prepared = graph_rules.Prepared(self._step) if self._prepared is None else None
        if self._step.rates is not None:
            self._step.rates.write()
        try:
            yield lambda: succeeded.append(True)
        finally:
            if succeeded:
                self._prepared = self._prepared or prepared
            else:
                set_host_states(drawn_from)
                if self._python is not None:
                    self._python.put_back()
                if prepared is not None:
                    prepared.undo()

    # --- accumulation: gradients that keep their memory -------------------------------------------

    def _gradients_are_kept(self) -> bool:
        """Whether a group is about to begin with all its gradients in place, at zero."""
        step, state = self._step, self._step.optimizer.state
        if step.group_is_open:
            return False
        if not step.keeps_gradients:
            step.keeps_gradients = True  # from this group on: it makes them
            self._step.reached.clear()
            return False
        return not any(
            p.grad is None and p.requires_grad and state.get(p) for p in step.parameters()
        )

    def _forget_unreached(self) -> None:
        """Before an update: a gradient that is kept cannot say that no batch has reached it. Where
        that happens, none are kept any more."""
        if self._step.keeps_gradients and self._step.reached != self._with_gradients():
            graph_rules.forget_gradients(self._step, keep=self._step.reached)
            self._give_up(_SOME_ONLY)
        self._step.reached.clear()

    def _with_gradients(self) -> set[int]:
        return {id(p) for p in self._step.parameters() if p.grad is not None}

    def _device_part(self, batch: Any) -> LossParts:
        """What a graph repeats: all of a step, or with accumulation all but the update."""
        step = self._step
        with loss_as(step, "compiled"):
            parts = step.forward(batch)
        # As they are now: a metric may be a view of a weight, which the update changes.
        values = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in parts.values.items()
        }
        if step.accumulate == 1:
            step.gather(parts)
            step.apply()
        else:
            with self._noting_reached():
                step.gather(parts)
        return replace(parts, loss=parts.loss.detach(), values=values)

    @contextmanager
    def _noting_reached(self) -> Iterator[None]:
        """Note the parameters that backward gives a gradient: which, must not depend on the batch,
        since a gradient that is kept cannot say that there was none."""
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: self._step.reached.add(id(p)))
            for p in self._step.parameters()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look_at_settings(self) -> None:
        """Drop graphs that were captured with other numbers. If numbers change all the time, there
        is no use for graphs."""
        step, before = self._step, self._settings
        if self._prepared is not None and self._prepared.is_undone:
            self._forget_graphs()
            self._prepared = graph_rules.Prepared(step)
        settings = graph_rules.settings(step)
        self._since_change += 1
        if self._python is None:
            self._python = PythonState(step.device, loss_of(step), bare(step.model))
            if (iterator := self._python.iterator()) is not None:
                name, line = iterator
                where = "" if line is None else f" ({line})"
                raise CaptureError(
                    f"the loss function draws from the iterator {name}{where}, and a graph would "
                    "repeat what it drew at capture: let the loader draw from it, for each batch"
                )
        changed = self._python.changed()
        if any(parameter.grad is not gradient for parameter, gradient in self._outside):
            self._forget_graphs()  # the user cleared them: a graph would write to the old ones
        if settings == before and changed is None:
            return
        if before is not None:
            self._changes += self._since_change < _STEADY_BATCHES
            if self._changes == _MOST_CHANGES:
                raise CaptureError(
                    str(changed)
                    if changed is not None
                    else f"the optimizer's {graph_rules.changed_setting(before, settings)} changes "
                    "from step to step, and a graph keeps it as it was (a scheduler's "
                    "cycle_momentum, say; SGD's lr needs fused=True)"
                )
            self._forget_graphs()
        self._settings, self._since_change = settings, 0

    def _give_up(self, why: str) -> None:
        """From now on, one by one."""
        self._why = why
        self._drop_graphs()
        graph_rules.release(self._step)
        self._device.say_once(
            f"graphs: {why}",
            "plan %s: the step's kernels are launched one by one, not as a graph: %s",
            self._plan.name,
            why,
        )

    def _forget_graphs(self) -> None:
        """Drop all graphs, and watch each shape anew."""
        self._drop_graphs()
        self._agreed.clear()
        self._traces.clear()

    def _drop_graphs(self) -> None:
        self._graphs.close()
        self._outside = []
        self._updates.close()
        self._addresses = None
        self._held = []
        self._reached_by.clear()

    # --- graphs="auto" ----------------------------------------------------------------------------

    @contextmanager
    def _timed(self, *, replay: bool) -> Iterator[None]:
        """Time the step in the block, alone on the device, if the trial still wants it."""
        trial, device = self._trial, self._device
        warmed_up = replay or self._graphs.uses(self._key) > self._watch_after
        if (
            trial is None
            or self._why is not None
            or not warmed_up
            or not trial.takes(self._key, replay)
        ):
            yield
            return
        device.synchronize("auto_graphs")
        start = device.ledger.now_ns()
        yield
        launched = device.ledger.now_ns()
        device.synchronize("auto_graphs")
        trial.add(self._key, replay, launched - start, device.ledger.now_ns() - start)

    def _decide(self, trial: Trial) -> None:
        self._decision = trial.decide()
        log.info("plan %s: %s", self._plan.name, self._decision)
        self._follow_decision(trial)

    def _follow_decision(self, trial: Trial) -> None:
        if not trial.pays:
            self._why = self._decision
            self._drop_graphs()
            graph_rules.release(self._step)


def _told(problem: CaptureError) -> str:
    """A failed capture in words: what was raised, and on which line of the user's."""
    cause = problem.__cause__
    if cause is None:
        return str(problem)
    text = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
    site = line_of_error(cause.__traceback__)
    return f"{type(cause).__name__}: {text}" + ("" if site is None else f", at {site}")
