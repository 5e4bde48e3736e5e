"""Finding the place in a loader: the first batch that a restored engine has not trained on.

Loaders that keep their own state are given it back. A sampler that knows its epoch's plan
(`start_at`) is told where to begin. Of any other the batches before are asked for and dropped,
which takes the time of loading them, and is said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace import engine_state
from headrace.deferred import DeferredValues, restored
from headrace.device import Device
from headrace.engine_state import Position
from headrace.errors import StepError
from headrace.loading import state_keeper
from headrace.loop import Loop

log = logging.getLogger("headrace")
_SAY_EVERY_S = 5.0


class Place:
    """Where an engine stands in its epochs, across interruptions."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._restored: dict[str, Any] | None = None
        self._random: dict[str, Any] | None = None
        self._random_at_start: dict[str, Any] | None = None
        self._before: tuple[int, dict[str, Any]] | None = None

    def restore(self, state: dict[str, Any]) -> int:
        """Go back to an engine's state. Returns how many batches it had trained on."""
        self._restored = state
        # Set once the loader has begun, which may draw from the generators too.
        self._random = state["random"]
        batch: int = state["batch"]
        return batch

    def begin(
        self, loader: Iterable[Any], first: int | None
    ) -> tuple[Iterable[Any], int, list[DeferredValues]]:
        """An epoch's loader from the right batch on, that batch's number, and values that are
        still to be reported. With `first`, the loader is there already."""
        state, self._restored = self._restored, None
        self._before = None
        if state is None:
            self.before_batch(None)  # restored after an epoch's last batch: none was left of it
        elif state["batch"] == 0:
            self._as_before_the_loader(state)
        self._random_at_start = engine_state.random_states(self._device)
        if state is None:
            return loader, first or 0, []
        if state["batch"]:
            self._random_at_start = state["random_at_start"]
        if first is None:
            first, loader = state["batch"], sought(loader, state, self._device)
        return loader, first, restored(state["deferred"], self._device)

    def _as_before_the_loader(self, state: dict[str, Any]) -> None:
        """At an epoch's beginning: a loader that shuffles is to draw the order that it would have
        drawn. Between two epochs it had not begun, so what it draws is drawn once."""
        if state["random_at_start"] is not None:
            _as_at_the_start(state, self._device)
        else:
            self.before_batch(None)

    def before_batch(self, run: Loop | None) -> None:
        """The generators stand where they stood before the batch that is now to come. With `run`
        it is kept where that is: if the batch fails, the state is that before it."""
        if self._random is not None:
            engine_state.set_random_states(self._device, self._random)
            self._random = None
        if run is not None:
            self._before = (run.trained, engine_state.random_states(self._device))

    def position(self, epoch: int, run: Loop | None) -> Position:
        random = self._random or engine_state.random_states(self._device)
        if run is not None:
            if self._before is not None and self._before[0] == run.trained:
                random = self._before[1]  # a batch was begun, and not trained on
            return Position(
                epoch,
                random,
                run.trained,
                run.loader_state,
                run.deferred_state(),
                self._random_at_start,
            )
        if self._restored is not None:
            names = ("batch", "loader", "deferred", "random_at_start")
            return Position(epoch, random, *(self._restored[name] for name in names))
        return Position(epoch, random)


def sought(loader: Iterable[Any], state: dict[str, Any], device: Device) -> Iterable[Any]:
    """The rest of the epoch that `state`, an engine's, is in the midst of."""
    batch: int = state["batch"]
    keeper = state_keeper(loader)
    if keeper is not None and state["loader"] is not None:
        keeper.load_state_dict(state["loader"])
        return loader
    if batch == 0:
        return loader
    for owner in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))):
        if callable(getattr(owner, "start_at", None)):
            owner.start_at(batch)  # type: ignore[union-attr]
            return loader
    return Skipping(loader, batch, lambda: _as_at_the_start(state, device))


def _as_at_the_start(state: dict[str, Any], device: Device) -> None:
    """A loader that shuffles draws its order from the generators, when it begins."""
    if state["random_at_start"] is not None:
        engine_state.set_random_states(device, state["random_at_start"])


class Skipping:
    """A loader without its first `count` batches. `prepare` is called before it begins."""

    def __init__(
        self,
        loader: Iterable[Any],
        count: int,
        prepare: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader, self._count, self._prepare = loader, count, prepare
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        self._prepare()
        log.warning(
            "the loader keeps no state and cannot be told where to begin: the first %d batches of "
            "this epoch, trained on before, are loaded and dropped",
            self._count,
        )
        said, iterator = self._clock(), iter(self._loader)
        for done in range(self._count):
            try:
                next(iterator)
            except StopIteration:
                raise StepError(
                    f"the loader has {done} batches, and {self._count} of this epoch were trained "
                    "on before: expected the same loader"
                ) from None
            if self._clock() - said > _SAY_EVERY_S:
                said = self._clock()
                log.warning("%d of %d batches dropped", done + 1, self._count)
        return iterator


def tell_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Samplers that shuffle by epoch must be told which one it is."""
    for owner in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)  # type: ignore[union-attr]
