"""How large a model should be for a device and a corpus, and how long its training takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.device import Device
from headrace.plan import Plan
from headrace.text_table import counted
from headrace.translation.build import RunParts
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.model import new_model
from headrace.translation.settings import TrainSettings
from headrace.translation.weights import run_of_weights

# On a GPU: the smallest preset whose corpora are at least this large wins. A larger model learns
# the sentences of a small corpus by heart.
_GPU_PRESETS = ((0, "tiny"), (20_000, "small"), (200_000, "base"), (10_000_000, "big"))


@dataclass(frozen=True)
class _Rates:
    """What was measured on a device: seconds to launch the kernels of one layer for a batch, and
    seconds of compute for one target token and one million parameters."""

    launch_s: float
    compute_s: float


# From benchmarks/results/: 2026-11-16-cpu-demo.txt, on two quiet cores; six models from 1.2 to
# 11 M parameters took CPU time in proportion, within a quarter.
# Launches: 2026-11-15-h200-bench-30x60-bf16.json.
_CPU, _CPU_THREADS = _Rates(4e-3, 5.7e-5), 2
_GPU = _Rates(5e-3, 30e-9)
# A layer takes this long even in a small batch, whose kernels do not fill the GPU. This and the
# compute above are a line through the two `graph` rows, in bf16, of 2026-11-15-h200-graphs.json.
_GPU_LAYER_S = 0.38e-3


@dataclass(frozen=True)
class Compiling:
    """What plan `max` costs and gains, compared with `graph`: seconds to compile with an empty
    cache, and how many times as fast the steps are then."""

    seconds: float
    speedup: float


# base, 26,000 target tokens per batch: 2026-11-16-h200-packed.json (compiled; packed against padded
# of several shapes) and -compiled-shapes.json (padded, against `graph`).
_COMPILING_PACKED, _COMPILING_PADDED = Compiling(40.0, 2.0), Compiling(150.0, 1.4)


def compiling(*, packed: bool) -> Compiling:
    """What compiling costs and gains with packed or padded batches."""
    return _COMPILING_PACKED if packed else _COMPILING_PADDED


def choose_preset(device: Device, pairs: int) -> str:
    """The model preset for a corpus of so many training pairs. On a CPU always the smallest: the
    others take hours."""
    if not device.asynchronous:
        return "tiny"
    return next(preset for least, preset in reversed(_GPU_PRESETS) if pairs >= least)


def preset_of_weights(weights: str | None) -> str | None:
    """The preset of the run whose weights these are. None if there is no such run."""
    run = None if weights is None else run_of_weights(weights)
    preset = "auto" if run is None else TrainSettings.read(run / "config.yaml").preset
    return None if preset == "auto" else preset


def estimated_seconds(parts: RunParts) -> float:
    """Roughly how long the run trains, from rates that were measured on other machines."""
    batches = len(parts.loader.sampler.batches)
    tokens = parts.data.splits["train"].tokens[1] / max(1, batches) / parts.ranks.size
    total_s = training_seconds(
        parts.settings, parts.device, parts.plan, batches, tokens, parameter_count(parts)
    )
    if not (parts.plan.compile and parts.device.compiles):
        return total_s
    compiled = compiling(packed=parts.settings.packed == "on")
    return compiled.seconds + total_s / compiled.speedup


def training_seconds(
    settings: TrainSettings,
    device: Device,
    plan: Plan,
    batches: int,
    tokens: float,
    parameters: int,
) -> float:
    """Roughly how long the run trains, uncompiled, with so many batches per epoch, target tokens
    per batch and parameters."""
    model, millions = settings.model(), parameters / 1e6
    layers = model.encoder_layers + model.decoder_layers
    if not device.asynchronous:
        batch_s = cpu_batch_seconds(tokens, millions, layers, torch.get_num_threads())
    else:
        batch_s = _GPU_LAYER_S * layers + _GPU.compute_s * tokens * millions
        if plan.graphs == "off":  # the GPU computes while the host launches
            batch_s = max(_GPU.launch_s * layers, batch_s)
    total = batches * settings.epochs
    if settings.max_steps is not None:
        total = min(total, settings.max_steps * settings.accumulate)
    return total * batch_s


def cpu_batch_seconds(tokens: float, millions: float, layers: int, threads: int) -> float:
    """The estimated time of a batch with so many target tokens on a CPU, for a model of so many
    million parameters and layers."""
    compute_s = _CPU.compute_s * tokens * millions * _CPU_THREADS / min(16, threads)
    return _CPU.launch_s * layers + compute_s


def warmup_warning(parts: RunParts) -> str | None:
    """A warning if all epochs of the run end before its warmup does. None if `max_steps` ends the
    run: then it is meant to be short."""
    settings = parts.settings
    batches = len(parts.loader.sampler.batches)
    updates = math.ceil(batches / settings.accumulate) * settings.epochs
    if settings.max_steps is not None or updates > settings.warmup:
        return None
    return (
        f"the learning rate does not reach its peak: the run has {counted(updates, 'update')}, "
        f"its warmup {settings.warmup:,}. Use a smaller --warmup, or more --epochs"
    )


def parameter_count(parts: RunParts) -> int:
    return _count(parts.model)


def planned_parameters(settings: TrainSettings, data: Prepared) -> int:
    """How many parameters the run's model will have."""
    with torch.device("meta"):  # takes no memory and draws no random numbers
        return _count(new_model(settings.model(), data.vocabularies))


def _count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def about(seconds: float) -> str:
    """A time in words: "about 40 seconds", "about 3 minutes", "about 15 hours"."""
    units = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, unit_s = next((one for one in units if seconds >= 1.5 * one[1]), units[-1])
    count = max(1, round(seconds / unit_s))
    if unit == "second" and count > 20:
        count = round(count, -1)
    return f"about {count:,} {unit}{'' if count == 1 else 's'}"


class FirstBatches:
    """Measures seconds per batch over the first batches of a run. `skip` of them come before: they
    warm up or capture graphs."""

    def __init__(self, skip: int, measured: int = 20) -> None:
        self._skip, self._measured = skip, measured
        self._batches = 0
        self._begun_s = 0.0

    def on_batch(self, now_s: float) -> float | None:
        """Call this after each batch. Returns the measured seconds per batch, once."""
        self._batches += 1
        if self._batches == self._skip:
            self._begun_s = now_s
        if self._batches == self._skip + self._measured:
            return (now_s - self._begun_s) / self._measured
        return None
