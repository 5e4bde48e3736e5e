"""What a run says of itself before it trains."""

from __future__ import annotations

import logging

from headrace.lifecycle import RunFolder
from headrace.progress import ProgressLine
from headrace.text_table import counted
from headrace.translation.build import RunParts
from headrace.translation.choices import Choices
from headrace.translation.run_size import (
    about,
    estimated_seconds,
    parameter_count,
    preset_of_weights,
    warmup_warning,
)
from headrace.translation.settings import time_text

log = logging.getLogger("headrace")
# Up to this many tokens, attention over all pairs of tokens is a small part of a step.
_DENSE_TOKENS = 2048


def announce(parts: RunParts, chosen: Choices, folder: RunFolder, progress: ProgressLine) -> None:
    """Say what the run is, and what was chosen for it."""
    settings = parts.settings
    if chosen.is_preset_chosen:
        progress.message(_choice(parts))
    if chosen.why_plan is not None:
        progress.message(f"plan {settings.plan}: {chosen.why_plan}")
    if settings.packed == "on":
        progress.message(
            "batches are packed, and attention has no dropout (--packed off: padded batches)"
        )
    progress.message(f"{_description(parts)}; {folder.path}")
    if (warning := warmup_warning(parts)) is not None and parts.ranks.is_first:
        log.warning("%s", warning)
    warn_of_dense_attention(parts, is_compiled=will_compile(parts))


def _choice(parts: RunParts) -> str:
    """Which preset was chosen and why, and how long the run will take."""
    settings = parts.settings
    pairs = len(parts.data.splits["train"])
    limit = f", at most {time_text(settings.time_limit)}" if settings.time_limit else ""
    reason = f"{parts.device.description()} and {pairs:,} pairs"
    if preset_of_weights(settings.weights) is not None:
        reason = f"weights of {settings.weights}"
    return (
        f"{reason}: preset {settings.preset}, "
        f"{parameter_count(parts) / 1e6:.1f} M parameters; {about(estimated_seconds(parts))} for "
        f"{counted(settings.epochs, 'epoch')}{limit}"
    )


def _description(parts: RunParts) -> str:
    settings, ranks, plan = parts.settings, parts.ranks, parts.plan
    batches = parts.loader.sampler.batches
    on_ranks = f", {ranks.size} ranks ({settings.parallel})" if ranks.several else ""
    return (
        f"{settings.preset} model, {parameter_count(parts) / 1e6:.1f} M parameters, plan "
        f"{plan.name} ({plan.precision}) on {parts.device.description()}{on_ranks}; "
        f"{batches}"
    )


def nothing_to_do(parts: RunParts, folder: RunFolder) -> str:
    settings, engine = parts.settings, parts.engine
    if engine.epochs >= settings.epochs:
        return (
            f"{folder.path}: this run is finished after {counted(engine.epochs, 'epoch')}, and "
            f"--epochs {settings.epochs:,} asks for no more; expected a larger number"
        )
    return f"{folder.path}: this run is finished: max_steps = {settings.max_steps:,} is reached"


def will_compile(parts: RunParts) -> bool:
    """Whether the step is to be compiled. It may still fail."""
    return parts.plan.compile and parts.device.compiles


def warn_of_dense_attention(parts: RunParts, *, is_compiled: bool) -> None:
    """Warn if packed batches are large and do without flex_attention."""
    if parts.settings.packed == "off" or is_compiled or not parts.ranks.is_first:
        return
    tokens = max(parts.loader.sampler.batches[0].lengths) // parts.ranks.size
    if tokens > _DENSE_TOKENS:
        log.warning(
            "packed batches of %s tokens, and the step is not compiled: attention computes all "
            "pairs of tokens, which is slow; use --plan max on a CUDA GPU, or --packed off",
            f"{tokens:,}",
        )
