"""Captures a function that runs on the device as CUDA graphs, and replays them.

In goes a function with explicit inputs (a batch, or the arguments of a call) and the state that it
uses: modules, optimizers, gradient scalers. Out come graphs by key, each with a guarantee that a
replay does what the function would do, or the reason why there is none. This package knows shapes,
memory, what a function reads and what a capture cannot repeat. It knows nothing of epochs, losses,
accumulation or plans: that is `engine/`, which decides what to capture and when to replay.
"""

from __future__ import annotations

from headrace.capture.accelerated import is_prepared
from headrace.capture.cache import CapturedWork, GraphCache
from headrace.capture.capturable_optimizer import (
    CapturableOptimizer,
    can_be_fused,
    rounding_when_captured,
    scales_on_device,
)
from headrace.capture.comparison import same_entries
from headrace.capture.differences import CheckReport
from headrace.capture.function import CapturedFunction
from headrace.capture.guards import GRADIENTS_REPLACED, Guards
from headrace.capture.installed import is_sped_up, own_forwards
from headrace.capture.known import Known
from headrace.capture.learning_rates import LearningRates
from headrace.capture.memory import StateBeforeCapture
from headrace.capture.model_calls import is_inside_a_module, watch_models, why_not
from headrace.capture.nested import map_tensors, parts_of
from headrace.capture.obstacles import fused_or, state_obstacle
from headrace.capture.part import PartReport, PartTally
from headrace.capture.parts import SpeedUpHandle, speed_up
from headrace.capture.reading import Reader
from headrace.capture.report import GraphReport, describe_failure, warn_not_captured
from headrace.capture.signatures import signature
from headrace.capture.speed_up_report import SpeedUpReport
from headrace.capture.state import StepState, unique
from headrace.capture.trace import StepTracer, Storage, storages
from headrace.capture.turns import Turns
from headrace.capture.user_compiled import describe_own_graphs, recurrent_obstacle

__all__ = [
    "GRADIENTS_REPLACED",
    "CapturableOptimizer",
    "CapturedFunction",
    "CapturedWork",
    "CheckReport",
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
