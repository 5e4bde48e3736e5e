"""A batch that fails leaves nothing behind: for those who want to store the state then.

What a forward changes besides its result (batch norm's means, say) goes back, and so do the random
generators. Which buffers change is told by their versions, which PyTorch counts: before an epoch's
first batch all are kept, later on those that some batch has changed. Batch norm's kernels do not
count, so what has the names of its buffers is always kept.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from headrace.data import Fetched, rng_states, set_rng_states
from headrace.device import Device
from headrace.engine.lanes import Lanes
from headrace.engine.stages import Finished, Launched, Step

_UNCOUNTED = ("running_mean", "running_var", "num_batches_tracked")


class RestoringStep:
    """A step, around which buffers and random generators are kept."""

    def __init__(self, step: Step, buffers: KeptBuffers, device: Device, lanes: Lanes) -> None:
        self._step, self._buffers, self._device, self._lanes = step, buffers, device, lanes
        self._random: dict[str, Any] | None = None  # before the batch under way

    def __call__(self, fetched: Fetched) -> Launched:
        with self._lanes.on(self._lanes.forward):
            self._buffers.keep()
        self._random = rng_states(self._device)
        launched = self._step(fetched)
        self._random = None
        return launched

    def finish(self) -> Finished | None:
        return self._step.finish()

    def recover(self, counted: tuple[int, int]) -> bool:
        whole, random = self._step.recover(counted), self._random
        if random is None:  # no batch was under way
            return whole
        self._random = None
        set_rng_states(self._device, random)
        return self._buffers.put_back() and whole


class KeptBuffers:
    """A model's buffers as they were before the batch at hand."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._live: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._uncounted: set[int] = set()
        self._all = False

    def begin_epoch(self) -> None:
        """Others may have been made, or loaded, since."""
        self._live = None
        self._copies = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Before a batch, on the stream that runs it."""
        if self._live is None:
            found = self._found()
            self._live = list(found.values())
            self._uncounted = {at for at, name in enumerate(found) if name.endswith(_UNCOUNTED)}
            self._versions = [buffer._version for buffer in self._live]
            self._copies = {at: buffer.clone() for at, buffer in enumerate(self._live)}
            self._all = True
            return
        changed = self._changed()
        if self._all:
            self._copies = {at: self._copies[at] for at in self._uncounted.union(changed)}
            self._all = False
        for at in changed:
            self._versions[at] = self._live[at]._version
            if at not in self._copies:
                self._copies[at] = torch.empty_like(self._live[at])
        if self._copies:
            live = [self._live[at] for at in self._copies]
            torch._foreach_copy_(list(self._copies.values()), live)

    @torch.no_grad()
    def put_back(self) -> bool:
        """After a batch that failed, on the same stream. Whether all is as it was before it."""
        if self._live is None:
            return True  # nothing was begun
        found = list(self._found().values())
        same = len(found) == len(self._live) and all(map(operator.is_, found, self._live))
        known = same and all(at in self._copies for at in self._changed())
        if self._copies:
            live = [self._live[at] for at in self._copies]
            torch._foreach_copy_(live, list(self._copies.values()))
        self.begin_epoch()
        return known

    def _found(self) -> dict[str, torch.Tensor]:
        named = self._model.named_buffers()
        return {name: buffer for name, buffer in named if not buffer.is_inference()}

    def _changed(self) -> list[int]:
        live = self._live or []
        return [at for at, buffer in enumerate(live) if buffer._version != self._versions[at]]
