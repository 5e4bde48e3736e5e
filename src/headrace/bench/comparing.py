"""The losses of every contestant, step by step, from the same weights, batches and seed.

A pass of its own, apart from the timing: with deterministic kernels, so that bits can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from headrace.bench.contestants import Contestant
from headrace.bench.entries import Entry
from headrace.bench.equality import compare, remove_dropout, rounds_differently
from headrace.bench.feed import Feed
from headrace.bench.record import AS_SET, Equal
from headrace.bench.ways import PlannedWay, Way, free, told
from headrace.bench.work import Training, Work
from headrace.device import Device
from headrace.errors import BenchError, HeadraceError

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


def first_batches(work: Work, device: Device, entry: Entry, *, seed: int, count: int) -> list[Any]:
    """A work's first batches: drawn once for everybody, whatever the order of drawing. A work that
    cannot be made, or has no batches, is an error that says where."""
    feed: Feed | None = None
    try:
        feed = Feed(work.make(device, seed=seed, loader=entry.loader, pin=True).loader, work.name)
        return list(feed.take(count))
    except HeadraceError:
        raise
    except Exception as problem:
        what = work.name if feed is None else f"the loader of {work.name}"
        raise BenchError(f"{what} failed: {told(problem)}") from problem
    finally:
        if feed is not None:
            feed.close()


class Comparing:
    """Compares contestants with `reference`, one after the other, each alone, on `batches`."""

    def __init__(
        self,
        work: Work,
        device: Device,
        reference: Entry,
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
        self._way: Way | None = None  # the one that is run now

    def look_at(self, one: Contestant) -> None:
        """Fill in its losses and whether they agree. An error is the contestant's."""
        try:
            with one.noting():
                if one.entry is None:
                    self._look_at_peer(one)
                else:
                    self._look_at_plan(one, one.entry)
        except Exception as problem:
            one.fail(told(problem, None if self._way is None else self._way.trained))
        self._way = None
        free(self._device)

    def _look_at_plan(self, one: Contestant, entry: Entry) -> None:
        base = self._reference
        if entry.loader.batch_size not in (None, base.loader.batch_size):
            one.equal = Equal("not compared", why="its plan file has another batch size")
            return
        reference = self._pass(without_dropout=False)
        if one.name == base.name:
            one.losses, one.equal = reference.losses, Equal("reference")
            return
        for step, loss in enumerate(reference.losses, 1):
            if not math.isfinite(loss):
                why = f"{base.name}'s loss is not finite at step {step}"
                one.equal = Equal("not compared", why=why)
                return
        compiled = entry.plan.compile and self._device.compiles
        bare = compiled and reference.draws
        if bare:
            reference = self._pass(without_dropout=True)
            if reference.draws:
                one.equal = Equal("not compared", why=_STILL_RANDOM)
                return
        made = self._make(entry, bare)
        why = self._why_within(entry, made, compiled, bare)
        one.losses = self._run(entry, made, deterministic=self._deterministic and not compiled)
        if compiled:
            torch.compiler.reset()  # nothing else that is compiled is in use yet
        if bare:
            one.reference_losses = reference.losses
        exact = self._deterministic and not why
        one.equal = compare(
            reference.losses,
            one.losses,
            exact=exact,
            tolerance=self._tolerance,
            why=why or self._why_not_exact,
        )

    def _look_at_peer(self, one: Contestant) -> None:
        """Within the tolerance: a peer's kernels are its own affair."""
        reference = self._pass(without_dropout=False)
        way = self._way = one.make()
        try:
            if reference.draws and getattr(way, "compiles", False):
                one.equal = Equal("not compared", why="compiled code draws other dropout masks")
                return
            one.losses = way.losses(self._batches)
        finally:
            way.close()
        one.equal = compare(
            reference.losses, one.losses, exact=False, tolerance=self._tolerance, why="a peer"
        )

    def _why_within(self, entry: Entry, made: Training, compiled: bool, bare: bool) -> str:
        """Why bits cannot be expected to be the same; empty if they can."""
        if compiled:
            return _OTHER_MASKS if bare else "compiled code rounds differently"
        own, reference = entry.plan.precision, self._reference.plan.precision
        if own != reference:
            return f"{own or AS_SET} instead of {reference or AS_SET}"
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

    def _make(self, entry: Entry, without_dropout: bool) -> Training:
        made = self._work.make(self._device, seed=self._seed, loader=entry.loader)
        if without_dropout:
            remove_dropout(made.model)
        return made

    def _run(self, entry: Entry, made: Training, *, deterministic: bool) -> tuple[float, ...]:
        way = PlannedWay(
            self._work,
            self._device,
            entry,
            seed=self._seed,
            deterministic=deterministic,
            training=made,
        )
        self._way = way
        try:
            return way.losses(self._batches)
        finally:
            way.close()
