"""Hands the values of launched batches back to the loop: in order, each exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from headrace.engine.stages import Launched
from headrace.engine.streams.lanes import Lanes
from headrace.engine.values.arrived import DeferredValues, Scalar, state_of_values
from headrace.engine.values.deferred import DeferredScalars
from headrace.engine.values.weighted_sum import WeightedSum


class Recorder:
    """The values of one pass. First come those `restored` from a stored state that had not handed
    them out. Values that were not handed out yet are part of the state. `loss` is the epoch's sum
    over what was handed out before this pass."""

    def __init__(
        self,
        scalars: DeferredScalars,
        lanes: Lanes,
        *,
        restored: tuple[DeferredValues, ...] = (),
        loss: WeightedSum,
    ) -> None:
        self._scalars, self._lanes = scalars, lanes
        #: All values that have arrived in this pass, and those restored.
        self.entries: list[DeferredValues] = list(restored)
        # How many of them were returned by `unseen`, handed out, and added to the epoch's loss.
        self._seen = self._handed_out = self._summed = 0
        self._loss = loss
        #: Outputs of batches whose values were not handed out yet, by the batch's index.
        self._outputs: dict[int, Any] = {}

    def push(self, launched: Launched) -> None:
        """Keep a batch's values on the device, to be read back with others."""
        if launched.outputs is not None:
            self._outputs[launched.fetched.number] = launched.outputs
        if launched.values is not None:
            self._add(launched.fetched.number, launched.values)

    def send(self) -> None:
        """Start the copy to the host if enough values were pushed. Call it after the batch was
        counted as trained on: if the copy raises, the batch still counts."""
        if self._scalars.is_full:
            self.flush()

    def amend(self, values: Mapping[str, Scalar]) -> None:
        """Call at the end of a pass. `values` are what the update of a last partial group adds to
        the values of its last batch: nothing here, since these updates are not guarded."""

    def has_outstanding(self) -> bool:
        """Whether some values have not arrived yet. Never blocks."""
        return self._scalars.has_outstanding()

    def has_new_values(self) -> bool:
        """Collect the values that have arrived. Returns whether some were not handed out yet. Never
        blocks."""
        self.entries += self._scalars.ready()
        return len(self.entries) > self._handed_out

    def drain(self, reason: str = "losses") -> None:
        """Wait for all values."""
        self.flush()
        self.entries += self._scalars.drain(reason)

    def flush(self) -> None:
        """Start the copy of all values pushed so far."""
        with self._lanes.on(self._lanes.forward):
            self._scalars.flush()

    def unseen(self) -> list[DeferredValues]:
        """Values that have arrived since the last call."""
        found = self.entries[self._seen :]
        self._seen = len(self.entries)
        return found

    def hand_out(self) -> tuple[DeferredValues, ...]:
        """Hand out the values that have arrived and were not handed out yet, with the outputs of
        their batches. The recorder does not keep those: they may take much memory."""
        found = tuple(self.entries[self._handed_out :])
        self._handed_out = len(self.entries)
        if not self._outputs:
            return found
        return tuple(replace(one, outputs=self._outputs.pop(one.step, None)) for one in found)

    def loss(self) -> WeightedSum:
        """The epoch's loss over all values handed out so far, before this pass and in it."""
        self._loss = self._loss.plus(self.entries[self._summed : self._handed_out], "loss")
        self._summed = self._handed_out
        return self._loss

    @property
    def pending(self) -> int:
        """Batches whose values were pushed and not collected by `has_new_values` or `drain` yet."""
        return self._scalars.pending

    def state(self) -> list[dict[str, Any]]:
        """The values not handed out yet, in a form that can be stored."""
        return state_of_values(self.entries[self._handed_out :]) + self._scalars.state()

    def abandon(self) -> None:
        """Drop values whose copy has not started: other ranks no longer take part in their sum."""
        self._scalars.abandon()

    def close(self) -> None:
        with self._lanes.on(self._lanes.forward):
            self._scalars.close()

    def _add(self, index: int, values: Mapping[str, Scalar]) -> None:
        with self._lanes.on(self._lanes.forward):
            self._scalars.add(index, values)


class HoldingRecorder(Recorder):
    """A recorder for guarded updates, where a batch's values say whether its update was skipped.
    So it holds the last batch of an open group back until the group's update is launched, or until
    another batch joins the group. `held` is such a batch from a stored state."""

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
        super().push(launched._replace(values=None))  # only the outputs
        with self._lanes.on(self._lanes.forward):
            values = {  # copies: the next replay overwrites its results
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in launched.values.items()
            }
        self._held = launched.fetched.number, values

    def amend(self, values: Mapping[str, Scalar]) -> None:
        if self._held is not None:
            index, earlier = self._held
            self._held = index, {**earlier, **values}
            self._send_held()

    def has_outstanding(self) -> bool:
        return super().has_outstanding() or self._held is not None

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
                self._lanes.make_caller_wait()  # who asks for the state may read it at once
            names = list(tensors)
            stored.append({"steps": [index], "numbers": [numbers], "names": names, "rows": rows})
        return stored

    def _send_held(self) -> None:
        if self._held is not None:
            index, values = self._held
            self._add(index, values)
            self._held = None
