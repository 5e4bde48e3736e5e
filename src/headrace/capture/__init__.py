"""Captures a function that runs on the device as CUDA graphs, and replays them.

In goes a function with explicit inputs (a batch, or the arguments of a call) and the state that it
uses: modules, optimizers, gradient scalers. Out come graphs by key, each with a guarantee that a
replay does what the function would do, or the reason why there is none. This package knows shapes,
memory, what a function reads and what a capture cannot repeat. It knows nothing of epochs, losses,
accumulation or plans: that is `engine/`, which decides what to capture and when to replay.
"""

from __future__ import annotations

from headrace.capture.graphs.cache import GraphCache
from headrace.capture.graphs.capture_settings import CaptureSettings
from headrace.capture.graphs.captured_work import CapturedWork
from headrace.capture.graphs.function import CapturedFunction
from headrace.capture.graphs.work import Capturable
from headrace.capture.guards.guards import GRADIENTS_REPLACED, Guards
from headrace.capture.guards.obstacles import fused_or, state_obstacle
from headrace.capture.parts.accelerated import is_prepared
from headrace.capture.parts.gain import Gain
from headrace.capture.parts.handle import SpeedUpHandle
from headrace.capture.parts.installed import is_sped_up, own_forwards
from headrace.capture.parts.model_calls import is_inside_a_module, watch_models, why_not
from headrace.capture.parts.speed_up import MAX_SHAPES, speed_up
from headrace.capture.parts.turns import Turns
from headrace.capture.reading.comparison import same_entries
from headrace.capture.reading.known import Known
from headrace.capture.reading.reading import Reader
from headrace.capture.reading.user_compiled import describe_own_graphs, recurrent_obstacle
from headrace.capture.reports.part import Counts, PartReport, PartTally
from headrace.capture.reports.report import GraphReport, describe_failure, warn_not_captured
from headrace.capture.reports.speed_up_report import SpeedUpReport
from headrace.capture.state.capturable_optimizer import (
    CapturableOptimizer,
    can_be_fused,
    rounding_when_captured,
    scales_on_device,
)
from headrace.capture.state.learning_rates import LearningRates
from headrace.capture.state.memory import StateBeforeCapture
from headrace.capture.state.nested import map_tensors, parts_of
from headrace.capture.state.signatures import signature
from headrace.capture.state.state import StepState, unique
from headrace.capture.watching.trace import Storage, storages
from headrace.capture.watching.tracer import StepTracer

__all__ = [
    "GRADIENTS_REPLACED",
    "MAX_SHAPES",
    "Capturable",
    "CapturableOptimizer",
    "CaptureSettings",
    "CapturedFunction",
    "CapturedWork",
    "Counts",
    "Gain",
    "GraphCache",
    "GraphReport",
    "Guards",
    "Known",
    "LearningRates",
    "PartReport",
    "PartTally",
    "Reader",
    "SpeedUpHandle",
    "SpeedUpReport",
    "StateBeforeCapture",
    "StepState",
    "StepTracer",
    "Storage",
    "Turns",
    "can_be_fused",
    "describe_failure",
    "describe_own_graphs",
    "fused_or",
    "is_inside_a_module",
    "is_prepared",
    "is_sped_up",
    "map_tensors",
    "own_forwards",
    "parts_of",
    "recurrent_obstacle",
    "rounding_when_captured",
    "same_entries",
    "scales_on_device",
    "signature",
    "speed_up",
    "state_obstacle",
    "storages",
    "unique",
    "warn_not_captured",
    "watch_models",
    "why_not",
]
