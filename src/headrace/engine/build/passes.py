"""Puts feed, step, run-ahead window and recorder of a pass together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.data import Aligned, BatchCache, Batches, BlockingCopies, Feed, Prefetcher, first_of
from headrace.device import Device, deterministic_kernels
from headrace.engine.loop.loop import Pass
from headrace.engine.loop.parts import Observers, Stages, Window
from headrace.engine.loop.recorder import HoldingRecorder, Recorder
from headrace.engine.stages import Progress, Standing, Step
from headrace.engine.state.resume import Start
from headrace.engine.step.parts import StepParts
from headrace.engine.streams.host_sync import HostSync
from headrace.engine.streams.lanes import Lanes
from headrace.engine.streams.run_ahead import RunAhead
from headrace.engine.values.deferred import DeferredScalars
from headrace.engine.values.summed import SummedScalars
from headrace.parallel import Ranks
from headrace.plan import Plan


@dataclass(frozen=True, slots=True)
class PassOptions:
    """The options that all passes of an engine have in common."""

    device: Device
    plan: Plan
    ranks: Ranks
    cache: BatchCache | None
    deterministic: bool
    loader_timeout: float


def open_pass(
    options: PassOptions,
    loader: Iterable[Any],
    lanes: Lanes,
    step: Step,
    observers: Observers,
    start: Start,
    *,
    epoch: int,
    limit: int | None = None,
    parts: StepParts | None = None,
) -> Pass:
    """Build a pass over a loader, beginning at `start`, of at most `limit` batches. `parts` are the
    training step's; None for a pass that evaluates, or calls the user's step."""
    device, plan, ranks = options.device, options.plan, options.ranks
    feed = _feed(options, loader, lanes, start, limit)
    batches: Batches = feed
    if plan.prefetch_depth == 0:
        batches = BlockingCopies(feed, device, lanes.transfers)
    ahead = RunAhead(device, plan.run_ahead_steps, plan.run_ahead_bytes)
    window: Window = ahead
    if plan.sync != "none":
        window = HostSync(ahead, device, plan, lanes.backward)
    recorder = _recorder(options, lanes, start, parts)
    standing = Standing() if parts is None else parts.group.standing
    progress = Progress(epoch, start.first, 0, start.cursor, standing)
    settings = partial(_torch_settings, device, plan, deterministic=options.deterministic)
    stages = Stages(device, feed, batches, step, window, recorder, lanes, ranks, settings, limit)
    return Pass(stages, observers, progress)


@contextmanager
def _torch_settings(device: Device, plan: Plan, *, deterministic: bool) -> Iterator[None]:
    """Inside the block PyTorch uses the plan's precision and the engine's choice of kernels."""
    with device.numerics(plan.precision), deterministic_kernels(deterministic):
        yield


def _feed(
    options: PassOptions,
    loader: Iterable[Any],
    lanes: Lanes,
    start: Start,
    limit: int | None,
) -> Feed:
    device, plan, ranks = options.device, options.plan, options.ranks
    source = loader if limit is None else first_of(loader, limit)
    if ranks.several:
        ended = start.cursor.ended
        source = Aligned(loader, ranks, device.ledger, limit=limit, ended=ended)
    prefetcher = Prefetcher(
        source,
        device,
        plan.prefetch_depth,
        pin=plan.pin,
        transfers=lanes.transfers,
        owner=lanes.forward,
        runs_on_owner=lanes.forward is lanes.caller,
        cache=options.cache,
        loader_timeout=options.loader_timeout,
        loader_rng=start.loader_rng,
    )
    return Feed(prefetcher, first=start.first, start=start.cursor, limit=limit)


def _recorder(
    options: PassOptions, lanes: Lanes, start: Start, parts: StepParts | None
) -> Recorder:
    device, plan, ranks = options.device, options.plan, options.ranks
    kind = SummedScalars if ranks.several else DeferredScalars
    scalars = kind(device, plan.deferred_every, stream=lanes.losses, ranks=ranks)
    pending = start.pending
    if parts is None or parts.update.guard is None:
        return Recorder(scalars, lanes, restored=pending, loss=start.loss)
    # The value of an open group's last batch is not complete before the group's update.
    held = None
    if parts.group.is_open and pending and pending[-1].step == start.first - 1:
        pending, held = pending[:-1], pending[-1]
    return HoldingRecorder(scalars, lanes, restored=pending, loss=start.loss, held=held)
