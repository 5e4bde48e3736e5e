"""Which plan a run gets if its settings leave that to the trainer (`plan = auto`).

Chosen here is only what must be known before the run begins: whether the step is compiled, and
whether batches are to have few shapes, for graphs. Whether graphs stay is measured in the run, by
the engine's plan `auto`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from headrace.device import Device
from headrace.parallel import Ranks
from headrace.plan import PLAN_VARIABLE, PRESETS, LoaderPlan, Plan
from headrace.translation.batching import batch_tokens, why_padded
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.run_size import about, compiling, planned_parameters, training_seconds
from headrace.translation.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A preset's name, and why it was chosen, in words."""

    plan: str
    why: str


def choose_plan(
    settings: TrainSettings, data: Prepared, ranks: Ranks, device: Device
) -> PlanChoice:
    """The plan for this run: `pipeline` where the step cannot be a graph, `max` if the run is long
    enough to pay for compiling, else `auto`.

    The preset must be settled, since a large model pays for compiling earlier than a small one.
    """
    named = os.environ.get(PLAN_VARIABLE, "")
    if named in PRESETS and named != "auto":
        return PlanChoice(named, f"{PLAN_VARIABLE} names it")
    why_eager = _why_eager(settings, ranks, device)
    if why_eager is not None:
        return PlanChoice("pipeline", why_eager)
    why_uncompiled = _why_uncompiled(settings, device)
    if why_uncompiled is not None:
        return PlanChoice("auto", why_uncompiled)
    if settings.packed == "on":
        return PlanChoice("max", "packed batches need compiled attention")
    under_max = settings.replace(plan="max")
    packs = settings.packed == "auto" and why_padded(under_max, data, ranks, device) is None
    compiled, run_s = compiling(packed=packs), _seconds_under_graph(settings, data, device)
    compile_s = about(compiled.seconds)
    if compiled.seconds + run_s / compiled.speedup < run_s:
        return PlanChoice(
            "max",
            f"compiling takes {compile_s}, then steps are about {compiled.speedup:g} times as "
            f"fast; without it the run takes {about(run_s)}",
        )
    return PlanChoice(
        "auto", f"the run takes {about(run_s)}; compiling takes {compile_s}, more than it saves"
    )


def _why_eager(settings: TrainSettings, ranks: Ranks, device: Device) -> str | None:
    """Why the step is not captured as a graph; None if it may be."""
    if not device.captures:
        return f"{device.description()} captures no graphs"
    if ranks.group is not None:
        # DDP's step was captured on one GPU, and never tried on several. FSDP2's cannot be.
        return "graphs were never measured on several GPUs (--plan graph tries them, with ddp)"
    if settings.on_oom == "halve":
        return "on_oom = halve, and graphs would keep their memory"
    if settings.shapes == 0 and settings.packed != "on":
        return "shapes = 0, and each batch shape would need a graph of its own"
    return None


def _why_uncompiled(settings: TrainSettings, device: Device) -> str | None:
    """Why the step is better not compiled, however long the run; None if it may be."""
    if not device.compiles:
        return f"the step is not compiled for {device.description()}"
    if (missing := _missing_for_triton()) is not None:
        return f"compiling needs {missing}, which is not installed"
    if settings.deterministic and settings.packed != "on":
        # The first of several shapes is compiled in another way than the others, and a resumed run
        # may begin with another one.
        return "deterministic, and compiled code may round differently after a resume"
    return None


def _missing_for_triton() -> str | None:
    """What PyTorch's compiler lacks to make kernels for a GPU: Triton, or what Triton builds its
    launchers with. Compiling would fail, and packed batches would train with slow attention."""
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "a C compiler (gcc or clang)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers (Python.h)"
    return None


def _seconds_under_graph(settings: TrainSettings, data: Prepared, device: Device) -> float:
    """Roughly how long the run takes without compiling, if `patience` does not end it earlier."""
    train = data.splits["train"]
    tokens = train.tokens[1]
    batches = math.ceil(tokens / batch_tokens(settings, train, LoaderPlan()))
    run_s = training_seconds(
        settings,
        device,
        Plan.preset("graph"),
        batches,
        tokens / max(1, batches),
        planned_parameters(settings, data),
    )
    return min(run_s, settings.time_limit or run_s)
