"""Compares every contestant's losses with the reference's, from the same weights, batches and seed.

This is separate from the timing, because it runs with deterministic kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.bench.endless_batches import EndlessBatches
from headrace.bench.equality import ComparedLosses, compare, compare_weights, remove_dropout
from headrace.bench.plan_list import PlanEntry
from headrace.bench.text import DEFAULT_PRECISION
from headrace.bench.trainable import (
    EngineTrainable,
    Trainable,
    describe_error,
    release_memory,
    require_usable,
)
from headrace.bench.works.training import Made, StepTraining
from headrace.bench.works.work import Workload
from headrace.device import Device
from headrace.errors import BenchError, HeadraceError
from headrace.records import Equality

_OTHER_MASKS = "compiled code draws other dropout masks: compared without dropout"
_STILL_RANDOM = (
    "compiled code draws other random numbers than eager code, and the step draws some outside of "
    "dropout modules"
)


@dataclass(frozen=True, slots=True)
class _PlanRun:
    """The losses of a plan, and why their last digits may differ from the reference's."""

    losses: tuple[float, ...]
    rounding: str | None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A run of the reference: its losses, whether it drew random numbers on the device and, for a
    step of the user's own, the weights that it left."""

    losses: tuple[float, ...]
    is_random: bool
    weights: dict[str, torch.Tensor] | None


def first_batches(
    work: Workload, device: Device, entry: PlanEntry, *, seed: int, count: int
) -> list[Any]:
    """A workload's first batches, drawn once for all contestants. Raises `BenchError` if it cannot
    be built or has no batches."""
    batches: EndlessBatches | None = None
    try:
        made = work.make(device, seed=seed, loader=entry.loader, pin=True)
        if isinstance(made, StepTraining):
            made.require_precision(entry.plan.precision)
        batches = EndlessBatches(made.loader, work.name)
        return list(batches.take(count))
    except HeadraceError:
        raise
    except Exception as problem:
        what = work.name if batches is None else f"the loader of {work.name}"
        raise BenchError(f"{what} failed: {describe_error(problem)}") from problem
    finally:
        if batches is not None:
            batches.close()


