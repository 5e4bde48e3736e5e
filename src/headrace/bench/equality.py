"""Compares losses step by step, and weights: bit for bit, or within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from headrace.device import Device
from headrace.records import Equality


@dataclass(frozen=True, slots=True)
class ComparedLosses:
    """A contestant's losses and how they compare. `reference_losses` are set if they are not those
    in the reference's own row; `error` says why there are no losses."""

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

    With `exact` every bit must match. Otherwise a relative difference of up to `tolerance` is
    allowed, and `why` says for which reason. NaN matches only NaN, and infinity the same infinity.
    """
    if len(reference) != len(found):
        short = min(len(reference), len(found))
        message = f"{len(found)} losses, the reference has {len(reference)}"
        return Equality("unequal", None if exact else tolerance, None, short + 1, message)
    differences = [difference(a, b) for a, b in zip(reference, found, strict=True)]
    largest = max(differences, default=0.0)
    allowed = 0.0 if exact else tolerance
    shown = None if exact else tolerance
    for step, relative in enumerate(differences, 1):
        if relative > allowed:
            message = f"step {step}: {found[step - 1]!r}, the reference has {reference[step - 1]!r}"
            finite = largest if math.isfinite(largest) else None
            return Equality("unequal", shown, finite, step, message)
    if largest == 0.0:
        return Equality("identical", None, 0.0, None, why if not exact else "")
    return Equality("within", tolerance, largest, None, why)


def compare_weights(
    device: Device,
    reference: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    losses: Equality,
    *,
    tolerance: float,
) -> Equality:
    """Compare the weights after the last step, as strictly as the losses were compared.

    Returns `losses` if the weights match, too. The norm of a tensor's difference counts relative to
    the tensor's size: its norm, or the norm that it would have with elements as large as those of
    all parameters (root mean square), whichever is larger. Some tensors are much smaller than that.
    The key biases of attention, for example, have no gradient but rounding errors, so that no two
    runs agree on them.
    """
    if not reference:
        why = "the step's modules were not found, so only losses were compared"
        return replace(losses, why="; ".join(filter(None, (losses.why, why))))
    if reference.keys() != found.keys():
        odd = next(iter(reference.keys() ^ found.keys()))
        return Equality("unequal", why=f"weights: only one of the two runs has {odd!r}")
    allowed = 0.0 if losses.verdict == "identical" and not losses.why else tolerance
    for name, relative in zip(reference, _differences(device, reference, found), strict=True):
        if not relative <= allowed:
            why = f"weights after the last step: {name!r} differs by {relative:.2g} of its size"
            return Equality("unequal", allowed or None, None, None, why)
    return losses


@torch.no_grad()
def _differences(
    device: Device, reference: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> list[float]:
    """The relative difference of each weight, computed on the device and read at once."""
    norms = {name: _norm_of_finite(one) for name, one in reference.items()}
    trained = [name for name, one in reference.items() if isinstance(one, nn.Parameter)]
    count = sum(reference[name].numel() for name in trained)
    rms = torch.stack([norms[name] for name in trained]).norm() / count**0.5 if count else 0.0
    figures = []
    for name, one in reference.items():
        expected, other = one.double(), found[name].double()
        same = (expected == other) | (expected.isnan() & other.isnan())
        apart = torch.where(same, torch.zeros_like(expected), other - expected)
        # Whole numbers, such as a count of batches, have a size of their own.
        usual = rms * one.numel() ** 0.5 if one.is_floating_point() else 0.0
        size = torch.clamp(norms[name], min=usual).clamp(min=1e-12)
        figures.append(torch.linalg.vector_norm(apart) / size)
    on_host = torch.empty(1, len(figures), dtype=torch.float64, device="cpu")
    with device.ledger.waiting("bench"):
        on_host[0].copy_(torch.stack(figures))
    device.synchronize("bench")
    return device.read_host(on_host)[0]


def _norm_of_finite(tensor: torch.Tensor) -> torch.Tensor:
    """The norm of a tensor's finite elements. Beside an infinite norm no difference would count."""
    elements = tensor.double()
    norm: torch.Tensor = torch.linalg.vector_norm(torch.where(elements.isfinite(), elements, 0.0))
    return norm


def difference(reference: float, found: float) -> float:
    """The relative difference; infinite if one is not finite and they are not the same."""
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
