"""With accumulation: the update as a graph of its own, and which gradients each graph gives."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from headrace.capture import (
    CapturedFunction,
    CapturedWork,
    GraphCache,
    StateBeforeCapture,
    describe_failure,
)
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Launched
from headrace.engine.step.parts import StepParts
from headrace.errors import CaptureError

_GRADIENTS_DIFFER = (
    "some parameters get a gradient from some batches only, and with accumulation a graph needs "
    "the same ones each time: use every parameter for every batch, or accumulate = 1"
)


class ReachedGradients:
    """The parameters (by `id`) to which each graph of a batch gives a gradient."""

    def __init__(self, parts: StepParts) -> None:
        self._kept = parts.group.kept
        self._by_graph: dict[Hashable, frozenset[int]] = {}
        self._last: frozenset[int] = frozenset()

    def recorded(self) -> None:
        """A capture has ended: keep what it has reached."""
        self._last = frozenset(self._kept.reached)
        self._kept.forget_reached()

    def check(self, key: Hashable, before: StateBeforeCapture) -> None:
        """Raise unless the last capture reached the gradients that there are."""
        if self._kept.are_kept and (
            before.gradients_changed() or self._last != self._kept.existing()
        ):
            raise CaptureError(_GRADIENTS_DIFFER)
        self._by_graph[key] = self._last

    def note_replay(self, key: Hashable) -> None:
        self._kept.note_reached(self._by_graph[key])

    def drop_others(self) -> str | None:
        """Call before an update. A gradient that keeps its memory is zero, not None, if no batch of
        the group has reached its parameter: drop it. Returns why nothing may be captured then."""
        kept = self._kept
        differ = kept.are_kept and kept.reached != kept.existing()
        if differ:
            kept.drop(but=kept.reached)
        kept.forget_reached()
        return _GRADIENTS_DIFFER if differ else None

    def clear(self) -> None:
        self._by_graph.clear()


class UpdateGraph:
    """A full group's update, by a graph of its own. `graphs` are those of its batches."""

    def __init__(
        self, parts: StepParts, graphs: CapturedFunction[Any, LossOutput, Launched]
    ) -> None:
        self._parts, self._graphs = parts, graphs
        self.cache: GraphCache[None] = GraphCache(parts.device, max_graphs=1, capture_after=0)

    def __call__(self) -> None:
        """Update with the group's gradients."""
        parts, group = self._parts, self._parts.group
        if self._graphs.why is not None:
            parts.run_update()
            return
        parts.update.write_rates()
        # By the gradients' addresses: a graph would neither use nor clear others.
        key = tuple(p.grad.data_ptr() if p.grad is not None else 0 for p in group.parameters())
        update = self.cache.find(key)
        if update is None:
            update = self._capture(key)
        if update is None:
            parts.run_update()
        else:
            group.begin_update()
            update.replay([])
            group.end_update()

    def _capture(self, key: Hashable) -> CapturedWork[None] | None:
        """Capture the update. Returns None if it must run eagerly."""
        parts, guards = self._parts, self._graphs.guards
        assert guards is not None
        with guards.restoring_host_state() as undo:
            before = StateBeforeCapture(parts.state)
            try:
                update = self.cache.capture(key, (), lambda _: parts.update(parts.group))
                if before.optimizer_changed():
                    self.cache.drop(key)
                    return None
                guards.require_unchanged()
            except CaptureError as problem:
                self._graphs.give_up(describe_failure(problem))
                return None
            finally:
                before.restore()
            undo.pop_all()
        return update
