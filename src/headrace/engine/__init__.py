"""Trains a model under a plan.

It takes a model, an optimizer, a loss function and a `Plan`. It returns the losses of a plain loop,
bit for bit, and what the host waited for. `engine.py` is what users call, `build/` builds a pass
from the options. `loop/` goes over the batches, `step/` trains on one, `loss/` calls the loss
function and `update/` changes the weights; `graphs/` runs the step as graphs, `state/` stores where
training is, `streams/` and `values/` are what the others stand on.
"""

from __future__ import annotations

from headrace.engine.engine import Engine
from headrace.engine.graphs.graphed_function import GraphedFunction, graphed
from headrace.engine.loop.results import EpochResult, EpochStatistics
from headrace.engine.loss.carry import Carry
from headrace.engine.loss.compiled import CompileReport
from headrace.engine.loss.compiler import compiler_loading
from headrace.engine.loss.forward import LossFunction, autocast
from headrace.engine.stages import Progress
from headrace.engine.streams.run_ahead import RunAhead
from headrace.engine.update.ema import Ema
from headrace.engine.update.nonfinite import NonFinitePolicy
from headrace.engine.values.arrived import DeferredValues
from headrace.engine.values.deferred import DeferredScalars

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
