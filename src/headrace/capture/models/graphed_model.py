"""`GraphedModel`: a model whose forward and backward are replayed as graphs, in anybody's loop.

`model.forward` is replaced on the instance, so its type, hooks, `state_dict` and wrappers stay. The
first calls of a kind run eagerly and are watched; then they are captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headrace.capture.guards.obstacles import require_no_obstacle, state_obstacle
from headrace.capture.models.captured_model import BackwardKey, CallKind, CapturedModel
from headrace.capture.models.checked_call import CheckedCall
from headrace.capture.models.eager import running_inside, why_eager_now, why_never, why_not_yet
from headrace.capture.models.lanes import Lane, ModelLanes
from headrace.capture.models.model_backward import ModelBackward
from headrace.capture.models.model_capture import ModelCapture
from headrace.capture.models.model_state import ModelState
from headrace.capture.models.model_trials import GraphOptions, ModelTrials
from headrace.capture.models.waiting_call import WaitingCall
from headrace.capture.reports.part import PartReport, PartTally
from headrace.capture.reports.reasons import CHECKED, FIRST_CALLS, MISSED, NO_GRADIENT
from headrace.capture.reports.report import describe_failure, join_reasons
from headrace.capture.state.state import StepState
from headrace.data import flatten_batch
from headrace.device import Device
from headrace.errors import CaptureError

# After this many calls of a kind whose outputs got no gradient, all are taken to get one.
_MAX_WAIT_FOR_BACKWARD = 6
# After this many calls whose arguments no graph can take, the model is divided.
_MAX_ODD_CALLS = 3


class GraphedModel:
    """Replays a model's `forward` and its backward."""

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        device: Device,
        name: str,
        options: GraphOptions,
    ) -> None:
        self._step = StepState(device, forward, (model,), ())
        self._options = options
        self.part = PartTally(device, name, options.check)
        self._state: ModelState | None = None  # until the model's parameters are there
        self.trials = ModelTrials(self._step, name, options, self.give_up)
        self._lanes = ModelLanes(device)
        self._backward = ModelBackward(self._step, self, name)
        self._divide: Callable[[], None] | None = None
        if (why := why_never(model)) is not None:
            self.give_up(why)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = (args, kwargs)
        if torch.compiler.is_compiling():
            return self._step.function(*args, **kwargs)  # type: ignore[operator]
        state = self.part.why or why_eager_now(self._step.device, self.model) or self._look()
        if isinstance(state, str):
            return self._run(state, call)
        leaves, agreement = flatten_batch(call), self.trials.agreement
        try:
            kind = self.trials.kind(state.key(call, leaves), call)
        except CaptureError as problem:
            return self._run_odd(str(problem), call)
        if agreement.has_agreed(kind) and not agreement.values_hold(kind):
            self._drop("a tensor of it is written to, of which its code reads values")
        if not agreement.has_agreed(kind):
            return self._run_first(state, kind, call)
        found = self._graph_for(state, kind, call, leaves)
        if isinstance(found, str):
            return self._run(found, call)
        why = self.trials.why_no_replay(kind, self.is_pending)
        if why is CHECKED:
            run = functools.partial(self._run, call=call)
            return self.trials.check(kind, state, call, run, self._drop)
        if why is not None:
            return self.trials.run_beside(call, functools.partial(self._run, why, call))
        return self._replay(*found, call, leaves)

    @property
    def model(self) -> torch.nn.Module:
        return self._step.modules[0]

    def _run(self, why: str, call: Any) -> Any:
        self.part.ran_eagerly(why)
        with running_inside(self.part.why is None):
            result = self._step.function(*call[0], **call[1])  # type: ignore[operator]
        return self.trials.eager_waits.note(result) if self.part.why is None else result

    def _run_odd(self, why: str, call: Any) -> Any:
        """A call with arguments that no graph can take."""
        if self.part.eager[why] >= _MAX_ODD_CALLS and not self.part.captures:
            self.give_up(why, divides=True)
        return self._run(why, call)

    def _run_first(self, state: ModelState, kind: CallKind, call: Any) -> Any:
        """One of the first calls of a kind."""
        changes = self.trials.key_changes
        if changes.is_value and changes.why is not None and not self.part.captures:
            self.give_up(changes.why, divides=True)
            return self._run(changes.why, call)
        kind.note_use()
        if not self.trials.agreement.wants(kind, kind.uses):
            return self._run(FIRST_CALLS, call)
        if (why := state_obstacle(self._step)) is not None:
            self.give_up(why, divides=True)
            return self._run(why, call)
        result, why = self.trials.watch(kind, state, call, functools.partial(self._run, call=call))
        if why is not None:
            self.give_up(why, divides=True)
        return result

    def _look(self) -> ModelState | str:
        """The model's state, after a comparison with what graphs of it use. Else why this call runs
        eagerly."""
        state = self._state
        if state is not None and (changed := state.change_of_model()) is not None:
            self._drop(changed)
            state = self._state = None
        elif state is not None and (changed := state.change_of_code()) is not None:
            self._drop(changed)
        if state is None and self.part.why is None:
            if (why := why_not_yet(self.model)) is not None:
                return why
            try:
                state = self._state = ModelState(self._step)
            except CaptureError as problem:
                self.give_up(str(problem))
        return self.part.why or state or ""

    def _drop(self, why: str) -> None:
        """Drop all graphs, since what they use has changed."""
        if self.part.note_change():
            self.give_up(f"{why} (again and again)")
        self._close_graphs()
        self.trials.forget()

    def _close_graphs(self) -> None:
        with self.part.closing():
            self._lanes.drop()

    def when_divided(self, call: Callable[[], None]) -> None:
        """Call this if only parts of the model can be captured."""
        self._divide = call

    def for_child(self, child: torch.nn.Module, name: str) -> GraphedModel:
        """The same for a child of the model."""
        name = f"{self.part.name}.{name}"
        return GraphedModel(child, child.forward, self._step.device, name, self._options)

    def give_up(self, why: str, *, divides: bool = False) -> None:
        """Run all later calls eagerly. Calls that wait for their backward still have their graphs.
        If it `divides`, parts of the model may do without what stands in the way."""
        if self.part.give_up(why):
            self._close_graphs()
            self.trials.forget(kinds=True)
            if divides and not self.part.captures and self._divide is not None:
                self._divide()

    def close(self) -> None:
        self.part.close()
        self._close_graphs()

    def report(self) -> PartReport:
        """What became of the model."""
        trials, lanes = self.trials.agreement.rounding, self._lanes.rounding
        self.part.note_rounding(join_reasons(trials, lanes))
        report, changes = self.part.report(), self.trials.key_changes
        return report if report.why or report.captures else replace(report, why=changes.why)

    def is_pending(self) -> bool:
        return self._lanes.is_pending()

    def backward_missed(self, graph: CapturedModel, key: BackwardKey) -> None:
        self.part.ran_eagerly(MISSED)
        if graph.kind.note_missed(key):
            self._lanes.forget(graph)

    def _graph_for(
        self, state: ModelState, kind: CallKind, call: Any, leaves: list[Any]
    ) -> tuple[Lane, CapturedModel] | str:
        """A lane whose calls have all had their backward, and its graph for this kind; captured now
        if there is none. Else why the call runs eagerly."""
        lane, graph = self._lanes.find(kind)
        if lane is not None and graph is not None:
            return lane, graph
        kind.note_use()
        if not kind.backwards and kind.uses <= self._options.after + _MAX_WAIT_FOR_BACKWARD:
            return NO_GRADIENT
        if lane is None and self._lanes.is_full(kind):
            return f"{len(self._lanes)} calls wait for their backward already"
        if self._lanes.count_graphs() >= self._options.shapes:
            return f"{self._options.shapes} graphs are in use for other shapes"
        try:
            lane = lane or self._lanes.open()
            graph = lane.graphs[kind] = self._capture(state, kind, lane, call, leaves)
        except CaptureError as problem:
            self.give_up(describe_failure(problem), divides=True)
            return describe_failure(problem)
        return lane, graph

    def _capture(
        self, state: ModelState, kind: CallKind, lane: Lane, call: Any, leaves: list[Any]
    ) -> CapturedModel:
        require_no_obstacle(self._step)
        pools = lane.pool, self._lanes.backward_pool()
        capture = ModelCapture(self._step, state, kind, *self.trials.known_of(kind), pools)
        capture.require_memory()
        with self.part.capturing(), self.trials.answering_in_capture():
            return capture.run(call, leaves)

    def _replay(self, lane: Lane, graph: CapturedModel, call: Any, leaves: list[Any]) -> Any:
        step = self._step
        host_state = torch.get_rng_state() if graph.host_draws else None
        if graph.host_draws is not None and not graph.host_draws.repeat():
            return self._run("numbers that it draws on the host ask for other work", call)
        graph.gradients.forget_backward()
        lane.order.move_to(step.device.current_stream())
        states = step.device.random_state() if graph.kind.draws else None, host_state
        checked = CheckedCall.begin(self.part.check, step, host_state)
        made = graph.replay_forward(leaves)
        self.part.replayed()
        if checked is not None:
            checked.forward(graph.outputs, call, leaves, made)
        if graph.backwards:
            waiting = WaitingCall(step, graph, call, leaves, lane.take(), states, checked)
            made = self._backward.outputs(waiting, made, leaves)
        return graph.outputs.result(made, leaves)
