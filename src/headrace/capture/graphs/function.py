"""A function as graphs: the only place that keys, watches, captures, replays and checks again.

    key ── graph? ── yes ── replay, or at some replays: run eagerly and compare
              └───── no ─── run eagerly, watched; after two calls that agree: capture

What is captured is a `Capturable`: the engine's training step, a step of the user's. The first
calls of a shape run eagerly. The last two of them are watched, for what no graph can repeat (a host
wait, say) and for differences between them. The capture runs nothing, and the call that it was made
for is its first replay. A function that cannot be captured always runs eagerly, and the log says
why, once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic

import torch

from headrace.capture.graphs.cache import GraphCache
from headrace.capture.graphs.capture_settings import CaptureSettings
from headrace.capture.graphs.captured_work import CapturedWork
from headrace.capture.graphs.function_capture import FunctionCapture
from headrace.capture.graphs.optimizers import FunctionOptimizers
from headrace.capture.graphs.surroundings import Surroundings
from headrace.capture.graphs.work import Call, Capturable, Outcome, Result
from headrace.capture.guards.guards import Guards
from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.reports.key_changes import KeyChanges
from headrace.capture.reports.report import (
    GraphReport,
    describe_failure,
    join_reasons,
    log_rounding,
    warn_not_captured,
)
from headrace.capture.state.signatures import signature
from headrace.capture.watching.traced_run import TracedRun
from headrace.capture.watching.trials import Trials
from headrace.data import flatten_batch
from headrace.device import Device
from headrace.errors import CaptureError


class CapturedFunction(Generic[Call, Outcome, Result]):
    """The graphs of one piece of work."""

    def __init__(
        self, work: Capturable[Call, Outcome, Result], device: Device, settings: CaptureSettings
    ) -> None:
        self._work, self._device, self._settings = work, device, settings
        self.graphs: GraphCache[Outcome] = GraphCache(
            device, max_graphs=settings.max_graphs, capture_after=settings.capture_after
        )
        self.trials = Trials(
            device,
            f"plan {settings.plan_name}",
            first=settings.watch_first,
            last=settings.watch_last,
            recheck=settings.recheck,
        )
        self._key_changes = KeyChanges(f"plan {settings.plan_name}", device)
        self._pytorch = KernelSettings(device)
        self._uses = Surroundings(work)
        self.optimizers = FunctionOptimizers(work, device)
        self._captures = FunctionCapture(
            work, device, self.graphs, self._uses, self.optimizers, cautious=settings.cautious
        )
        self.replays = self._one_by_one = 0
        self._was_new_shape = False
        #: Why nothing is captured any more.
        self.why: str | None = None

    def __call__(self, call: Call) -> Result:
        tree = self._work.tree(call)
        key = self._key_for(call, tree) if self.why is None else None
        captured = None if key is None else self._graph_for(key, tree)
        if key is not None and captured is not None:
            self._was_new_shape, leaves = False, flatten_batch(tree)
            if self._key_changes.streak:
                self._key_changes.seen()
            if captured.suits(leaves):
                if self.trials.recheck.is_due(captured):
                    return self._check_again(captured, key, call, tree)
                self.replays += 1
                return self._work.replay(captured, key, call, leaves)
        self._one_by_one += 1
        self._was_new_shape = key is not None and self.graphs.uses(key) == 1
        if key is None or self.why is not None:
            return self._work.run(call)
        if self._was_new_shape:
            self._key_changes.add({"batch": tree})
        else:
            self._key_changes.seen()
        if not self.trials.watch.wants(key, self.graphs.uses(key)):
            return self._work.run(call)
        return self._run_watched(call, tree, key)

    def run(self, call: Call) -> Result:
        """Run a call eagerly, also if it has a graph."""
        self._one_by_one += 1
        return self._work.run(call)

    def report(self, more_bytes: int = 0) -> GraphReport:
        rounding = self.optimizers.rounding()
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
            rounding=join_reasons(self.trials.watch.rounding, *rounding),
            seconds=self.graphs.seconds,
            rechecks=self.trials.recheck.checks,
            differed=self.trials.recheck.differed,
            way="whole step" if len(self.graphs) else "eager",
        )

    @property
    def guards(self) -> Guards | None:
        """What the function reads, as it was found; None if that is not known."""
        return self._uses.guards

    def look_for_obstacles(self) -> None:
        """Look again whether something prevents a capture."""
        state = self._work.find_state() if self.why is None else None
        obstacle = None if state is None else self._captures.obstacle(state)
        if obstacle is not None:
            self.give_up(obstacle)

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
        if not self._uses.look(self.drop, after_new_shape=self._was_new_shape):
            return False
        if self.optimizers.were_reset():
            self.drop()
            self.make_capturable()
        return True

    def _graph_for(self, key: Hashable, tree: Any) -> CapturedWork[Outcome] | None:
        """The graph for this call, captured now if it is due; None: run eagerly."""
        try:
            graph_key = self._work.graph_key(key) if self.trials.watch.has_agreed(key) else None
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
            self._uses.forget()  # watch again, with all that the function uses
        else:
            why = self.trials.watch.learn(key, trial, first=self.graphs.uses(key) == 1)
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
            found = None
            if trial is not None and self.why is None:
                found = self.trials.watch.difference(key, trial)
        self.trials.judge(captured, found, lambda _: self.drop(), self.give_up)
        return result

    def _run_traced(self, call: Call, tree: Any, key: Hashable) -> tuple[Result, TracedRun | None]:
        """Run eagerly under a trace, which is None if it is not complete."""
        leaves, code = flatten_batch(tree), CapturedFunction._run_traced.__code__
        with self.trials.run(code, lambda: [*self._uses.known_tensors(), *leaves]) as trial:
            result, is_complete = self._work.run_watched(call, key, trial.tracer)
        return result, trial if is_complete else None

    def _capture(
        self, key: Hashable, graph_key: Hashable, tree: Any
    ) -> CapturedWork[Outcome] | None:
        captured = self._captures.run(key, graph_key, tree)
        if captured is not None:
            captured.hold(self.trials.watch.read_by(key))
            if self.graphs.captures == 1:
                log_rounding(self._settings.plan_name, self.report().rounding)
        return captured

    # --- the optimizers ---------------------------------------------------------------------------

    def make_capturable(self) -> None:
        """Make the optimizers capturable, with their learning rates on the device."""
        self.optimizers.make_capturable(self._uses.state())

    # --- when graphs are dropped ------------------------------------------------------------------

    def give_up(self, why: str, *, quietly: bool = False) -> None:
        """Stop capturing for good: run all later calls eagerly. Log why, unless `quietly`."""
        self.why = why
        self.drop()
        self._uses.forget()  # frees what was found
        self._work.given_up()
        if not quietly:
            warn_not_captured(
                self._device, self._settings.plan_name, why, expected=self._settings.cautious
            )

    def drop(self) -> None:
        """Drop all graphs. Each shape is watched again before its next capture."""
        self.graphs.close()
        self._uses.forget_graphs()
        self.trials.watch.forget()
        self._work.dropped()
