"""An engine's position in its epochs, and how a restored engine returns to it.

A loader that keeps its own state loads that state. A loader or sampler with `start_at` begins at
the next batch to train on. With any other loader, the batches before that one are loaded and
dropped; this takes time, and the log says so.

A resumed epoch draws the same random numbers as an uninterrupted one. For that, generators are set

1. before the loader begins, to where they were when the epoch began: it may draw its order;
2. while the last of the dropped batches is loaded, to where they were before it: a loader that
   works one batch ahead makes the next batch at that time;
3. once the loader has begun, to where they were when the state was taken;
4. while a batch is loaded that had been fetched but not trained on, to where they were before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from headrace.data import (
    Cursor,
    LoaderRng,
    generator_states,
    generators_of,
    rng_states,
    set_host_rng_states,
    set_rng_states,
)
from headrace.device import Device
from headrace.engine.loop.loop import Pass
from headrace.engine.state.loader_position import loader_at
from headrace.engine.state.position import Position
from headrace.engine.values.arrived import DeferredValues, values_of_state
from headrace.engine.values.weighted_sum import EMPTY_SUM, WeightedSum

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Start:
    """Where in its epoch a pass begins. `first` is the number of the loader's next batch, and
    `cursor` is the loader's position before it. `pending` are values of earlier batches that were
    not handed out yet, `loss` is the sum of those that were. `loader_rng` has the random states
    from which the loader draws again."""

    first: int = 0
    cursor: Cursor = Cursor(0)  # noqa: RUF009 - frozen
    pending: tuple[DeferredValues, ...] = ()
    loss: WeightedSum = EMPTY_SUM
    loader_rng: LoaderRng | None = None


class PositionTracker:
    """Tracks an engine's position in its epochs, also after a state was loaded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # A loaded state that the next pass will begin from, and the one that this pass began from.
        self._loaded: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        # The random states of a loaded state, until they are restored.
        self._random_to_restore: dict[str, Any] | None = None
        # The random states when the pass began, those of the loader's own generators included.
        self._random_at_start: dict[str, Any] | None = None
        self._generators: list[torch.Generator] | None = None  # None: no loader has begun yet
        self._generators_at_start: list[dict[str, Any]] = []
        # The loader's own state after the last pass.
        self._loader_after_pass: Any = None

    def checked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state, or raise for a mistake that would otherwise show only in the next pass.
        To check random states, sets the generators to them and then back."""
        now = rng_states(self._device)
        try:
            for random in (state["random"], state["random_at_start"]):
                if random is not None:
                    set_rng_states(self._device, random)
            for random in (*state["drawn_ahead"], state["drawn_last"]):
                if random is not None:
                    set_host_rng_states(random)
        finally:
            set_rng_states(self._device, now)
        for one in state["generators"] or []:
            # On a GPU, if that is PyTorch's default device.
            generator = torch.Generator(device=one["device"])
            generator.manual_seed(one["seed"]).set_state(one["state"].to("cpu"))
        total, weight = state["epoch_loss"]
        WeightedSum(total, weight).plus([DeferredValues(0, {"loss": 0.0})], "loss")
        for block in state["deferred"]:
            count, rows = len(block["steps"]), block["rows"]
            fits = rows is None or tuple(rows.shape) == (count, len(block["names"]))
            if not fits or len(block["numbers"]) != count:
                raise ValueError("the shapes of its pending values do not match their names")
        return state

    def restore(self, state: dict[str, Any]) -> int:
        """Take the position from a loaded state. Returns how many batches of the epoch it had
        trained on."""
        self._loaded = state
        self._random_to_restore = state["random"]
        if state["random_at_start"] is None:
            self._restore_random()  # between two epochs; else once the loader has begun
        batch: int = state["batch"]
        return batch

    # --- a pass over a loader ---------------------------------------------------------------------

    def begin(self, loader: Iterable[Any], first: int | None) -> tuple[Iterable[Any], Start]:
        """Begin a pass. Returns the loader, brought to the batch to begin at, and the start of the
        pass. `first` says that the loader begins at that batch already."""
        state, self._loaded = self._loaded, None
        self._resumed = state
        if state is not None and state["random_at_start"] is not None:
            set_rng_states(self._device, state["random_at_start"])
        self._generators = generators_of(loader)
        # The state of Accelerate's loaders lacks their sampler's generator, so it is set here. A
        # loader whose state has it sets it again later.
        if state is not None and (state["generators"] or state["loader"] is None):
            self._set_loader_generators(
                state["generators"], begun=state["random_at_start"] is not None
            )
        self._random_at_start = rng_states(self._device)
        self._generators_at_start = generator_states(self._generators)
        if state is None:
            begin = first or 0
            return loader, Start(begin, Cursor(begin), loader_rng=LoaderRng(loader))
        loader_rng = LoaderRng(
            loader, state["drawn_ahead"], state["drawn_last"], on_begin=self._restore_random
        )
        own = state["batch"] if state["own_batch"] is None else state["own_batch"]
        if first is None:
            # If this rank's loader has ended, it begins at its last batch, which is given again.
            loader = loader_at(loader, own - 1 if state["share_ended"] else own, state["loader"])
        elif first != state["batch"]:  # the user chose another position
            state = {**state, "batch": first, "share_ended": False, "loader": None}
            own = first
        return loader, Start(
            state["batch"],
            Cursor(own, state["share_ended"], state["loader"], loader_rng.last),
            pending=tuple(values_of_state(state["deferred"], self._device)),
            loss=WeightedSum(*state["epoch_loss"]),
            loader_rng=loader_rng,
        )

    def end(self, run: Pass, *, failed: bool) -> None:
        """Call when a pass has ended. If it failed before its first batch, the position stays what
        it was before the pass."""
        self._loader_after_pass = run.stages.feed.end_state
        if failed and not run.has_trained:
            self.cancel()
        self._resumed = None

    def cancel(self) -> None:
        """Undo `begin`: the next pass begins from the loaded state again, if there was one."""
        state, self._resumed = self._resumed, None
        if state is not None:
            self.restore(state)

    def _restore_random(self) -> None:
        """Set the generators to where they were when the loaded state was taken."""
        if self._random_to_restore is not None:
            set_rng_states(self._device, self._random_to_restore)
            self._random_to_restore = None

    def _set_loader_generators(self, states: list[dict[str, Any]] | None, *, begun: bool) -> None:
        """Set the loader's own generators to stored states. If the stored epoch had not `begun`,
        set only those with the same seed: users may make a loader for each epoch, with a seed of
        its own."""
        own = self._generators or []
        if states is not None and len(states) != len(own):
            log.warning(
                "the loader has %d generators of its own, and had %d when the state was taken, so "
                "it may shuffle differently: resume with the loader that the state was taken with",
                len(own),
                len(states),
            )
            return
        for generator, state in zip(own, states or [], strict=False):
            if begun or generator.initial_seed() == state["seed"]:
                generator.set_state(state["state"].to("cpu"))

    # --- the position -----------------------------------------------------------------------------

    def position(self, epoch: int, run: Pass | None) -> Position:
        """The present position: in the pass `run`, or between two passes."""
        random = self._random_to_restore or rng_states(self._device)
        if run is not None:
            return self._position_in_pass(epoch, run, random)
        if self._loaded is not None:
            return _position_of(self._loaded, random)
        generators = None if self._generators is None else generator_states(self._generators)
        return Position(epoch, random, loader=self._loader_after_pass, generators=generators)

    def _position_in_pass(self, epoch: int, run: Pass, random: dict[str, Any]) -> Position:
        feed, recorder, progress = run.stages.feed, run.stages.recorder, run.progress
        if not feed.has_begun:
            return self._position_before_pass(epoch)
        cursor, failed = progress.cursor, feed.rng_before_failed
        ahead = feed.drawn_ahead(cursor)
        if failed is not None and feed.is_ahead_of(cursor):
            ahead = [*ahead, failed]
        elif failed is not None:
            random = random | failed  # repeat what the batch that failed has drawn
        loss = recorder.loss()
        return Position(
            epoch,
            random,
            batch=progress.batches,
            own_batch=cursor.own,
            share_ended=cursor.ended,
            loader=cursor.loader,
            deferred=recorder.state(),
            epoch_loss=[loss.total, loss.weight],
            random_at_start=self._random_at_start,
            generators=self._generators_at_start,
            drawn_ahead=ahead,
            drawn_last=cursor.rng_before,
        )

    def _position_before_pass(self, epoch: int) -> Position:
        """The position if the loader could not begin: what it has drawn will be drawn again."""
        if self._resumed is not None:
            return _position_of(self._resumed, self._resumed["random"])
        random = self._random_at_start or rng_states(self._device)
        loader, generators = self._loader_after_pass, self._generators_at_start
        return Position(epoch, random, loader=loader, generators=generators)


def _position_of(state: dict[str, Any], random: dict[str, Any]) -> Position:
    stored = {field.name: state[field.name] for field in fields(Position)}
    return Position(**stored | {"random": random})
