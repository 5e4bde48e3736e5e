"""Keep the GPU busy while PyTorch trains, and measure that it is.

    import headrace as hr

    hr.speed_up(model, optimizer)  # once; your loop stays as it is

Or let the engine run the loop:

    import headrace as hr

    engine = hr.Engine(model, optimizer, loss_fn)
    for epoch in range(10):
        result = engine.epoch(loader)
        print(result.mean_loss, result.waits.table())

`import headrace` takes almost no time and touches no GPU: each name is loaded on first use.
"""

from __future__ import annotations

import importlib
import os

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.capture import GraphReport as GraphReport
    from headrace.capture import PartReport as PartReport
    from headrace.capture import SpeedUpHandle as SpeedUpHandle
    from headrace.capture import SpeedUpReport as SpeedUpReport
    from headrace.capture import speed_up as speed_up
    from headrace.data import BucketBatches as BucketBatches
    from headrace.data import Buckets as Buckets
    from headrace.data import PadToBuckets as PadToBuckets
    from headrace.data import Prefetcher as Prefetcher
    from headrace.data import prefetch as prefetch
    from headrace.device import Device as Device
    from headrace.device import Event as Event
    from headrace.device import Ledger as Ledger
    from headrace.device import LedgerStatistics as LedgerStatistics
    from headrace.device import Span as Span
    from headrace.device import Stream as Stream
    from headrace.device import StreamManager as StreamManager
    from headrace.device import Timeline as Timeline
    from headrace.device import WaitStatistics as WaitStatistics
    from headrace.device import available_devices as available_devices
    from headrace.device import eager as eager
    from headrace.device import open_device as open_device
    from headrace.diagnosis import Diagnosis as Diagnosis
    from headrace.diagnosis import StepFigures as StepFigures
    from headrace.diagnosis import StepMonitor as StepMonitor
    from headrace.diagnosis import diagnose as diagnose
    from headrace.diagnosis import monitor_steps as monitor_steps
    from headrace.diagnosis.in_lightning import LightningMonitor as LightningMonitor  # extra
    from headrace.diagnosis.in_transformers import TrainerMonitor as TrainerMonitor  # extra
    from headrace.diagnosis.magic import load_ipython_extension as load_ipython_extension  # extra
    from headrace.engine import Carry as Carry
    from headrace.engine import CompileReport as CompileReport
    from headrace.engine import DeferredScalars as DeferredScalars
    from headrace.engine import DeferredValues as DeferredValues
    from headrace.engine import Ema as Ema
    from headrace.engine import Engine as Engine
    from headrace.engine import EpochResult as EpochResult
    from headrace.engine import EpochStatistics as EpochStatistics
    from headrace.engine import GraphedFunction as GraphedFunction
    from headrace.engine import Progress as Progress
    from headrace.engine import RunAhead as RunAhead
    from headrace.engine import graphed as graphed
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.integrations import lightning as lightning  # extra
    from headrace.integrations import transformers as transformers  # extra
    from headrace.lifecycle import Watchdog as Watchdog
    from headrace.machine import BusyWindow as BusyWindow
    from headrace.machine import Monitor as Monitor
    from headrace.machine import UseSample as UseSample
    from headrace.plan import PRESETS as PRESETS
    from headrace.plan import LoaderPlan as LoaderPlan
    from headrace.plan import Plan as Plan
    from headrace.plan import PlanFile as PlanFile
    from headrace.plan import load_plan as load_plan

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = lazy(__name__, __file__, "__version__")

if os.environ.get("HEADRACE_MONITOR"):
    importlib.import_module("headrace.diagnosis").monitor_by_environment()
