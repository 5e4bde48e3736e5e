"""What the engine does about losses and gradients that are NaN or infinite.

report         warn once and train on, as a plain loop does
stop           raise a `NonFiniteError` that names the batch, when its loss has arrived on the host
skip           skip their updates, and warn about each
tolerate:N     skip N updates, then stop

The host reads nothing back for this. Under `skip` and `tolerate`, a flag on the device makes a
fused optimizer skip the update, as `GradScaler` does. After N skipped updates the flag stays set,
so the weights no longer change until the host learns of it. An optimizer that is not fused cannot
read the flag, so the host reads it once per update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.values.arrived import DeferredValues
from headrace.errors import NonFiniteError, StepError
from headrace.parallel import SINGLE, Ranks

#: The name of the value that says whether a batch's update was skipped.
SKIPPED = "skipped"
_UNLIMITED = 2**30


@dataclass(frozen=True, slots=True)
class NonFinitePolicy:
    """What to do about values that are not finite: skip up to `max_skipped` updates (None: skip
    none), and stop at the next one if `stops`."""

    name: str
    max_skipped: int | None = None
    stops: bool = False

    @classmethod
    def of(cls, text: str) -> NonFinitePolicy:
        """The policy that `Engine(on_nonfinite=text)` names."""
        if text == "report":
            return cls(text)
        if text == "stop":
            return cls(text, stops=True)
        if text == "skip":
            return cls(text, max_skipped=_UNLIMITED)
        kind, _, digits = str(text).partition(":")
        if kind == "tolerate" and digits.isascii() and digits.isdigit() and len(digits) < 10:
            return cls(text, max_skipped=int(digits), stops=True)
        raise StepError(
            f"on_nonfinite = {text!r}: expected report, stop, skip, or tolerate:N with a whole "
            "number N"
        )


class NonFiniteWatch:
    """Checks values that have arrived on the host. Warns, or ends the run, as the policy says."""

    def __init__(self, policy: NonFinitePolicy, device: Device) -> None:
        self._policy = policy
        self._device = device
        #: Skipped updates among the values that have arrived.
        self.skipped = 0

    def restore(self, skipped: int) -> None:
        """Go on counting the skipped updates from a stored state."""
        self.skipped = skipped

    def check(self, entries: Iterable[DeferredValues], epoch: int) -> None:
        """Check each batch's values once. If one ends the run, none of `entries` is counted: a
        resumed run checks them again."""
        before = self.skipped
        try:
            for entry in entries:
                # One sum is faster than a check of each value. It may overflow: `_check` is exact.
                if entry.values.get(SKIPPED) or not math.isfinite(sum(entry.values.values())):
                    self._check(entry, epoch)
        except NonFiniteError:
            self.skipped = before
            raise

    def _check(self, entry: DeferredValues, epoch: int) -> None:
        skipped = entry.values.get(SKIPPED, 0.0) == 1.0
        if not entry.non_finite and not skipped:
            return
        what = f"{', '.join(entry.non_finite) or 'a gradient'} not finite"
        where = f"batch {entry.step + 1} of epoch {epoch + 1}"
        # An infinite metric is not an error, nor is the loss of an empty batch (weight 0): 0/0.
        bad_loss = "loss" in entry.non_finite and entry.values.get("weight") != 0
        bad, max_skipped = skipped or bad_loss, self._policy.max_skipped
        # The fp16 scaler skips such an update by itself, without a value that says so.
        self.skipped += skipped or (bad_loss and SKIPPED not in entry.values)
        if self._policy.stops and bad and (max_skipped is None or self.skipped > max_skipped):
            after = f"; {max_skipped} such updates were skipped before" if max_skipped else ""
            raise NonFiniteError(
                f"{what} at {where}{after}. A lower learning rate, clip_norm or a look at that "
                "batch may help; on_nonfinite='skip' skips such updates",
                epoch=epoch,
                batch=entry.step,
            )
        if max_skipped is None:
            self._device.warn_once("non-finite", "%s at %s", what, where)
        else:
            outcome = "; its update is skipped" if skipped else ""
            self._device.warn_once(f"non-finite {where}", "%s at %s%s", what, where, outcome)


class UpdateGuard:
    """Decides on the device whether to skip an update. Graphs can capture it."""

    def __init__(self, device: Device, max_skipped: int, on_device: bool) -> None:
        def zero() -> torch.Tensor:
            return torch.zeros((), dtype=torch.float32, device=device.torch_device)

        self._device = device
        self._max_skipped = max_skipped
        self._on_device = on_device
        self._bad = zero()  # how many checks of this group have failed
        self._count = zero()  # bad updates so far
        self._skip = zero()  # 1 if the last update was to be skipped
        self._zero = zero()  # always 0

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that it keeps on the device."""
        return [self._bad, self._count, self._zero, self._skip]

    def check_loss(self, loss: torch.Tensor) -> None:
        """Check the loss of each batch in a group."""
        self._bad.add_(loss.detach().isfinite().logical_not())

    def check_gradients(
        self,
        gradients: list[torch.Tensor],
        norm: torch.Tensor | None,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Check a group's gradients before its update. `norm` is their norm, if clipping has
        computed it. If one rank finds a value that is not finite, all ranks skip the update."""
        if norm is None and gradients:
            largest = torch._foreach_norm(gradients, torch.inf)
            norm = torch.stack([one.float() for one in largest])
        if norm is not None:
            self._bad.add_(norm.detach().isfinite().all().logical_not())
        ranks.all_reduce(self._bad).wait(self._device.ledger, "ranks")
        self._bad.clamp_(max=1)
        self._count.add_(self._bad)
        self._skip.copy_(torch.maximum(self._bad, (self._count > self._max_skipped).float()))
        self._bad.zero_()

    @contextmanager
    def applied_to(self, optimizer: Any) -> Iterator[bool]:
        """Inside the block a fused optimizer's `step()` skips a bad update. Yields whether to call
        `step()` at all."""
        if not self._on_device:
            with self._device.ledger.waiting("non_finite"):
                skip = bool(self._skip)  # a wait: this optimizer cannot read the flag on the device
            yield not skip
            return
        optimizer.found_inf = self._skip
        try:
            yield True
        finally:
            del optimizer.found_inf

    def values(self, *, updated: bool) -> dict[str, torch.Tensor]:
        """The value that the last batch reports: whether its update was skipped, if it had one."""
        return {SKIPPED: self._skip if updated else self._zero}

    def snapshot(self) -> torch.Tensor:
        """What it has found in the group so far, for `restore`."""
        return self._bad.clone()

    def restore(self, snapshot: torch.Tensor) -> None:
        """Forget what it has found in the group since `snapshot`."""
        self._bad.copy_(snapshot)

    def forget(self) -> None:
        """Forget what it has found in the group."""
        self._bad.zero_()

    def state_dict(self, *, with_group: bool = True) -> dict[str, torch.Tensor]:
        """Its state. `with_group=False` leaves out what it has found in a group that failed."""
        return {"bad": self._bad if with_group else self._zero, "count": self._count}

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        for name, own in (("bad", self._bad), ("count", self._count)):
            own.zero_() if state is None else own.copy_(state[name])
