"""An optimizer that a graph can repeat: its step counts and learning rates are on the device."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from headrace.capture.state.learning_rates import LearningRates
from headrace.device import Device


class CapturableOptimizer:
    """Makes an optimizer capturable when it is constructed; `undo` makes it plain again. `rates`
    are its learning rates on the device; None if it cannot read them from there.

    Fused optimizers compute the same bits either way. The others differ in the last digits between
    their capturable and their plain form. So make this only when a graph is about to be captured,
    and undo it if the capture fails.
    """

    def __init__(self, device: Device, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups: list[dict[str, Any]] = optimizer.param_groups
        self._rounds = _rounds_when_captured(optimizer)
        self._plain_groups = [g for g in groups if "capturable" in g and not g["capturable"]]
        for group in self._plain_groups:
            group["capturable"] = True
        #: 0-dim tensors of the optimizer's state, as they were before: step counts and the like.
        self._counts: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    self._counts.append((state, name, value))
        if any(not device.holds(value) for _, _, value in self._counts):
            # A copy from pageable memory makes the host wait. It happens once.
            with device.ledger.waiting("capture"):
                for state, name, value in self._counts:
                    state[name] = value.to(device.torch_device)
        # Else PyTorch warns about capturable steps that run uncaptured. Here some are meant to.
        optimizer._warned_capturable_if_run_uncaptured = True
        by_tensor = takes_rates_as_tensors(optimizer)
        self.rates = LearningRates(device, optimizer) if by_tensor else None

    @property
    def rounding(self) -> str | None:
        """How results differ now from those of the optimizer as it was; None if they do not."""
        if not self._rounds:
            return None
        return (
            f"{type(self._optimizer).__name__} was made capturable, with its learning rate on the "
            "device, and its results differ from the plain loop's in the last digits: "
            f"{_remedy(self._optimizer)}"
        )

    @property
    def was_reset(self) -> bool:
        """Whether the user has since loaded a plain optimizer's state, or added a plain group."""
        groups = self._optimizer.param_groups
        return not all(group.get("capturable", True) for group in groups)

    def plain_groups(self) -> None:
        """Restore the users' values in the parameter groups once a graph is captured. The state
        stays on the device, and eager steps continue from it."""
        for group in self._plain_groups:
            group["capturable"] = False

    def undo(self) -> None:
        """Make the optimizer what it was. Valid only if no update has been made since."""
        for group in self._plain_groups:
            group["capturable"] = False
        for state, name, value in self._counts:
            state[name] = value


def rounding_when_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """How results would differ if the optimizer were captured; None if they would not."""
    if not _rounds_when_captured(optimizer):
        return None
    return (
        f"{type(optimizer).__name__} is not fused, and in a graph its results would differ in the "
        f"last digits: {_remedy(optimizer)}"
    )


def _rounds_when_captured(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        "capturable" in group
        and not group.get("fused")
        and not (group["capturable"] and _is_beside_weights(group["lr"], group["params"]))
        for group in optimizer.param_groups
    )


def _is_beside_weights(rate: object, weights: list[torch.Tensor]) -> bool:
    """Whether a learning rate is a tensor on the device of the weights."""
    return isinstance(rate, torch.Tensor) and all(one.device == rate.device for one in weights)


def _remedy(optimizer: torch.optim.Optimizer) -> str:
    if can_be_fused(optimizer):
        return "fused=True would make them equal"
    return (
        "made with capturable=True and lr as a tensor on the device, it computes the same bits "
        "without graphs"
    )


def can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can be made with fused=True."""
    return "fused" in inspect.signature(type(optimizer)).parameters


def takes_rates_as_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can read its learning rates from the device, as a graph needs it."""
    groups = optimizer.param_groups
    return all("capturable" in group or group.get("fused") for group in groups)


def scales_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer reads the loss scale, and whether to skip an update, on the device.
    Fused optimizers do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
