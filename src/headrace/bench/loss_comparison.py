"""The losses of every contestant, step by step, from the same weights, batches and seed.

A pass of its own, apart from the timing: with deterministic kernels, so that bits can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.bench.endless_batches import EndlessBatches
from headrace.bench.equality import ComparedLosses, compare, remove_dropout, rounds_differently
from headrace.bench.plan_list import PlanEntry
from headrace.bench.text import DEFAULT_PRECISION
from headrace.bench.trainable import EngineTrainable, Trainable, describe_error, release_memory
from headrace.bench.works.work import Training, Work
from headrace.device import Device
from headrace.errors import BenchError, HeadraceError
from headrace.runs.records import Equality

_OTHER_MASKS = "compiled code draws other dropout masks: compared without dropout"
_STILL_RANDOM = (
    "compiled code draws other random numbers than the plain code, and the step draws some that "
    "are no dropout module's"
)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A run of the reference: its losses, and whether it drew random numbers on the device."""

    losses: tuple[float, ...]
    draws: bool


def first_batches(
    work: Work, device: Device, entry: PlanEntry, *, seed: int, count: int
) -> list[Any]:
    """A work's first batches: drawn once for everybody, whatever the order of drawing. A work that
    cannot be made, or has no batches, is an error that says where."""
    batches: EndlessBatches | None = None
    try:
        made = work.make(device, seed=seed, loader=entry.loader, pin=True)
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
    """Compares contestants with `reference`, one after the other, each alone, on `batches`."""

    def __init__(
        self,
        work: Work,
        device: Device,
        reference: PlanEntry,
        batches: list[Any],
        *,
        seed: int,
        tolerance: float,
    ) -> None:
        self._work, self._device, self._reference = work, device, reference
        self._batches, self._seed, self._tolerance = batches, seed, tolerance
        self._passes: dict[bool, _Pass] = {}  # by whether it is without dropout
        self._deterministic = True
        self._why_not_exact = ""
        self._trainable: Trainable | None = None  # the one that is run now

    def compare(self, entry: PlanEntry | None, make: Callable[[], Trainable]) -> ComparedLosses:
        """Train a contestant and compare its losses. It is the plan of `entry`, or, without one,
        the peer that `make` gives. What goes wrong is in the result."""
        try:
            found = self._of_peer(make) if entry is None else self._of_plan(entry)
        except Exception as problem:
            trained = None if self._trainable is None else self._trainable.trained
            found = ComparedLosses(error=describe_error(problem, trained))
        # Not inside `except`: the error's traceback holds on to the memory.
        self._trainable = None
        release_memory(self._device)
        return found

    def _of_plan(self, entry: PlanEntry) -> ComparedLosses:
        base = self._reference
        if entry.loader.batch_size not in (None, base.loader.batch_size):
            return _not_compared("its plan file has another batch size")
        reference = self._pass(without_dropout=False)
        if entry.name == base.name:
            return ComparedLosses(Equality("reference"), reference.losses)
        for step, loss in enumerate(reference.losses, 1):
            if not math.isfinite(loss):
                return _not_compared(f"{base.name}'s loss is not finite at step {step}")
        compiled = entry.plan.compile and self._device.compiles
        bare = compiled and reference.draws
        if bare:
            reference = self._pass(without_dropout=True)
            if reference.draws:
                return _not_compared(_STILL_RANDOM)
        made = self._make(entry, bare)
        why = self._why_within(entry, made, compiled, bare)
        losses = self._run(entry, made, deterministic=self._deterministic and not compiled)
        if compiled:
            torch.compiler.reset()  # nothing else that is compiled is in use yet
        equal = compare(
            reference.losses,
            losses,
            exact=self._deterministic and not why,
            tolerance=self._tolerance,
            why=why or self._why_not_exact,
        )
        return ComparedLosses(equal, losses, reference.losses if bare else ())

    def _of_peer(self, make: Callable[[], Trainable]) -> ComparedLosses:
        """Within the tolerance: a peer's kernels are its own affair."""
        reference = self._pass(without_dropout=False)
        trainable = self._trainable = make()
        try:
            if reference.draws and getattr(trainable, "compiles", False):
                return _not_compared("compiled code draws other dropout masks")
            losses = trainable.losses(self._batches)
        finally:
            trainable.close()
        equal = compare(
            reference.losses, losses, exact=False, tolerance=self._tolerance, why="a peer"
        )
        return ComparedLosses(equal, losses)

    def _why_within(self, entry: PlanEntry, made: Training, compiled: bool, bare: bool) -> str:
        """Why bits cannot be expected to be the same; empty if they can."""
        if compiled:
            return _OTHER_MASKS if bare else "compiled code rounds differently"
        own, reference = entry.plan.precision, self._reference.plan.precision
        if own != reference:
            return f"{own or DEFAULT_PRECISION} instead of {reference or DEFAULT_PRECISION}"
        captured = entry.plan.graphs != "off" and self._device.captures
        if captured and rounds_differently(made.optimizer):
            return "the optimizer was made capturable and rounds differently; a fused one does not"
        return ""

    def _pass(self, *, without_dropout: bool) -> _Pass:
        """The reference's, once; without deterministic kernels where the work has none."""
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
        losses = self._run(self._reference, made, deterministic=self._deterministic)
        return _Pass(losses, not torch.equal(before, self._device.random_state()))

    def _make(self, entry: PlanEntry, without_dropout: bool) -> Training:
        made = self._work.make(self._device, seed=self._seed, loader=entry.loader)
        if without_dropout:
            remove_dropout(made.model)
        return made

    def _run(self, entry: PlanEntry, made: Training, *, deterministic: bool) -> tuple[float, ...]:
        trainable = EngineTrainable(
            self._work,
            self._device,
            entry,
            seed=self._seed,
            deterministic=deterministic,
            training=made,
        )
        self._trainable = trainable
        try:
            return trainable.losses(self._batches)
        finally:
            trainable.close()


def _not_compared(why: str) -> ComparedLosses:
    return ComparedLosses(Equality("not compared", why=why))
