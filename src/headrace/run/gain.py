"""What graphs gain in a script, and whether they stay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.capture import MAX_SHAPES, Counts, Gain, PartTally
from headrace.device import Device
from headrace.run.parts import Part
from headrace.run.settings import RunSettings


class ScriptGain:
    """Compares a script's steps with graphs and without, once for the parts that train together.
    What comes after the choice is compared anew. `tell` shows a line to the user."""

    def __init__(self, settings: RunSettings, tell: Callable[[str], object]) -> None:
        self._settings, self._tell = settings, tell
        #: The parts that are compared now.
        self._parts: list[Part] = []
        self._gain: Gain | None = None
        self._is_used = True
        #: What was measured and chosen, in words.
        self.decisions: list[str] = []

    def add(self, part: Part, device: Device) -> None:
        """A part was sped up."""
        if not self._settings.chooses:
            return
        if self._gain is None:
            self._gain = Gain(
                device,
                shapes=MAX_SHAPES,
                use_graphs=self._use,
                counts=self._counts,
                decided=self._decided,
            )
            self._is_used = True
        self._parts.append(part)
        part.use_graphs(self._is_used)

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made its update."""
        if self._gain is not None:
            self._gain.updated(optimizer)

    def _use(self, used: bool) -> None:
        if used != self._is_used:
            self._is_used = used
            for part in self._parts:
                part.use_graphs(used)

    def _counts(self) -> Counts:
        return PartTally.counts(piece for part in self._parts for _, piece in part.pieces())

    def _decided(self, pays: bool, decision: str) -> None:
        self._tell(decision)
        self.decisions.append(decision)
        parts, self._parts, self._gain = self._parts, [], None
        for part in parts:
            if not pays:
                part.give_up()
