"""The values of launched batches, on their way back to the loop: in order, each exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.engine.deferred import (
    DeferredScalars,
    DeferredValues,
    Scalar,
    SummedScalars,
    to_be_restored,
)
from headrace.engine.lanes import Lanes
from headrace.engine.stages import Launched
from headrace.engine.weighted_sum import WeightedSum


class Recorder:
    """Values of one pass. Those that were `restored`, which a stored state had not handed out, come
    first. What has arrived and was not handed out is part of the state."""

    def __init__(
        self,
        scalars: DeferredScalars | SummedScalars,
        lanes: Lanes,
        *,
        restored: tuple[DeferredValues, ...] = (),
        loss: WeightedSum,
    ) -> None:
        self._scalars, self._lanes = scalars, lanes
        #: All that have arrived.
        self.entries: list[DeferredValues] = list(restored)
        self._looked_at = self._handed_out = 0
        self._summed, self._loss = 0, loss

    def push(self, launched: Launched) -> None:
        """Keep a batch's values on the device, to be read back with others."""
        if launched.values is not None:
            self._add(launched.fetched.index, launched.values)

    def send(self) -> None:
        """Once the batch is counted: send values on their way, if there are enough."""
        if self._scalars.is_full:
            self.flush()

    def amend(self, values: Mapping[str, Scalar]) -> None:
        """The pass ends. `values` are what a last partial group's update says of the group's last
        batch: none, where updates are not guarded."""

    def awaits(self) -> bool:
        """Whether values are still on their way. Never blocks."""
        return self._scalars.awaits()

    def has_news(self) -> bool:
        """Whether values have arrived that were not handed out. Never blocks."""
        self.entries += self._scalars.ready()
        return len(self.entries) > self._handed_out

    def drain(self, reason: str = "losses") -> None:
        """Wait for all values that are on their way."""
        self.flush()
        self.entries += self._scalars.drain(reason)

    def flush(self) -> None:
        """Send what was pushed so far on its way."""
        with self._lanes.on(self._lanes.forward):
            self._scalars.flush()

    def unseen(self) -> list[DeferredValues]:
        """What has arrived since this was called last."""
        found = self.entries[self._looked_at :]
        self._looked_at = len(self.entries)
        return found

    def hand_out(self) -> tuple[DeferredValues, ...]:
        """What has arrived and was not handed out: now it is."""
        found = tuple(self.entries[self._handed_out :])
        self._handed_out = len(self.entries)
        return found

    def loss(self) -> WeightedSum:
        """The epoch's loss so far: of values that were handed out, before this pass and in it."""
        self._loss = self._loss.plus(self.entries[self._summed : self._handed_out], "loss")
        self._summed = self._handed_out
        return self._loss

    @property
    def pending(self) -> int:
        """Batches whose values have not arrived."""
        return self._scalars.pending

    def state(self) -> list[dict[str, Any]]:
        """What was not handed out yet, those of a restored state among it."""
        return to_be_restored(self.entries[self._handed_out :]) + self._scalars.state()

    def abandon(self) -> None:
        """Leave out what was not sent yet: another rank will not take part in its sum any more."""
        self._scalars.abandon()

    def close(self) -> None:
        with self._lanes.on(self._lanes.forward):
            self._scalars.close()

    def _add(self, index: int, values: Mapping[str, Scalar]) -> None:
        with self._lanes.on(self._lanes.forward):
            self._scalars.add(index, values)


class HoldingRecorder(Recorder):
    """Where updates are guarded: whether a batch's update was left out is one of its values. So the
    last batch of an open group is held back until the group's update is known, or another batch has
    joined the group."""

    def __init__(self, *args: Any, held: DeferredValues | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: tuple[int, Mapping[str, Scalar]] | None = None
        if held is not None:
            self._held = held.step, held.values

    def push(self, launched: Launched) -> None:
        self._send_held()
        if launched.updated or launched.values is None:
            super().push(launched)
            return
        with self._lanes.on(self._lanes.forward):
            values = {  # copies: a replay writes its results anew
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in launched.values.items()
            }
        self._held = launched.fetched.index, values

    def amend(self, values: Mapping[str, Scalar]) -> None:
        if self._held is not None:
            index, known = self._held
            self._held = index, {**known, **values}
            self._send_held()

    def awaits(self) -> bool:
        return super().awaits() or self._held is not None

    @property
    def pending(self) -> int:
        return super().pending + (self._held is not None)

    def state(self) -> list[dict[str, Any]]:
        stored = super().state()
        if self._held is not None:
            index, values = self._held
            tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
            numbers = {n: float(v) for n, v in values.items() if n not in tensors}
            rows = None
            if tensors:
                with self._lanes.on(self._lanes.forward):
                    rows = torch.stack([v.reshape(()).double() for v in tensors.values()])[None]
            names = list(tensors)
            stored.append({"steps": [index], "numbers": [numbers], "names": names, "rows": rows})
        return stored

    def _send_held(self) -> None:
        if self._held is not None:
            index, values = self._held
            self._add(index, values)
            self._held = None
