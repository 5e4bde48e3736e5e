"""A function as graphs: the only place that keys, watches, captures, replays and checks again.

    key ── graph? ── yes ── replay, or at some replays: run eagerly and compare
              └───── no ─── run eagerly, watched; after two calls that agree: capture

What is captured is a `Capturable`: the engine's training step, a step of the user's. The first
calls of a shape run eagerly. The last two of them are watched, for what no graph can repeat (a host
wait, say) and for differences between them. The capture runs nothing, and the call that it was made
for is its first replay. A function that cannot be captured always runs eagerly, and the log says
why, once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any, Generic

import torch

from headrace.capture.graphs.cache import GraphCache
from headrace.capture.graphs.captured_work import CapturedWork
from headrace.capture.graphs.key_changes import KeyChanges
from headrace.capture.graphs.work import Call, Capturable, Outcome, Result
from headrace.capture.guards.guards import MEMORY_MOVES, Guards
from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.reports.report import (
    GraphReport,
    describe_failure,
    join_reasons,
    log_rounding,
    warn_not_captured,
)
from headrace.capture.state.capturable_optimizer import CapturableOptimizer, rounding_when_captured
from headrace.capture.state.memory import StateBeforeCapture, StateMemory
from headrace.capture.state.signatures import signature
from headrace.capture.state.state import StepState
from headrace.capture.watching.trials import TracedRun, Trials
from headrace.data import flatten_batch
from headrace.device import Device
from headrace.errors import CaptureError

log = logging.getLogger("headrace")
# After this many captures in a row that made something that stays, none is tried any more.
_MAX_UNFINISHED = 3


class CapturedFunction(Generic[Call, Outcome, Result]):
    """The graphs of one piece of work. `watch_first` and `watch_last` are the uses of a shape from
    which on its calls are watched, `capture_after` how many run before its capture. A `cautious`
    function is captured only if the device has room for its graph beside eager calls, and if no
    optimizer's last digits would differ; why it is not captured is no warning then."""

    def __init__(
        self,
        work: Capturable[Call, Outcome, Result],
        device: Device,
        *,
        plan_name: str,
        max_graphs: int,
        watch_first: int,
        watch_last: int,
        capture_after: int,
        recheck: int,
        cautious: bool = False,
    ) -> None:
        self._work, self._device, self._plan_name = work, device, plan_name
        self._cautious = cautious
        self.graphs: GraphCache[Outcome] = GraphCache(
            device, max_graphs=max_graphs, capture_after=capture_after
        )
        self._trials = Trials(device, first=watch_first, last=watch_last, recheck=recheck)
        self._key_changes = KeyChanges()
        self._pytorch = KernelSettings(device)
        self._capturable: list[CapturableOptimizer] = []
        self._unfinished: Counter[Hashable] = Counter()
        #: None: what the function uses is searched for before the next call.
        self.guards: Guards | None = None
        # Of the captured graphs: the memory they use.
        self._memory: StateMemory | None = None
        #: The key of the present call; None if it is not captured.
        self.key: Hashable | None = None
        self.replays = self._one_by_one = 0
        self._was_new_shape = False
        #: Why nothing is captured any more.
        self.why: str | None = None

    def __call__(self, call: Call) -> Result:
        tree = self._work.tree(call)
        key = self.key = self._key_for(call, tree) if self.why is None else None
        captured = None if key is None else self._graph_for(key, tree)
        if key is not None and captured is not None:
            self._was_new_shape, leaves = False, flatten_batch(tree)
            if self._key_changes.streak:
                self._key_changes.seen()
            if captured.suits(leaves):
                if self._trials.recheck.is_due(captured):
                    return self._check_again(captured, key, call, tree)
                self.replays += 1
                return self._work.replay(captured, key, call, leaves)
        self._one_by_one += 1
        self._was_new_shape = key is not None and self.graphs.uses(key) == 1
        if key is None or self.why is not None:
            return self._work.run(call)
        if self._was_new_shape:
            self._key_changes.add(tree, self._device, self._plan_name)
        else:
            self._key_changes.seen()
        if not self._trials.watch.wants(key, self.graphs.uses(key)):
            return self._work.run(call)
        return self._run_watched(call, tree, key)

    def run(self, call: Call) -> Result:
        """Run a call eagerly, also if it has a graph."""
        self.key = None
        self._one_by_one += 1
        return self._work.run(call)

    def report(self, more_bytes: int = 0) -> GraphReport:
        rounding = (optimizer.rounding for optimizer in self._capturable)
        why = self.why or (None if len(self.graphs) else self._key_changes.why)
        return GraphReport(
            shapes=len(self.graphs),
            captures=self.graphs.captures,
            evictions=self.graphs.evictions,
            replays=self.replays,
            one_by_one=self._one_by_one,
            memory_bytes=self.graphs.memory_bytes + more_bytes,
            why=why,
            decision=None,
            rounding=join_reasons(self._trials.watch.rounding, *rounding),
            seconds=self.graphs.seconds,
            rechecks=self._trials.recheck.checks,
            differed=self._trials.recheck.differed,
            way="whole step" if len(self.graphs) else "eager",
        )

    @property
    def is_prepared(self) -> bool:
        """Whether the optimizers are capturable."""
        return bool(self._capturable)

    def look_for_obstacles(self) -> None:
        """Look again whether something prevents a capture."""
        state = self._work.find_state() if self.why is None else None
        obstacle = None if state is None else self._obstacle(state)
        if obstacle is not None:
            self.give_up(obstacle)

    def answer_as_captured(self) -> None:
        """Tell trials from the first one on that they are captured, as in the run that this one
        continues."""
        self._trials.watch.answer_as_captured()

    @property
    def answers_as_captured(self) -> bool:
        """Whether code has asked whether it is captured, and is told so."""
        return self._trials.watch.as_captured

    # --- one call ---------------------------------------------------------------------------------

    def _key_for(self, call: Call, tree: Any) -> Hashable | None:
        """The key of a call: what its graph depends on. None if the function cannot be captured.
        Drops graphs that were captured with other values or other memory."""
        try:
            if not self._look_around():
                return None
            more = self._work.key(call)  # first: it may bring the arguments to their place
            modes = torch.is_grad_enabled(), torch.is_anomaly_enabled()
            return (signature(tree, self._device), modes, self._pytorch.now(), *more)
        except CaptureError as problem:
            self.give_up(describe_failure(problem))
            return None

    def _look_around(self) -> bool:
        """Drop graphs that no longer hold. Returns whether it is known what the function uses."""
        if self.guards is None:
            state = self._work.find_state()
            if state is None:
                return False
            self.guards = Guards(state, self._work.settings)
            self.guards.check()
            self._work.found(self.guards)
            return True
        was_reset = any(optimizer.was_reset for optimizer in self._capturable)
        moved = self._has_moved(self.guards)
        replaced = MEMORY_MOVES if moved else self._work.replaced()
        if self.guards.check(replaced, after_new_shape=self._was_new_shape):
            self.drop()
        if moved:
            self.drop()
            self._work.memory_moves()
            state = self._work.find_state()
            if state is None:
                self.guards = None
                return False
            self.guards.find_again(state)
            self.guards.find()
            self._work.found(self.guards)
        if was_reset:
            self.drop()
            self.make_capturable()
        return True

    def _has_moved(self, guards: Guards) -> bool:
        """Whether the function uses other memory than graphs do, or has got other modules since it
        was searched."""
        return guards.modules_changed() if self._memory is None else self._memory.has_moved()

    def _graph_for(self, key: Hashable, tree: Any) -> CapturedWork[Outcome] | None:
        """The graph for this call, captured now if it is due; None: run eagerly."""
        try:
            graph_key = self._work.graph_key(key) if self._trials.watch.has_agreed(key) else None
            captured = self.graphs.find(key if graph_key is None else graph_key)
            if captured is not None or graph_key is None or not self.graphs.is_due(graph_key):
                return captured
            return self._capture(key, graph_key, tree)
        except CaptureError as problem:
            self.give_up(describe_failure(problem))
            return None

    def _run_watched(self, call: Call, tree: Any, key: Hashable) -> Result:
        """Run eagerly, and look for what no graph could repeat."""
        result, trial = self._run_traced(call, tree, key)
        if trial is None:
            self.guards = None  # watch again, with all that the function uses
        else:
            why = self._trials.learn(key, trial, first=self.graphs.uses(key) == 1)
            if why is not None:
                self.give_up(why)
        return result

    def _check_again(
        self, captured: CapturedWork[Outcome], key: Hashable, call: Call, tree: Any
    ) -> Result:
        """Run eagerly what a graph would have repeated, and compare."""
        self._one_by_one += 1
        if (compared := self._work.run_compared(call)) is not None:
            result, found = compared
        else:
            result, trial = self._run_traced(call, tree, key)
            is_known = trial is not None and self.why is None
            found = self._trials.difference(key, trial) if is_known and trial is not None else None
        if self._trials.learn_of(captured, found, f"plan {self._plan_name}"):
            self.drop()
            if self._trials.recheck.is_hopeless:
                self.give_up(f"the step changes while its graphs are in use: {found}")
        return result

    def _run_traced(self, call: Call, tree: Any, key: Hashable) -> tuple[Result, TracedRun | None]:
        """Run eagerly under a trace, which is None if it is not complete."""
        leaves, code = flatten_batch(tree), CapturedFunction._run_traced.__code__
        with self._trials.run(code, lambda: [*self._known_tensors(), *leaves]) as trial:
            result, is_complete = self._work.run_watched(call, key, trial.tracer)
        return result, trial if is_complete else None

    def _known_tensors(self) -> list[torch.Tensor]:
        """Tensors that the function may read: other checks notice if one is replaced."""
        found = self._work.tensors()
        return found if self.guards is None else found + self.guards.tensors()

    # --- capture ----------------------------------------------------------------------------------

    def _capture(
        self, key: Hashable, graph_key: Hashable, tree: Any
    ) -> CapturedWork[Outcome] | None:
        """Capture this call. Returns None if it must run eagerly once more, because it makes
        something that stays, such as the optimizer's state of a parameter."""
        work, guards = self._work, self.guards
        assert guards is not None
        state = guards.state
        if (obstacle := self._obstacle(state)) is not None:
            raise CaptureError(obstacle)
        if not work.ready():
            return None
        if self._cautious and not len(self.graphs):
            _require_room(self._device)
        with self._ready_for_capture(guards) as undo:
            with StateBeforeCapture(state, guards.tensors()) as before:
                captured = self.graphs.capture(
                    graph_key, tree, work.record, self._known_tensors(), state.updated()
                )
                before.require_in_place()
                if before.optimizer_changed():
                    self.graphs.drop(graph_key)
                    self._note_unfinished(key, before)
                    return None
                work.check(key, before)
            guards.require_unchanged()
            undo.pop_all()
        if self.graphs.captures == 1:
            log_rounding(self._plan_name, self.report().rounding)
        self._unfinished.clear()
        self._memory = StateMemory(state, (*work.held(), *guards.tensors()))
        guards.note_capture()
        captured.hold([*self._known_tensors(), *self._trials.watch.read_by(key)])
        work.keep(captured, key)
        return captured

    def _obstacle(self, state: StepState) -> str | None:
        rounding = map(rounding_when_captured, state.optimizers if self._cautious else ())
        return self._work.obstacle(state) or next(filter(None, rounding), None)

    def _note_unfinished(self, key: Hashable, before: StateBeforeCapture) -> None:
        """A capture made a part of an optimizer's state. The next call makes it for good; but some
        optimizers make another one in each step."""
        self._unfinished[key] += 1
        if self._unfinished[key] == _MAX_UNFINISHED:
            raise CaptureError(
                f"{before.changed_optimizer()} puts a new tensor into its state at every step, and "
                "a graph would keep using the old: write to the one that is there, with copy_()"
            )

    def _ready_for_capture(self, guards: Guards) -> ExitStack:
        """Make the optimizers capturable. The end of the returned context undoes this and what a
        capture has changed on the host; after a success, `pop_all()` keeps it."""
        undo = guards.restoring_host_state()
        if not self._capturable:
            self.make_capturable()
            undo.callback(self.make_plain)
        self._work.write_rates()
        return undo

    def make_capturable(self) -> None:
        """Make the optimizers capturable, with their learning rates on the device."""
        state = self._work.find_state() if self.guards is None else self.guards.state
        optimizers = () if state is None else state.optimizers
        self._capturable = [CapturableOptimizer(self._device, one) for one in optimizers]
        self._work.use_optimizers(self._capturable)

    def make_plain(self) -> None:
        for optimizer in self._capturable:
            optimizer.undo()
        self.forget_capturable()

    def forget_capturable(self) -> None:
        """The optimizers have another state, of plain ones."""
        self._capturable = []
        self._work.use_optimizers(())

    # --- when graphs are dropped ------------------------------------------------------------------

    def give_up(self, why: str, *, quietly: bool = False) -> None:
        """Stop capturing for good: run all later calls eagerly. Log why, unless `quietly`."""
        self.why = why
        self.drop()
        self.guards = None  # frees what it had found
        self._work.given_up()
        if not quietly:
            warn_not_captured(self._device, self._plan_name, why, expected=self._cautious)

    def drop(self) -> None:
        """Drop all graphs. Each shape is watched again before its next capture."""
        self.graphs.close()
        self._memory = None
        self._trials.watch.forget()
        self._work.dropped()

    def restart(self) -> None:
        """Search for what the function uses again, and watch again, before the next call."""
        self.drop()
        self.guards = None


def _require_room(device: Device) -> None:
    """Raise `CaptureError` if a graph is unlikely to fit. It needs what the largest step so far has
    needed, and so do the eager steps beside it."""
    memory = device.memory()
    needed = 2 * (memory.peak_allocated - memory.allocated)
    free = memory.free + memory.reserved - memory.allocated
    if needed > free:
        raise CaptureError(
            f"a graph beside eager steps would need about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free"
        )
