"""Losses and gradients that are NaN or infinite: noticed on the device, answered by a policy.

report         say so once; train on (what a plain loop does)
stop           end with a `NonFiniteError` that names the batch, as soon as its loss has come back
skip           leave out the updates they would make; each is reported
tolerate:N     skip so many, then stop

Nothing is read back for it: with `skip` and `tolerate` a flag on the device tells a fused optimizer
to leave everything as it is, the way `GradScaler` does. After the last one that is tolerated the
flag stays up, so the weights stay those of the moment before, however late the host hears of it.
Optimizers that are not fused cannot be told on the device: then the host asks, once an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device
from headrace.engine.deferred import DeferredValues
from headrace.errors import NonFiniteError, StepError
from headrace.parallel import SINGLE, Ranks

#: The name of the value that says whether a batch's update was left out.
SKIPPED = "skipped"
_UNLIMITED = 2**30


@dataclass(frozen=True, slots=True)
class NonFinitePolicy:
    """`most` are the updates that may be skipped; None: nothing is skipped."""

    name: str
    most: int | None = None
    stops: bool = False

    @classmethod
    def of(cls, text: str) -> NonFinitePolicy:
        if text == "report":
            return cls(text)
        if text == "stop":
            return cls(text, stops=True)
        if text == "skip":
            return cls(text, most=_UNLIMITED)
        kind, _, digits = str(text).partition(":")
        if kind == "tolerate" and digits.isascii() and digits.isdigit() and len(digits) < 10:
            return cls(text, most=int(digits), stops=True)
        raise StepError(
            f"on_nonfinite = {text!r}: expected report, stop, skip, or tolerate:N with a whole "
            "number N"
        )


class NonFiniteWatch:
    """The host's part: reports each one, and ends the run where the policy says so."""

    def __init__(self, policy: NonFinitePolicy, device: Device) -> None:
        self._policy = policy
        self._device = device
        #: Updates that were left out, of those whose values have come back.
        self.skipped = 0

    def look(self, entries: Iterable[DeferredValues], epoch: int) -> None:
        """Once at each batch whose values have come back. If one of them ends the run, none of
        them was counted: they will be looked at again."""
        before = self.skipped
        try:
            for entry in entries:
                # A sum of finite values that is not finite itself is looked at, too.
                if entry.values.get(SKIPPED) or not math.isfinite(sum(entry.values.values())):
                    self._look(entry, epoch)
        except NonFiniteError:
            self.skipped = before
            raise

    def _look(self, entry: DeferredValues, epoch: int) -> None:
        skipped = entry.values.get(SKIPPED, 0.0) == 1.0
        if not entry.non_finite and not skipped:
            return
        what = f"{', '.join(entry.non_finite) or 'a gradient'} not finite"
        where = f"batch {entry.step} of epoch {epoch}"
        # A batch of weight 0 has nothing in it: its loss is often 0/0. Metrics may be infinite.
        bad_loss = "loss" in entry.non_finite and entry.values.get("weight") != 0
        bad, most = skipped or bad_loss, self._policy.most
        # fp16's scaler leaves such an update out by itself, and does not say so.
        self.skipped += skipped or (bad_loss and SKIPPED not in entry.values)
        if self._policy.stops and bad and (most is None or self.skipped > most):
            after = f"; {most} such updates were left out before" if most else ""
            raise NonFiniteError(
                f"{what} at {where}{after}. A lower learning rate, clip_norm or a look at that "
                "batch may help; on_nonfinite='skip' leaves such updates out",
                epoch=epoch,
                batch=entry.step,
            )
        if most is None:
            self._device.say_once("non-finite", "%s at %s", what, where)
        else:
            left_out = "; its update is left out" if skipped else ""
            self._device.say_once(f"non-finite {where}", "%s at %s%s", what, where, left_out)


class UpdateGuard:
    """The device's part: whether the next update is to be left out. All of it can be captured."""

    def __init__(self, device: Device, most: int, on_device: bool) -> None:
        def zero() -> torch.Tensor:
            return torch.zeros((), dtype=torch.float32, device=device.torch_device)

        self._device = device
        self._most = most
        self._on_device = on_device
        self._bad, self._count, self._never = zero(), zero(), zero()
        self._shut = zero()

    def tensors(self) -> list[torch.Tensor]:
        """All that it keeps on the device."""
        return [self._bad, self._count, self._never, self._shut]

    def see_loss(self, loss: torch.Tensor) -> None:
        """Of each batch in a group."""
        self._bad.add_(loss.detach().isfinite().logical_not())

    def see_gradients(
        self,
        gradients: list[torch.Tensor],
        norm: torch.Tensor | None,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Of a group, before its update; their norm if it is known anyway. What one rank sees,
        all of them leave out."""
        if norm is None and gradients:
            largest = torch._foreach_norm(gradients, torch.inf)
            norm = torch.stack([one.float() for one in largest])
        if norm is not None:
            self._bad.add_(norm.detach().isfinite().all().logical_not())
        ranks.all_reduce(self._bad).wait(self._device.ledger, "ranks")
        self._bad.clamp_(max=1)
        self._count.add_(self._bad)
        self._shut.copy_(torch.maximum(self._bad, (self._count > self._most).float()))
        self._bad.zero_()

    @contextmanager
    def before(self, optimizer: Any) -> Iterator[bool]:
        """Inside the block a fused optimizer does nothing where the guard is shut. Yields whether
        `step()` is to be called at all."""
        if not self._on_device:
            with self._device.ledger.waiting("non_finite"):
                shut = bool(self._shut)  # no other way: this optimizer counts on the host
            yield not shut
            return
        optimizer.found_inf = self._shut
        try:
            yield True
        finally:
            del optimizer.found_inf

    def told(self, *, updated: bool) -> dict[str, torch.Tensor]:
        """A value of the batch launched last: whether its update was left out, if it had one."""
        return {SKIPPED: self._shut if updated else self._never}

    def seen(self) -> torch.Tensor:
        """What was seen of the group so far, to `forget` what comes after."""
        return self._bad.clone()

    def forget(self, but: torch.Tensor | None = None) -> None:
        """The group's batches so far count no more, but those that were `seen`."""
        self._bad.zero_() if but is None else self._bad.copy_(but)

    def state_dict(self, *, begun: bool = True) -> dict[str, torch.Tensor]:
        """Without what was seen of a group that came to nothing, if it is not to count."""
        return {"bad": self._bad if begun else self._never, "count": self._count}

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        for name, own in (("bad", self._bad), ("count", self._count)):
            own.zero_() if state is None else own.copy_(state[name])
