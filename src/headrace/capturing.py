"""Training steps as graphs: forward, loss, backward, clipping and update, captured by shape.

A shape's first batches are launched one by one, as ever: the first is watched for what a graph
could not repeat, and all of them train. Then the step is captured, which runs nothing, and from
that batch on it is replayed. With accumulation the update is a graph of its own. Whatever cannot
be captured is launched one by one, and why is said once.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headrace import batches, capturable
from headrace.compiling import loss_as
from headrace.errors import CaptureError
from headrace.graphs import Captured, GraphCache, signature
from headrace.plan import Plan
from headrace.sites import line_of_error
from headrace.step import LossParts, TrainingStep

log = logging.getLogger("headrace")
Report = Callable[[LossParts], None]

# A graph that saves less than this share of a step is not worth the memory it holds.
_WORTH_IT = 0.05
_TRIAL_STEPS = 3
# Settings that change oftener than every so many batches leave a graph no use.
_STEADY_BATCHES = 10
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What became of a plan's graphs. `one_by_one` are batches whose kernels were launched one by
    one; `why` says why nothing is captured (any more), `decision` what `graphs="auto"` measured.
    Memory in bytes."""

    shapes: int
    captures: int
    evictions: int
    replays: int
    one_by_one: int
    memory_bytes: int
    why: str | None
    decision: str | None


@dataclass(slots=True)
class _Trial:
    """`graphs="auto"`: the same shape's steps timed both ways, each from an idle device."""

    key: Hashable = None
    one_by_one_ms: list[float] = field(default_factory=list)
    launch_ms: list[float] = field(default_factory=list)
    replay_ms: list[float] = field(default_factory=list)
    pays: bool | None = None

    def takes(self, key: Hashable, replay: bool) -> bool:
        if self.pays is not None or (self.key is not None and key != self.key):
            return False
        return len(self.replay_ms if replay else self.one_by_one_ms) < _TRIAL_STEPS

    def add(self, key: Hashable, replay: bool, launch_ns: int, step_ns: int) -> None:
        self.key = key
        if replay:
            self.replay_ms.append(step_ns / 1e6)
        else:
            self.launch_ms.append(launch_ns / 1e6)
            self.one_by_one_ms.append(step_ns / 1e6)

    def is_over(self) -> bool:
        return self.pays is None and len(self.replay_ms) == _TRIAL_STEPS

    def decide(self) -> str:
        eager, launch = statistics.median(self.one_by_one_ms), statistics.median(self.launch_ms)
        replay = statistics.median(self.replay_ms)
        self.pays = replay < eager * (1 - _WORTH_IT)
        return (
            f"a step takes {eager:.2f} ms launched kernel by kernel ({launch:.2f} ms of it on the "
            f"host) and {replay:.2f} ms as a graph: {'' if self.pays else 'no '}graphs are used"
        )


