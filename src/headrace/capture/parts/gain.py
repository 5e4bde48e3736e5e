"""What graphs gain in a loop: its real steps, with graphs and without, in turns."""

from __future__ import annotations

from collections.abc import Callable

from headrace.capture.parts.turns import Turns
from headrace.device import Device


class Gain:
    """Measures the gain. A step is all that the loop does from one update of its first optimizer to
    the next. `use_graphs` switches graphs on or off, `replays` counts what was replayed."""

    def __init__(
        self, device: Device, use_graphs: Callable[[bool], None], replays: Callable[[], int]
    ) -> None:
        self._turns = Turns(device)
        self._use_graphs = use_graphs
        self._replays = replays
        self._before = 0

    @property
    def text(self) -> str:
        """What was measured, or how that is going."""
        return self._turns.decision or "the gain is still being measured, in turns"

    def step_ends(self) -> None:
        """The first optimizer has made its update. Once the gain is known, the faster way stays."""
        if self._turns.pays is None:
            now = self._replays()
            self._turns.end(replayed=now > self._before)
            self._before = now
            self._use_graphs(self._turns.begin())
