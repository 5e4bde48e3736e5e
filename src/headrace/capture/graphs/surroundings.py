"""What a captured function uses besides its arguments, from one search for it to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.capture.graphs.work import Capturable
from headrace.capture.guards.guards import MEMORY_MOVES, Guards
from headrace.capture.state.memory import StateMemory
from headrace.capture.state.state import StepState


class Surroundings:
    """The values and the memory that graphs were captured with, or will be."""

    def __init__(self, work: Capturable[Any, Any, Any]) -> None:
        self._work = work
        #: None: what the function uses is searched for before the next call.
        self.guards: Guards | None = None
        # Of the captured graphs: the memory they use.
        self._memory: StateMemory | None = None

    def look(self, drop: Callable[[], None], *, after_new_shape: bool) -> bool:
        """Look before a call whether all is as it was, and `drop` the graphs if not. Returns
        whether it is known what the function uses. Raises `CaptureError` if that prevents a
        capture."""
        guards = self.guards
        if guards is None:
            return self._search()
        moved = guards.modules_changed() if self._memory is None else self._memory.has_moved()
        replaced = MEMORY_MOVES if moved else self._work.replaced()
        if guards.check(replaced, after_new_shape=after_new_shape) or moved:
            drop()
        return self._search_again(guards) if moved else True

    def _search(self) -> bool:
        state = self._work.find_state()
        if state is None:
            return False
        self.guards = Guards(state, self._work.settings)
        self.guards.check()
        self._work.found(self.guards)
        return True

    def _search_again(self, guards: Guards) -> bool:
        """The function uses other memory than graphs do, or has other modules than were found."""
        self._work.memory_moves()
        state = self._work.find_state()
        if state is None:
            self.guards = None
            return False
        guards.find_again(state)
        guards.find()
        self._work.found(guards)
        return True

    def state(self) -> StepState | None:
        """What the function uses, as far as that is known."""
        return self._work.find_state() if self.guards is None else self.guards.state

    def known_tensors(self) -> list[torch.Tensor]:
        """Tensors that the function may read: other checks notice if one is replaced."""
        found = self._work.tensors()
        return found if self.guards is None else found + self.guards.tensors()

    def note_capture(self, state: StepState) -> None:
        """A graph has the present values and memory."""
        assert self.guards is not None
        self._memory = StateMemory(state, (*self._work.held(), *self.guards.tensors()))
        self.guards.note_capture()

    def forget_graphs(self) -> None:
        """There are no graphs any more."""
        self._memory = None

    def forget(self) -> None:
        """Search again before the next call."""
        self.guards = None