class LossComparison:
    """Compares contestants with `reference` on `batches`, one after the other."""

    def __init__(
        self,
        work: Workload,
        device: Device,
        reference: PlanEntry,
        batches: list[Any],
        *,
        seed: int,
        tolerance: float,
    ) -> None:
        self._work, self._device, self._reference = work, device, reference
        self._batches, self._seed, self._tolerance = batches, seed, tolerance
        self._passes: dict[bool, _Pass] = {}  # keyed by `without_dropout`
        self._deterministic = True
        self._why_not_exact = ""
        self._trainable: Trainable | None = None  # the one that is running

    def compare(self, entry: PlanEntry | None, make: Callable[[], Trainable]) -> ComparedLosses:
        """Train a contestant and compare its losses. It is the plan of `entry` or, if that is None,
        the peer that `make` builds. Errors are in the result; raises `DeviceLost` if the device
        cannot be used any more."""
        try:
            found = self._of_peer(make) if entry is None else self._of_plan(entry)
        except (Exception, SystemExit) as problem:
            trained = None if self._trainable is None else self._trainable.trained
            found = ComparedLosses(error=describe_error(problem, trained))
        # Outside `except`: the error's traceback keeps tensors alive.
        self._trainable = None
        if found.error is not None:
            require_usable(self._device, found.error)
        release_memory(self._device)
        return found

    def _of_plan(self, entry: PlanEntry) -> ComparedLosses:
        base = self._reference
        if entry.loader.batch_size not in (None, base.loader.batch_size):
            return _not_compared("its plan file sets another batch size")
        reference = self._pass(without_dropout=False)
        if entry.name == base.name:
            return ComparedLosses(Equality("reference"), reference.losses)
        for step, loss in enumerate(reference.losses, 1):
            if not math.isfinite(loss):
                return _not_compared(f"{base.name}'s loss is not finite at step {step}")
        # A step of the user's own is not compiled.
        compiled = entry.plan.compile and self._device.compiles and reference.weights is None
        without_dropout = compiled and reference.is_random
        if without_dropout:
            reference = self._pass(without_dropout=True)
            if reference.is_random:
                return _not_compared(_STILL_RANDOM)
        made = self._make(entry, without_dropout)
        run = self._run(entry, made, deterministic=self._deterministic and not compiled)
        losses, why = run.losses, self._why_within(entry, run, compiled, without_dropout)
        if compiled:
            torch.compiler.reset()  # no other compiled code is in use yet
        equal = compare(
            reference.losses,
            losses,
            exact=self._deterministic and not why,
            tolerance=self._tolerance,
            why=why or self._why_not_exact,
        )
        if reference.weights is not None and not (losses or reference.weights):
            return _not_compared("the step returns no loss, and its modules were not found")
        if reference.weights is not None and equal.verdict != "unequal":
            equal = compare_weights(
                self._device,
                reference.weights,
                _weights(made, self._device),
                equal,
                tolerance=self._tolerance,
            )
        return ComparedLosses(equal, losses, reference.losses if without_dropout else ())

    def _of_peer(self, make: Callable[[], Trainable]) -> ComparedLosses:
        """Compare within the tolerance: a peer chooses its own kernels."""
        reference = self._pass(without_dropout=False)
        trainable = self._trainable = make()
        try:
            if reference.is_random and getattr(trainable, "compiles", False):
                return _not_compared("compiled code draws other dropout masks")
            losses = trainable.losses(self._batches)
        finally:
            trainable.close()
        equal = compare(
            reference.losses, losses, exact=False, tolerance=self._tolerance, why="a peer"
        )
        return ComparedLosses(equal, losses)

    def _why_within(
        self, entry: PlanEntry, run: _PlanRun, compiled: bool, without_dropout: bool
    ) -> str:
        """Why the losses need not match bit for bit; empty if they must."""
        if compiled:
            return _OTHER_MASKS if without_dropout else "compiled code rounds differently"
        own, reference = entry.plan.precision, self._reference.plan.precision
        if own != reference:
            return f"{own or DEFAULT_PRECISION} instead of {reference or DEFAULT_PRECISION}"
        return run.rounding or ""

    def _pass(self, *, without_dropout: bool) -> _Pass:
        """The reference's run, which is kept. It runs again without deterministic kernels if the
        work uses an operation that has none."""
        if without_dropout not in self._passes:
            try:
                found = self._reference_pass(without_dropout)
            except RuntimeError as problem:
                if "deterministic" not in str(problem):
                    raise
                first = str(problem).split(" does not have")[0]
                self._deterministic = False
                self._why_not_exact = f"no deterministic kernels: {first}"
                found = self._reference_pass(without_dropout)
            self._passes[without_dropout] = found
        return self._passes[without_dropout]

    def _reference_pass(self, without_dropout: bool) -> _Pass:
        made = self._make(self._reference, without_dropout)
        before = self._device.random_state()
        losses = self._run(self._reference, made, deterministic=self._deterministic).losses
        is_random = not torch.equal(before, self._device.random_state())
        weights = _weights(made, self._device) if isinstance(made, StepTraining) else None
        return _Pass(losses, is_random, weights)

    def _make(self, entry: PlanEntry, without_dropout: bool) -> Made:
        made = self._work.make(self._device, seed=self._seed, loader=entry.loader)
        if without_dropout and not isinstance(made, StepTraining):
            remove_dropout(made.model)
        return made

    def _run(self, entry: PlanEntry, made: Made, *, deterministic: bool) -> _PlanRun:
        trainable = EngineTrainable(
            self._work,
            self._device,
            entry,
            seed=self._seed,
            deterministic=deterministic,
            made=made,
        )
        self._trainable = trainable
        try:
            return _PlanRun(trainable.losses(self._batches), trainable.rounding)
        finally:
            trainable.close()


def _weights(made: Made, device: Device) -> dict[str, torch.Tensor]:
    """The weights of the modules that a step uses. Nothing else changes them after this."""
    assert isinstance(made, StepTraining)
    return made.state(device).weights()


def _not_compared(why: str) -> ComparedLosses:
    return ComparedLosses(Equality("not compared", why=why))
