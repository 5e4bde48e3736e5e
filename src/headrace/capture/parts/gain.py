"""What graphs gain in a loop: its real steps, with graphs and without, in turns."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from headrace.capture.parts.turns import Turns
from headrace.capture.reports.part import Counts
from headrace.device import Device

#: Another optimizer ends a step if so many updates of others have followed the last one's.
_MAX_OTHERS = 16


class Gain:
    """Compares a loop's steps with graphs and without, and keeps what is faster. A step is all that
    the loop does from one update of an optimizer to its next. `use_graphs` switches graphs on or
    off, `counts` says what was replayed, `decided` is called once the gain is known: with
    whether graphs are faster, and with what was measured, in words."""

    def __init__(
        self,
        device: Device,
        *,
        shapes: int,
        use_graphs: Callable[[bool], None],
        counts: Callable[[], Counts],
        decided: Callable[[bool, str], None],
    ) -> None:
        self._turns = Turns(device, shapes=shapes)
        self._use_graphs, self._counts, self._decided = use_graphs, counts, decided
        self._before = Counts()
        self._last: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._others = 0

    @property
    def decision(self) -> str | None:
        """What was measured and chosen; None while that goes on."""
        return self._turns.decision

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made its update."""
        if self._turns.pays is not None or not self._ends_step(optimizer):
            return
        now = self._counts()
        has_decided = self._turns.end(replayed=now.is_replay_after(self._before))
        self._before = now
        self._use_graphs(self._turns.begin())
        if has_decided:
            self._decided(bool(self._turns.pays), str(self._turns.decision))

    def _ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this update ends a step: the optimizer that ended the last one ends the next,
        unless it has gone."""
        last = self._last()
        if last is not optimizer:
            self._others += 1
            if last is not None and self._others < _MAX_OTHERS:
                return False
            self._last = weakref.ref(optimizer)
            self._turns.begin_pass()
        self._others = 0
        return True