class GraphedStep:
    """Trains on a batch by replaying its shape's graph, or one by one where there is none."""

    def __init__(self, step: TrainingStep, plan: Plan) -> None:
        self._step = step
        self._device = step.device
        self._plan = plan
        self._trial = _Trial() if plan.graphs == "auto" else None
        extra = _TRIAL_STEPS if self._trial is not None else 0
        self._graphs: GraphCache[LossParts] = GraphCache(
            self._device, most=plan.graph_shapes, after=plan.graph_after + extra
        )
        self._updates: GraphCache[None] = GraphCache(self._device, most=1, after=0)
        self._settings: tuple[Hashable, ...] | None = None
        self._addresses: tuple[Hashable, ...] | None = None
        self._since_change = self._changes = 0
        self._replays = self._one_by_one = 0
        self._key: Hashable = None
        self._decision: str | None = None
        self._why: str | None = None
        obstacle = capturable.why_not(step)
        if obstacle is None:
            capturable.prepare(step)
        else:
            self._give_up(obstacle)

    def train(self, batch: Any, report: Report) -> bool:
        """Train on one batch, on the current stream. Whether it was a replay."""
        captured = self._captured(batch) if self._why is None else None
        if captured is not None:
            self._replays += 1
            self._replay(captured, batch, report)
            return True
        self._one_by_one += 1
        if self._why is None and self._graphs.uses(self._key) == self._plan.graph_after:
            self._watch(batch, report)
        else:
            self._launch(batch, report)
        return False

    def begin_epoch(self) -> None:
        """Graphs of memory that is not the model's or the optimizer's any more are dropped."""
        if self._addresses is not None and capturable.addresses(self._step) != self._addresses:
            self._drop_graphs()

    def restored(self) -> None:
        """The optimizer has another state, and the settings that came with it."""
        self._drop_graphs()
        if self._why is None:
            capturable.prepare(self._step)

    def report(self) -> GraphReport:
        return GraphReport(
            shapes=len(self._graphs),
            captures=self._graphs.captures,
            evictions=self._graphs.evictions,
            replays=self._replays,
            one_by_one=self._one_by_one,
            memory_bytes=self._graphs.memory_bytes + self._updates.memory_bytes,
            why=self._why,
            decision=self._decision,
        )

    def close(self) -> None:
        """Let go of all graphs. Steps go on, one by one at first."""
        self._drop_graphs()

    # --- one batch --------------------------------------------------------------------------------

    def _captured(self, batch: Any) -> Captured[LossParts] | None:
        """The graph for this batch, made now if it is due."""
        try:
            self._look_at_settings()
            self._key = signature(batch)
            captured = self._graphs.find(self._key)
            if captured is None and self._graphs.is_due(self._key) and self._step.updates > 0:
                captured = self._capture(batch)
        except CaptureError as problem:
            self._give_up(_told(problem))
            return None
        return captured

    def _launch(self, batch: Any, report: Report) -> None:
        with self._timed(replay=False):
            parts = self._step.forward(batch)
            report(parts)
            self._step.backward(parts)
            if self._step.group_is_full:
                self._step.update()

    def _watch(self, batch: Any, report: Report) -> None:
        """The last batch before a capture: is there anything that a graph could not repeat?"""
        with loss_as(self._step, "plain"), self._device.watch() as obstacles:
            self._launch(batch, report)
        if obstacles:
            self._give_up("; ".join(dict.fromkeys(map(str, obstacles[:3]))))

    def _replay(self, captured: Captured[LossParts], batch: Any, report: Report) -> None:
        step = self._step
        with self._timed(replay=True):
            step.begin()
            if step.rates is not None:
                step.rates.write()
            report(captured.replay(batches.flatten(batch)))
            step.gathered()
            if step.accumulate == 1:
                step.applied()
            elif step.group_is_full:
                self._update()
        if self._trial is not None and self._trial.is_over():
            self._decide(self._trial)

    def _update(self) -> None:
        """The update at the end of a group, a graph of its own."""
        step = self._step
        if step.rates is not None:
            step.rates.write()
        update = self._updates.find("update")
        if update is None:
            try:
                update = self._updates.capture("update", (), lambda _: step.apply())
            except CaptureError as problem:
                self._give_up(_told(problem))
                step.update()
                return
        update.replay([])
        step.applied()

    # --- capture ----------------------------------------------------------------------------------

    def _capture(self, batch: Any) -> Captured[LossParts]:
        step = self._step
        parameters = list(step.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        if step.rates is not None:
            step.rates.write()
        try:
            captured = self._graphs.capture(self._key, batch, self._device_part)
            if any(p.grad is not before for p, before in zip(parameters, gradients, strict=True)):
                raise CaptureError("some parameters get gradients from some batches only")
        finally:
            for parameter, before in zip(parameters, gradients, strict=True):
                parameter.grad = before  # a failed capture leaves some in the pool's memory
        self._addresses = capturable.addresses(step)
        return captured

    def _device_part(self, batch: Any) -> LossParts:
        """What a graph repeats: all of a step, or with accumulation all but the update."""
        step = self._step
        with loss_as(step, "compiled"):
            parts = step.forward(batch)
        step.gather(parts)
        if step.accumulate == 1:
            step.apply()
        values = {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in parts.values.items()
        }
        return replace(parts, loss=parts.loss.detach(), values=values)

    def _look_at_settings(self) -> None:
        settings = capturable.settings(self._step)
        self._since_change += 1
        if settings == self._settings:
            return
        if self._settings is not None:
            self._changes += self._since_change < _STEADY_BATCHES
            if self._changes == _MOST_CHANGES:
                name = capturable.changed_setting(self._settings, settings)
                raise CaptureError(
                    f"the optimizer's {name} changes from step to step, and a graph keeps it as it "
                    "was (a scheduler's cycle_momentum, say; SGD's lr needs fused=True)"
                )
            self._drop_graphs()
        self._settings, self._since_change = settings, 0

    def _give_up(self, why: str) -> None:
        """From now on, one by one."""
        self._why = why
        self._drop_graphs()
        self._device.say_once(
            f"graphs: {why}",
            "plan %s: the step's kernels are launched one by one, not as a graph: %s",
            self._plan.name,
            why,
        )

    def _drop_graphs(self) -> None:
        self._graphs.close()
        self._updates.close()
        self._addresses = None

    # --- graphs="auto" ----------------------------------------------------------------------------

    @contextmanager
    def _timed(self, *, replay: bool) -> Iterator[None]:
        """Time the step in the block, alone on the device, if the trial still wants it."""
        trial, device = self._trial, self._device
        warmed_up = replay or self._graphs.uses(self._key) > self._plan.graph_after
        if (
            trial is None
            or self._why is not None
            or not warmed_up
            or not trial.takes(self._key, replay)
        ):
            yield
            return
        device.synchronize("auto_graphs")
        start = device.ledger.now_ns()
        yield
        launched = device.ledger.now_ns()
        device.synchronize("auto_graphs")
        trial.add(self._key, replay, launched - start, device.ledger.now_ns() - start)

    def _decide(self, trial: _Trial) -> None:
        self._decision = trial.decide()
        log.info("plan %s: %s", self._plan.name, self._decision)
        if not trial.pays:
            self._why = self._decision
            self._drop_graphs()


def _told(problem: CaptureError) -> str:
    """A failed capture in words: what was raised, and on which line of the user's."""
    cause = problem.__cause__
    if cause is None:
        return str(problem)
    text = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
    site = line_of_error(cause.__traceback__)
    return f"{type(cause).__name__}: {text}" + ("" if site is None else f", at {site}")
