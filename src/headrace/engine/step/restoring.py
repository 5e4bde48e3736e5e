"""Undoes a failed batch, so that `on_error` can store the state from before it.

A forward may change buffers (batch norm's means, say) and random generators. Both are restored.
A tensor's version counter shows which buffers change: all are saved before the first batch, later
only those that some batch has changed. Batch norm's kernels do not advance the counter, so
buffers that are named like its buffers are always saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from headrace.capture import same_entries
from headrace.data import Fetched, rng_states, set_rng_states
from headrace.device import Device
from headrace.engine.stages import Finished, Launched, Standing, Step
from headrace.engine.streams.lanes import Lanes

_UNVERSIONED = ("running_mean", "running_var", "num_batches_tracked")


class RestoringStep:
    """A step that restores buffers and random generators after a batch that failed."""

    def __init__(self, step: Step, buffers: SavedBuffers, device: Device, lanes: Lanes) -> None:
        self._step, self._buffers, self._device, self._lanes = step, buffers, device, lanes
        self._random: dict[str, Any] | None = None  # before the current batch

    def __call__(self, fetched: Fetched) -> Launched:
        with self._lanes.on(self._lanes.forward):
            self._buffers.save()
        self._random = rng_states(self._device)
        launched = self._step(fetched)
        self._random = None
        return launched

    def finish(self) -> Finished | None:
        return self._step.finish()

    def recover(self, counted: Standing) -> bool:
        whole, random = self._step.recover(counted), self._random
        if random is None:  # the error came between two batches
            return whole
        self._random = None
        set_rng_states(self._device, random)
        return self._buffers.restore() and whole


class SavedBuffers:
    """Copies of a model's buffers from before the current batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._live: list[torch.Tensor] | None = None
        self._has_same_entries: Callable[[], bool] = bool
        self._versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._unversioned: set[int] = set()
        self._saved_all = False

    def begin_epoch(self) -> None:
        """Look for buffers again if the user has made or loaded others since."""
        if not self._has_same_entries():
            self._forget()

    @torch.no_grad()
    def save(self) -> None:
        """Call before a batch, on the stream that runs it."""
        if self._live is None:
            found, self._has_same_entries = self._find(), same_entries(self._model)
            self._live = list(found.values())
            self._unversioned = {at for at, name in enumerate(found) if name.endswith(_UNVERSIONED)}
            self._versions = [buffer._version for buffer in self._live]
            self._copies = {at: buffer.clone() for at, buffer in enumerate(self._live)}
            self._saved_all = True
            return
        changed = self._changed()
        if self._saved_all:
            self._copies = {at: self._copies[at] for at in self._unversioned.union(changed)}
            self._saved_all = False
        for at in changed:
            self._versions[at] = self._live[at]._version
            if at not in self._copies:
                self._copies[at] = torch.empty_like(self._live[at])
        if self._copies:
            live = [self._live[at] for at in self._copies]
            torch._foreach_copy_(list(self._copies.values()), live)

    @torch.no_grad()
    def restore(self) -> bool:
        """Call after a batch that failed, on the same stream. Returns whether all buffers are as
        they were before it."""
        if self._live is None:
            return True  # no batch has run
        found = list(self._find().values())
        same = len(found) == len(self._live) and all(map(operator.is_, found, self._live))
        complete = same and all(at in self._copies for at in self._changed())
        if self._copies:
            live = [self._live[at] for at in self._copies]
            torch._foreach_copy_(live, list(self._copies.values()))
        self._forget()
        return complete

    def _forget(self) -> None:
        self._live = None
        self._copies = {}

    def _find(self) -> dict[str, torch.Tensor]:
        named = self._model.named_buffers()
        return {name: buffer for name, buffer in named if not buffer.is_inference()}

    def _changed(self) -> list[int]:
        live = self._live or []
        return [at for at, buffer in enumerate(live) if buffer._version != self._versions[at]]
