"""`GraphedUpdate`: an optimizer's step that is replayed as a graph, in anybody's loop.

`optimizer.step` is replaced on the instance. The parameter groups stay the user's: learning rates
are read from them at each step and written to the device, and other settings are part of the key
that a graph belongs to. Only while the step is captured do the groups hold what a graph needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

import torch

from headrace.capture.guards.group_settings import GroupSettings
from headrace.capture.reports.part import PartReport, PartTally
from headrace.capture.reports.reasons import CHECKED, FIRST_STEPS, NEW_GRADIENTS
from headrace.capture.reports.report import describe_failure
from headrace.capture.state.state import StepState
from headrace.capture.updates.captured_update import SCALER_INPUTS, CapturedUpdate, capture_update
from headrace.capture.updates.checked_step import checked_step
from headrace.capture.updates.settling import Settling, UpdateBasis
from headrace.capture.watching.trials import Trials
from headrace.device import Device
from headrace.errors import CaptureError

_GRADIENT = operator.attrgetter("grad")
_MAX_GRAPHS = 8


class GraphedUpdate:
    """Replays an optimizer's step. `after` steps run eagerly first."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        *,
        name: str,
        after: int,
        recheck: int = 0,
        check: int = 0,
    ) -> None:
        self._optimizer = optimizer
        self._state = StepState(device, optimizer.step, (), (optimizer,))
        self.part = PartTally(device, name, check)
        self._settings = GroupSettings()
        self._settling = Settling(after)
        self._trials = Trials(device, name, first=after, last=after, recheck=recheck)
        self._graphs: dict[Hashable, CapturedUpdate] = {}
        self._basis: UpdateBasis | None = None

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        why = self.part.why
        if why is not None or torch.compiler.is_compiling() or self._state.device.is_capturing():
            return self._run(why or "called inside another captured part", closure)
        loss = None
        if closure is not None:
            if not _calls_closure_first(self._optimizer):
                why = (
                    f"{type(self._optimizer).__name__} may call its closure more than once in a "
                    "step, or at another time than first"
                )
                self.give_up(why)
                return self._run(why, closure)
            with torch.enable_grad():
                loss = closure()
        graph = self._graph_or_reason()
        if isinstance(graph, str):
            self._run(graph, None)
        elif self._trials.recheck.is_due(graph):
            self._check_again(graph)
        else:
            with checked_step(self.part.check, self._state.device, self._optimizer):
                graph.replay()
            self.part.replayed()
        return loss

    def _run(self, why: str, closure: Callable[[], Any] | None) -> Any:
        self.part.ran_eagerly(why)
        step: Any = self._state.function
        return step() if closure is None else step(closure)

    def _check_again(self, graph: CapturedUpdate) -> None:
        """Run eagerly what a graph would repeat, and compare."""
        trials, code = self._trials, GraphedUpdate._check_again.__code__
        with graph.inputs.in_place(), trials.run(code, graph.inputs.tensors) as trial, trial.tracer:
            self._run(CHECKED, None)
        found = trials.watch.difference(graph.key, trial)
        trials.judge(graph, found, lambda _: self._drop_graphs(), self.give_up)

    def _graph_or_reason(self) -> CapturedUpdate | str:
        """The graph of this step; else why the step must run eagerly."""
        if self._settling.is_early():
            return FIRST_STEPS
        if self._basis is not None and (changed := self._basis.difference()) is not None:
            self._drop_graphs()
            if self.part.note_change():
                self.give_up(f"{changed} (again and again)")
                return changed
        gradients = list(map(_GRADIENT, self._state.updated()))
        scales = [getattr(self._optimizer, name, None) is not None for name in SCALER_INPUTS]
        settings = (self._settings.read(self._state), *scales)
        key = (*settings, *_addresses(gradients))
        if (graph := self._graphs.get(key)) is not None:
            return graph
        # A scaled step writes to its gradients.
        elsewhere = None if any(scales) else (*settings, None, *[one is None for one in gradients])
        if (graph := self._graphs.get(elsewhere)) is not None:
            return graph
        try:
            if self._settling.has_settled(key, gradients):
                graph = self._graphs[key] = self._capture(key)
            elif elsewhere is not None and self._settling.only_gradients_move(elsewhere):
                graph = self._graphs[elsewhere] = self._capture(elsewhere, copied=True)
            else:
                return NEW_GRADIENTS
        except CaptureError as problem:
            self.give_up(describe_failure(problem))
            return describe_failure(problem)
        return graph

    def _capture(self, key: Hashable, *, copied: bool = False) -> CapturedUpdate:
        if len(self._graphs) >= _MAX_GRAPHS:
            self._drop_graphs()
        with ExitStack() as undo:
            basis = self._basis
            if basis is None:
                basis = UpdateBasis(self._state)
                undo.callback(basis.capturable.undo)
            with self.part.capturing():
                copies = basis.copies if copied else None
                graph = capture_update(
                    self._state, basis.capturable, basis.pool, copies, key, self._trials
                )
            undo.pop_all()
        basis.note_capture()
        self.part.note_rounding(basis.capturable.rounding)
        self._basis = basis
        return graph

    def give_up(self, why: str) -> None:
        """Run all later steps eagerly."""
        if self.part.give_up(why):
            self._drop_graphs()

    def close(self) -> None:
        self.part.close()
        self._drop_graphs()

    def report(self) -> PartReport:
        """What became of the optimizer."""
        return self.part.report()

    def _drop_graphs(self) -> None:
        with self.part.closing():
            for graph in self._graphs.values():
                graph.close()
        self._graphs.clear()
        self._settling.forget()
        self._trials.watch.forget()
        self._basis = None


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step begins with one call of its closure, as those of PyTorch's optimizers do."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def _addresses(gradients: list[Any]) -> list[int]:
    try:
        return list(map(torch.Tensor.data_ptr, gradients))
    except TypeError:  # some are None
        return [0 if one is None else one.data_ptr() for one in gradients]
