"""Trains a model under a plan.

It takes a model, an optimizer, a loss function and a `Plan`. It returns the losses of a plain loop,
bit for bit, and what the host waited for. `engine.py` is what users call, `build.py` builds a pass
from the options, `loop.py` is the loop over batches, and `step.py` trains on one batch.
"""

from __future__ import annotations

from headrace.engine.carry import Carry
from headrace.engine.compiled import CompileReport, compiler_loading
from headrace.engine.deferred import DeferredScalars, DeferredValues
from headrace.engine.ema import Ema
from headrace.engine.engine import Engine
from headrace.engine.forward import LossFunction, autocast
from headrace.engine.graphed_function import GraphedFunction, graphed
from headrace.engine.nonfinite import NonFinitePolicy
from headrace.engine.results import EpochResult, EpochStatistics
from headrace.engine.run_ahead import RunAhead
from headrace.engine.stages import Progress

__all__ = [
    "Carry",
    "CompileReport",
    "DeferredScalars",
    "DeferredValues",
    "Ema",
    "Engine",
    "EpochResult",
    "EpochStatistics",
    "GraphedFunction",
    "LossFunction",
    "NonFinitePolicy",
    "Progress",
    "RunAhead",
    "autocast",
    "compiler_loading",
    "graphed",
]
