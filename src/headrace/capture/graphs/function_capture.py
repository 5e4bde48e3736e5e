"""How a call of a function is captured, and what must be as before when it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from headrace.capture.graphs.cache import GraphCache
from headrace.capture.graphs.captured_work import CapturedWork
from headrace.capture.graphs.optimizers import FunctionOptimizers
from headrace.capture.graphs.surroundings import Surroundings
from headrace.capture.graphs.work import Capturable
from headrace.capture.guards.guards import Guards
from headrace.capture.state.capturable_optimizer import rounding_when_captured
from headrace.capture.state.memory import StateBeforeCapture
from headrace.capture.state.state import StepState
from headrace.device import Device
from headrace.errors import CaptureError

Outcome = TypeVar("Outcome")
# After this many captures in a row that made something that stays, none is tried any more.
_MAX_UNFINISHED = 3


class FunctionCapture(Generic[Outcome]):
    """Captures calls into a cache. A `cautious` capture needs room for a graph beside eager calls,
    and optimizers whose last digits it does not change."""

    def __init__(
        self,
        work: Capturable[Any, Outcome, Any],
        device: Device,
        graphs: GraphCache[Outcome],
        uses: Surroundings,
        optimizers: FunctionOptimizers,
        *,
        cautious: bool,
    ) -> None:
        self._work, self._device, self._graphs = work, device, graphs
        self._uses, self._optimizers, self._cautious = uses, optimizers, cautious
        self._unfinished: Counter[Hashable] = Counter()

    def obstacle(self, state: StepState) -> str | None:
        """Why nothing can be captured; None if nothing is known to prevent it."""
        rounding = map(rounding_when_captured, state.optimizers if self._cautious else ())
        return self._work.obstacle(state) or next(filter(None, rounding), None)

    def run(self, key: Hashable, graph_key: Hashable, tree: Any) -> CapturedWork[Outcome] | None:
        """Capture a call. Returns None if it must run eagerly once more, because it makes something
        that stays, such as the optimizer's state of a parameter."""
        work, guards = self._work, self._uses.guards
        assert guards is not None
        state = guards.state
        if (obstacle := self.obstacle(state)) is not None:
            raise CaptureError(obstacle)
        if not work.ready():
            return None
        if self._cautious and not len(self._graphs):
            _require_room(self._device)
        with self._ready(guards) as undo:
            with StateBeforeCapture(state, guards.tensors()) as before:
                known = self._uses.known_tensors()
                captured = self._graphs.capture(
                    graph_key, tree, work.record, known, state.updated()
                )
                before.require_in_place()
                if before.optimizer_changed():
                    self._graphs.drop(graph_key)
                    self._note_unfinished(key, before)
                    return None
                work.check(key, before)
            guards.require_unchanged()
            undo.pop_all()
        self._unfinished.clear()
        self._uses.note_capture(state)
        captured.hold(self._uses.known_tensors())
        work.keep(captured, key)
        return captured

    def _ready(self, guards: Guards) -> ExitStack:
        """Make the optimizers capturable. The end of the returned context undoes this and what a
        capture has changed on the host; after a success, `pop_all()` keeps it."""
        undo = guards.restoring_host_state()
        if not self._optimizers.are_capturable:
            self._optimizers.make_capturable(guards.state)
            undo.callback(self._optimizers.undo)
        self._work.write_rates()
        return undo

    def _note_unfinished(self, key: Hashable, before: StateBeforeCapture) -> None:
        """A capture made a part of an optimizer's state. The next call makes it for good; but some
        optimizers make another one in each step."""
        self._unfinished[key] += 1
        if self._unfinished[key] == _MAX_UNFINISHED:
            raise CaptureError(
                f"{before.changed_optimizer()} puts a new tensor into its state at every step, and "
                "a graph would keep using the old: write to the one that is there, with copy_()"
            )


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
