"""Where an engine trains if nobody has said it."""

from __future__ import annotations

import logging
from functools import cache

import torch

from headrace.device import available_devices
from headrace.parallel import device_of

log = logging.getLogger("headrace")


def device_to_train_on(model: torch.nn.Module) -> torch.device:
    """The model's device. Warn if it is the CPU, although there is an accelerator."""
    device, best = device_of(model), available_devices()[0]
    if device.type == "cpu" and best != "cpu":
        _warn_of_cpu(best)
    return device


@cache
def _warn_of_cpu(best: str) -> None:
    """Warn once in this process."""
    log.warning(
        "the model is on the CPU, so the engine trains there, and this machine has %s: call "
        "model.to('%s') before you create the optimizer, or pass device='cpu' to the engine if you "
        "want the CPU",
        best,
        best.partition(":")[0],
    )
