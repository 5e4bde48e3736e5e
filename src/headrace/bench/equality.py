"""Are the losses the same? Step by step, bit for bit, or within a tolerance that is stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headrace.runs.records import Equality


@dataclass(frozen=True, slots=True)
class ComparedLosses:
    """The losses of one contestant. `reference_losses` are those that they were compared with, if
    not the ones in the reference's own row; `error` says why there are none."""

    equal: Equality = field(default_factory=Equality)
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    error: str | None = None


def compare(
    reference: Sequence[float],
    found: Sequence[float],
    *,
    exact: bool,
    tolerance: float,
    why: str = "",
) -> Equality:
    """Compare losses with the reference's, one by one.

    With `exact` every bit must be the same; else a relative difference of up to `tolerance` is
    allowed, and `why` says why. Of losses that are not finite the kind must be the same.
    """
    if len(reference) != len(found):
        short = min(len(reference), len(found))
        told = f"{len(found)} losses, the reference has {len(reference)}"
        return Equality("unequal", None if exact else tolerance, None, short + 1, told)
    differences = [difference(a, b) for a, b in zip(reference, found, strict=True)]
    largest = max(differences, default=0.0)
    allowed = 0.0 if exact else tolerance
    shown = None if exact else tolerance
    for step, off in enumerate(differences, 1):
        if off > allowed:
            told = f"step {step}: {found[step - 1]!r}, the reference has {reference[step - 1]!r}"
            finite = largest if math.isfinite(largest) else None
            return Equality("unequal", shown, finite, step, told)
    if largest == 0.0:
        return Equality("identical", None, 0.0, None, why if not exact else "")
    return Equality("within", tolerance, largest, None, why)


def difference(reference: float, found: float) -> float:
    """Relative; infinite where one of them is not a finite number and the other is another."""
    if reference == found or (math.isnan(reference) and math.isnan(found)):
        return 0.0
    if not (math.isfinite(reference) and math.isfinite(found)):
        return math.inf
    return abs(found - reference) / max(abs(reference), 1e-12)


def remove_dropout(model: nn.Module) -> int:
    """Set every dropout in the model to 0. Returns how many there were."""
    removed = 0
    for module in model.modules():
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        share: Any = getattr(module, name, None)
        if isinstance(share, float) and share > 0:
            setattr(module, name, 0.0)
            removed += 1
    return removed


def rounds_differently(optimizer: Any) -> bool:
    """Whether an optimizer computes other last bits once it is made capturable for a graph; a
    fused one does not."""
    defaults = optimizer.defaults
    return "capturable" in defaults and not defaults.get("fused")
