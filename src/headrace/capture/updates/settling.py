"""What an optimizer's graphs share until it is replaced, and which steps may be captured."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from headrace.capture.guards.read_values import ReadValues
from headrace.capture.state.capturable_optimizer import CapturableOptimizer
from headrace.capture.state.gradient_copies import GradientCopies
from headrace.capture.state.memory import StateMemory
from headrace.capture.state.state import StepState
from headrace.errors import CaptureError

# So many kinds of steps may come in turns: a loop may train one of its tasks after another.
_MAX_CYCLE = 8
# After this many steps in a row with settings or gradients of their own, none is captured any more.
_MAX_UNSETTLED = 20
# After this many in which only the gradients' memory is another, they are copied.
_MOVES_BEFORE_COPIES = 5


class UpdateBasis:
    """What an optimizer's graphs share, until something of it is replaced."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        # PyTorch's own step reads nothing that other checks do not compare; the user's may.
        self._code = ReadValues(replace(state, function=None))
        self.capturable = CapturableOptimizer(state.device, *state.optimizers)
        self.pool = state.device.graph_pool()
        self.copies = GradientCopies(state.updated())
        self._memory = StateMemory(self._state, shapes=False)

    def note_capture(self) -> None:
        """Graphs now use the present memory."""
        self._memory = StateMemory(self._state, shapes=False)

    def difference(self) -> str | None:
        """What is not as it was when graphs were captured."""
        if self._memory.has_moved():
            return "its parameters or its state are replaced"
        changed = self._code.changed()
        return None if changed is None else str(changed)


class Settling:
    """Which steps may be captured: those that have the settings and the gradients of one of the
    last steps, or settings that come again and again while the gradients' memory is always another.
    The first steps, `early` in number, may not."""

    def __init__(self, early: int) -> None:
        self._early = early
        self._last: deque[tuple[Hashable, list[int]]] = deque(maxlen=_MAX_CYCLE)
        self._unsettled = 0
        self._moves: Counter[Hashable] = Counter()

    def is_early(self) -> bool:
        """Whether this step is one of the first. Counts it."""
        self._early -= 1
        return self._early >= 0

    def has_settled(self, key: Hashable, gradients: list[Any]) -> bool:
        """Whether a step that has no graph may get one."""
        if (now := (key, list(map(id, gradients)))) in self._last:
            self._unsettled = 0
            return True
        self._last.append(now)
        self._unsettled += 1
        if self._unsettled >= _MAX_UNSETTLED:
            raise CaptureError(
                "each step finds other settings, or its gradients in other memory as an eager "
                "backward leaves them, and a graph would use the old ones"
            )
        return False

    def only_gradients_move(self, key: Hashable) -> bool:
        """Whether a step that has not settled may be captured with copies of its gradients. `key`
        is what such a graph depends on."""
        if len(self._moves) > _MAX_UNSETTLED:
            self._moves.clear()
        self._moves[key] += 1
        return self._moves[key] > _MOVES_BEFORE_COPIES

    def forget(self) -> None:
        self._last.clear()
        self._moves.clear()
