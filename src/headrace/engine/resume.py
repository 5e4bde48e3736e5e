"""Finding the place in a loader: the first batch that a restored engine has not trained on.

Loaders that keep their own state are given it back. A sampler that knows its epoch's plan
(`start_at`) is told where to begin. Of any other the batches before are asked for and dropped,
which takes the time of loading them, and is said.

Random generators go back first to where they stood when the epoch began, from which a loader draws
its order; then, for each batch that had been fetched and not trained on, to where they stood before
it; then to where they stood when the state was taken. (A loader that is a batch ahead of what it
gives made that batch when the last one trained on was asked for: so they also go back to there.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from headrace.data import (
    Cursor,
    Draws,
    Rest,
    Skipping,
    generator_states,
    generators_of,
    rng_states,
    set_host_rng_states,
    set_rng_states,
    state_keeper,
    with_samplers,
)
from headrace.device import Device
from headrace.engine.deferred import DeferredValues, restored
from headrace.engine.loop import Pass
from headrace.engine.stored_state import Position
from headrace.engine.weighted_sum import NOTHING, WeightedSum

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Start:
    """Where in its epoch a pass begins: at batch `first`, which is the loader's first. `cursor` is
    where the loader stands. `pending` are values that were not handed out yet, and `loss` is the
    sum of those that were. `draws` are to be repeated."""

    first: int = 0
    cursor: Cursor = Cursor(0)  # noqa: RUF009 - frozen
    pending: tuple[DeferredValues, ...] = ()
    loss: WeightedSum = NOTHING
    draws: Draws | None = None


class Place:
    """Where an engine stands in its epochs, across interruptions."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # A loaded state: until a pass begins, and in that pass, should it come to nothing.
        self._restored: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        # Where its generators stood, until they stand there again.
        self._random: dict[str, Any] | None = None
        # In a pass: where generators stood when it began, and those of the loader's own.
        self._random_at_start: dict[str, Any] | None = None
        self._generators: list[torch.Generator] | None = None  # None: no loader has begun yet
        self._generators_at_start: list[dict[str, Any]] = []
        # Between two passes: the loader's own state.
        self._loader_between: Any = None

    def checked(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state; raises for what else only a pass would find. Generators are set to where it
        says, and then back."""
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
            torch.Generator().manual_seed(one["seed"]).set_state(one["state"].to("cpu"))
        total, weight = state["epoch_loss"]
        WeightedSum(total, weight).plus([DeferredValues(0, {"loss": 0.0})], "loss")
        for block in state["deferred"]:
            count, rows = len(block["steps"]), block["rows"]
            fits = rows is None or tuple(rows.shape) == (count, len(block["names"]))
            if not fits or len(block["numbers"]) != count:
                raise ValueError("its values not yet reported are of other shapes")
        return state

    def restore(self, state: dict[str, Any]) -> int:
        """Go back to an engine's state. Returns how many batches it had trained on."""
        self._restored = state
        self._random = state["random"]
        if state["random_at_start"] is None:
            self._draw_on()  # between two epochs; else once the loader has begun, which draws, too
        batch: int = state["batch"]
        return batch

    # --- a pass over a loader ---------------------------------------------------------------------

    def begin(self, loader: Iterable[Any], first: int | None) -> tuple[Iterable[Any], Start]:
        """An epoch's loader from the right batch on, and what there is of the batches before. With
        `first`, the loader is there already."""
        state, self._restored = self._restored, None
        self._resumed = state
        if state is not None and state["random_at_start"] is not None:
            set_rng_states(self._device, state["random_at_start"])
        self._generators = generators_of(loader)
        # A loader's own state may lack its sampler's generator, as that of Accelerate's does; if it
        # has it, the loader sets it again.
        if state is not None and (state["generators"] or state["loader"] is None):
            self._set_generators(state["generators"], begun=state["random_at_start"] is not None)
        self._random_at_start = rng_states(self._device)
        self._generators_at_start = generator_states(self._generators)
        if state is None:
            begin = first or 0
            return loader, Start(begin, Cursor(begin), draws=Draws(loader))
        draws = Draws(loader, state["drawn_ahead"], state["drawn_last"], begun=self._draw_on)
        own = state["batch"] if state["own_batch"] is None else state["own_batch"]
        if first is None:
            # Of a share that has come to its end, the last batch stands in.
            loader = sought(loader, own - 1 if state["share_ended"] else own, state["loader"])
        elif first != state["batch"]:  # another place than the state's
            state = {**state, "batch": first, "share_ended": False, "loader": None}
            own = first
        return loader, Start(
            state["batch"],
            Cursor(own, state["share_ended"], state["loader"], draws.last),
            pending=tuple(restored(state["deferred"], self._device)),
            loss=WeightedSum(*state["epoch_loss"]),
            draws=draws,
        )

    def end(self, run: Pass, *, failed: bool) -> None:
        """A pass has ended. One that fails before its first batch leaves the place as it was."""
        self._loader_between = run.stages.feed.end_state
        if failed and not run.has_trained:
            self.not_begun()
        self._resumed = None

    def not_begun(self) -> None:
        """The pass came to nothing: the place is that which was restored, if one was."""
        state, self._resumed = self._resumed, None
        if state is not None:
            self.restore(state)

    def _draw_on(self) -> None:
        """The generators stand where they stood when the state was taken."""
        if self._random is not None:
            set_rng_states(self._device, self._random)
            self._random = None

    def _set_generators(self, states: list[dict[str, Any]] | None, *, begun: bool) -> None:
        """The loader's own go on from where they were. If its epoch had not `begun`, only if they
        are known to be the same ones, by their seeds: an epoch's loader may be made for it."""
        own = self._generators or []
        if states is not None and len(states) != len(own):
            log.warning(
                "the loader has %d generators of its own, and had %d when the state was taken: its "
                "order may be another",
                len(own),
                len(states),
            )
            return
        for generator, state in zip(own, states or [], strict=False):
            if begun or generator.initial_seed() == state["seed"]:
                generator.set_state(state["state"].to("cpu"))

    # --- where it is ------------------------------------------------------------------------------

    def position(self, epoch: int, run: Pass | None) -> Position:
        random = self._random or rng_states(self._device)
        if run is not None:
            return self._in_a_pass(epoch, run, random)
        if self._restored is not None:
            return _position_of(self._restored, random)
        generators = None if self._generators is None else generator_states(self._generators)
        return Position(epoch, random, loader=self._loader_between, generators=generators)

    def _in_a_pass(self, epoch: int, run: Pass, random: dict[str, Any]) -> Position:
        feed, recorder, progress = run.stages.feed, run.stages.recorder, run.progress
        if not feed.has_begun:
            return self._before_the_pass(epoch)
        cursor, failed = progress.cursor, feed.failed_drawn_from
        ahead = feed.drawn_ahead(cursor)
        if failed is not None and feed.is_ahead_of(cursor):
            ahead = [*ahead, failed]
        elif failed is not None:
            random = random | failed  # what a batch drew that could not be had
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
            drawn_last=cursor.drawn_from,
        )

    def _before_the_pass(self, epoch: int) -> Position:
        """If its loader could not begin, whatever that drew until then."""
        if self._resumed is not None:
            return _position_of(self._resumed, self._resumed["random"])
        random = self._random_at_start or rng_states(self._device)
        between, generators = self._loader_between, self._generators_at_start
        return Position(epoch, random, loader=between, generators=generators)


def _position_of(state: dict[str, Any], random: dict[str, Any]) -> Position:
    return Position(**{one.name: state[one.name] for one in fields(Position)} | {"random": random})


def sought(loader: Iterable[Any], batch: int, state: Any) -> Iterable[Any]:
    """The rest of an epoch from `batch` on, given the loader's own state, if it keeps one."""
    keeper = state_keeper(loader)
    if keeper is not None and state is not None:
        try:
            keeper.load_state_dict(state)
        except Exception as problem:
            problem.add_note(
                f"headrace: {type(loader).__name__}.load_state_dict refused the loader's state in "
                "the engine's state: expected the kind of loader it was taken with"
            )
            raise
        return Rest(loader) if batch else loader
    if batch == 0:
        return loader
    for owner in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))):
        if callable(getattr(owner, "start_at", None)):
            owner.start_at(batch)  # type: ignore[union-attr]
            return Rest(loader)
    return Skipping(loader, batch)


def tell_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Samplers that shuffle by epoch must be told which one it is; and so must a loader that would
    tell them itself when it begins, as one prepared by Accelerate does."""
    for owner in with_samplers(loader):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
