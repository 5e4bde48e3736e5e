"""What a pass is made of, and what it calls after a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.data import Batches, Feed
from headrace.device import Device, Stream
from headrace.engine.loop.recorder import Recorder
from headrace.engine.loop.results import EpochResult
from headrace.engine.stages import Progress, Step
from headrace.engine.streams.lanes import Lanes
from headrace.engine.update.nonfinite import NonFiniteWatch
from headrace.engine.update.schedules import Schedule
from headrace.parallel import Ranks

OnProgress = Callable[[Progress], object] | None
OnValues = Callable[[int, dict[str, float]], object] | None
OnOutputs = Callable[[int, Any], object] | None
OnEpoch = Callable[[EpochResult], object] | None


class Window(Protocol):
    """Limits how far the host runs ahead of the device."""

    def admit(self, nbytes: int = 0) -> None: ...

    def launched(self, stream: Stream) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Stages:
    """What a pass is made of. `batches` is the feed, or a wrapper around it. `settings()` is a
    context manager that sets PyTorch's precision and kernels. A pass has at most `limit` batches.
    """

    device: Device
    feed: Feed
    batches: Batches
    step: Step
    window: Window
    recorder: Recorder
    lanes: Lanes
    ranks: Ranks
    settings: Callable[[], AbstractContextManager[object]]
    limit: int | None


@dataclass(slots=True)
class Hooks:
    """What an engine calls. Each may be replaced at any time; a pass takes those that it finds when
    it begins."""

    on_step: OnProgress = None
    on_update: OnProgress = None
    on_update_every: int = 1
    on_values: OnValues = None
    on_outputs: OnOutputs = None
    on_epoch: OnEpoch = None


@dataclass(frozen=True, slots=True)
class Observers:
    """What the loop calls after a batch, in this order: the scheduler and `on_update` (after an
    update), the watch for non-finite values, and the user's other hooks."""

    schedule: Schedule | None
    non_finite: NonFiniteWatch
    hooks: Hooks
    on_error: Callable[[BaseException], object] | None = None
