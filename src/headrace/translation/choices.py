"""What a run's settings leave to the trainer: preset, plan, and whether batches are packed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.device import Device, Ledger
from headrace.parallel import Ranks
from headrace.translation.batching import why_padded
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.plan_choice import choose_plan
from headrace.translation.run_size import choose_preset, preset_of_weights
from headrace.translation.settings import TrainSettings

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Choices:
    """The settings with nothing left open. `why_plan` says why the plan was chosen, if the device
    had a choice."""

    settings: TrainSettings
    is_preset_chosen: bool
    why_plan: str | None = None


def choose(
    settings: TrainSettings, data: Prepared, ranks: Ranks, device: Device, *, has_trained: bool
) -> Choices:
    """Choose for this device and corpus. Rank 0 chooses for all. A run that `has_trained` keeps its
    plan."""
    given, why_plan = settings, None
    if given.preset == "auto":
        preset = preset_of_weights(given.weights)
        preset = preset or choose_preset(device, len(data.splits["train"]))
        settings = settings.replace(preset=ranks.broadcast(preset, Ledger()))
    if given.plan == "auto" and not has_trained:
        choice = choose_plan(settings, data, ranks, device)
        settings = settings.replace(plan=ranks.broadcast(choice.plan, Ledger()))
        why_plan = choice.why if device.captures else None
    if given.packed == "auto":
        why = why_padded(settings, data, ranks, device)
        packed = ranks.broadcast("on" if why is None else "off", Ledger())
        settings = settings.replace(packed=packed)
        if why is not None:
            log.debug("batches are padded: %s", why)
    return Choices(settings, given.preset == "auto", why_plan)
