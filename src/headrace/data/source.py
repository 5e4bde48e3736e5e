"""What the prefetcher takes its batches from: a loader's iterator, watched.

A loader may keep a state of its own, and may hang. Its state is asked for after every batch, so
that the one that belongs to a batch is known when that batch has been trained on, however many
others were fetched meanwhile. So is where the host's random generators stood before each batch, of
loaders that may draw from them: what was fetched and not trained on can be drawn again. With a
timeout, batches are asked for in a thread, which can be given up.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from headrace.data.align import Aligned, Share
from headrace.data.loader_state import first_state, state_keeper
from headrace.data.rng import drawing_from, have_drawn, host_rng_states
from headrace.device import Device, Stream
from headrace.errors import LoaderError, StepError

log = logging.getLogger("headrace")
_SAY_EVERY_S = 5.0
_MOST_SAMPLERS = 8
_END = object()


class Draws:
    """What a pass over `loader` draws from the host's generators, to be repeated after a resume:
    `again` are the states before each batch that was fetched then and not trained on, and `last`
    is that before the last one that was. `begun` is called when the loader has begun, which may
    draw, too."""

    def __init__(
        self,
        loader: Iterable[Any],
        again: Iterable[dict[str, Any]] = (),
        last: dict[str, Any] | None = None,
        begun: Callable[[], object] | None = None,
    ) -> None:
        self.again, self.last = deque(again), last
        self.begun = begun
        # Not from what lies there already, nor from what other processes make.
        elsewhere: int = getattr(loader, "num_workers", 0)
        self._are_here = not (isinstance(loader, list | tuple) or elsewhere)

    def before(self) -> dict[str, Any] | None:
        """Where the generators stand that the next batch is drawn from; None: it is not."""
        if self.again:
            return self.again[0]
        return host_rng_states() if self._are_here else None

    def next(self, iterator: Iterator[Any]) -> Any:
        """The iterator's next batch, drawn as it was before, if it was."""
        if not self.again:
            return next(iterator)
        with drawing_from(self.again[0]):
            batch = next(iterator, _END)
        self.again.popleft()  # not if it failed: it is still to be drawn again
        if batch is _END:
            raise StopIteration
        return batch


class Source:
    """One pass over a loader. `state` is what the loader's `state_dict()` says after the batch
    that `__next__` returned last, or after the end; None for loaders that have none. `drawn_from`
    is where the host's generators stood before that batch, if it may have been drawn from them:
    `look_at_generators` is called before each."""

    def __init__(
        self,
        loader: Iterable[Any],
        device: Device,
        timeout_s: float = 0,
        draws: Draws | None = None,
    ) -> None:
        self._keeper, self.state = first_state(loader)
        self._aligned = loader if isinstance(loader, Aligned) else None
        #: Of several ranks: what the batch returned last is to the others.
        self.share: Share | None = None
        self._end_flag = EndFlag.of(loader)
        self._draws = draws
        self.drawn_from: dict[str, Any] | None = None
        skipping = loader if isinstance(loader, Skipping) else None
        self._iterator: Any = iter(loader if skipping is None else skipping.loader)
        if timeout_s:
            self._iterator = TimedIterator(self._iterator, device, timeout_s)
        try:
            if skipping is not None:
                skipping.drop(self._iterator, None if draws is None else draws.last)
            if draws is not None and draws.begun is not None:
                draws.begun()
        except BaseException:
            self.close()
            raise

    def look_at_generators(self) -> None:
        if self._draws is not None:
            self.drawn_from = self._draws.before()

    def partly_drawn_from(self, problem: BaseException) -> dict[str, Any] | None:
        """After an error in `__next__`: `drawn_from`, if the batch had drawn anything until then.
        After Ctrl-C it may still draw, in a thread of its own."""
        before = self.drawn_from
        if before is None or (self._draws is not None and self._draws.again):
            return None  # or it is still among those that are to be drawn again
        return before if not isinstance(problem, Exception) or have_drawn(before) else None

    def __next__(self) -> Any:
        draws, iterator = self._draws, self._iterator
        try:
            batch = next(iterator) if draws is None else draws.next(iterator)
        except StopIteration:
            self._note_state()  # at the end it may have gone on to its next epoch
            raise
        if self._keeper is not None:
            self.state = self._keeper.state_dict()
        if self._aligned is not None:
            self.share = self._aligned.share
        if self._end_flag is not None:
            self._end_flag.hold_back()
        return batch

    @property
    def keeps_state(self) -> bool:
        return self._keeper is not None

    @property
    def gave_last(self) -> bool:
        """Whether the batch returned last is known to be the last one."""
        return self._end_flag is not None and self._end_flag.held_back

    def tell_last(self) -> None:
        """The last batch, if it is known to be that, is handed out now."""
        if self._end_flag is not None:
            self._end_flag.raise_again()

    def _note_state(self) -> None:
        if self._keeper is not None:
            self.state = self._keeper.state_dict()

    def close(self) -> None:
        """A generator's own clean-up runs now, not at some later collection."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()


class EndFlag:
    """The flag `end_of_dataloader` that a loader prepared by Accelerate raises when it gives its
    last batch, and that Accelerate's gradient accumulation reads in the training loop. It is held
    back until the last batch is handed out: the loop may still be batches behind."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.held_back = False

    @classmethod
    def of(cls, loader: Any) -> EndFlag | None:
        # Statically: not where `loader` only passes on another one's attributes.
        value = inspect.getattr_static(loader, "end_of_dataloader", None)
        return cls(loader) if isinstance(value, bool) else None

    def hold_back(self) -> None:
        if self._loader.end_of_dataloader:
            self._loader.end_of_dataloader, self.held_back = False, True

    def raise_again(self) -> None:
        if self.held_back:
            self._loader.end_of_dataloader = True


def with_samplers(loader: Any) -> list[Any]:
    """A loader and the samplers inside it: a batch sampler has a sampler of its own, and Accelerate
    puts another batch sampler around it."""
    found = [loader]
    for owner in found:
        for name in ("sampler", "batch_sampler"):
            part = getattr(owner, name, None)
            if part is not None and all(part is not other for other in found):
                found.append(part)
        if len(found) > _MOST_SAMPLERS:  # attributes that lead nowhere
            break
    return found


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers were given to draw from."""
    found = [getattr(owner, "generator", None) for owner in with_samplers(loader)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class Rest:
    """A loader that has been brought to the midst of an epoch: its length is not that of the rest.
    The state of one that keeps it is asked for here."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        keeper = state_keeper(loader)
        if keeper is not None:
            self.state_dict, self.load_state_dict = keeper.state_dict, keeper.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class Skipping:
    """A loader without its first `count` batches."""

    def __init__(
        self,
        loader: Iterable[Any],
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loader, self._count, self._clock = loader, count, clock

    def first(self, most: int) -> Skipping:
        """The first so many of the rest."""
        return Skipping(First(self.loader, self._count + most), self._count, self._clock)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._count)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        self.drop(iterator)
        return iterator

    def drop(self, iterator: Any, drawn_from: dict[str, Any] | None = None) -> None:
        """Ask the loader's iterator for those batches, and say so. With the last of them a loader
        that is one batch ahead of what it gives, as Accelerate's is, makes the first that is not
        dropped: it is drawn as it was before, from `drawn_from`."""
        log.warning(
            "the loader keeps no state and cannot be told where to begin: the first %d batches of "
            "this epoch, trained on before, are loaded and dropped",
            self._count,
        )
        said = self._clock()
        for done in range(self._count):
            again = drawn_from if done == self._count - 1 else None
            try:
                with nullcontext() if again is None else drawing_from(again):
                    next(iterator)
            except StopIteration:
                raise StepError(
                    f"the loader has {done} batches, and {self._count} of this epoch were trained "
                    "on before: expected the same loader"
                ) from None
            if self._clock() - said > _SAY_EVERY_S:
                said = self._clock()
                log.warning("%d of %d batches dropped", done + 1, self._count)


def first_of(loader: Iterable[Any], most: int) -> Iterable[Any]:
    """The first so many batches of a loader: no more are asked for."""
    return loader.first(most) if isinstance(loader, Skipping) else First(loader, most)


class First:
    """The first items of a loader: no more are asked for, so none are lost to prefetching."""

    def __init__(self, loader: Iterable[Any], most: int) -> None:
        self._loader, self._most = loader, most
        keeper = state_keeper(loader)
        if keeper is not None:
            self.state_dict, self.load_state_dict = keeper.state_dict, keeper.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._most)

    def __len__(self) -> int:
        return min(self._most, len(self._loader))  # type: ignore[arg-type]


class TimedIterator:
    """Asks an iterator in a thread of its own, and for no longer than `timeout_s` seconds.

    A thread cannot be stopped: one that hangs is left behind, as a daemon, with its iterator.
    """

    def __init__(self, iterator: Iterator[Any], device: Device, timeout_s: float) -> None:
        self._iterator, self._device, self._timeout_s = iterator, device, timeout_s
        self._wanted: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._asked = 0
        self._hangs = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headrace-loader", daemon=True)
            self._thread.start()
        # A loader that puts something on the device does so on the stream that asks.
        self._wanted.put(self._device.current_stream())
        try:
            batch, problem = self._found.get(timeout=self._timeout_s)
        except queue.Empty:
            self._hangs = True
            raise LoaderError(
                f"the loader has given no batch for {self._timeout_s:g} s (the {self._asked + 1}. "
                "of this pass): it hangs, or loader_timeout is too short for it"
            ) from None
        self._asked += 1
        if problem is not None:
            raise problem
        return batch

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            self._close_iterator()
            return
        self._wanted.put(None)
        if not self._hangs:
            thread.join(self._timeout_s)  # after Ctrl-C it may be asking still

    def _work(self) -> None:
        while (stream := self._wanted.get()) is not None:
            try:
                with self._device.use(stream):
                    self._found.put((next(self._iterator), None))
            except BaseException as problem:  # raised in the foreground, as itself
                self._found.put((None, problem))
                return
        self._close_iterator()

    def _close_iterator(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()


def end_workers(loader: Any) -> None:
    """End the processes of a DataLoader whose workers live as long as it does, now: whoever holds
    an error that passed through it would keep them alive."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


def loader_error(problem: BaseException) -> LoaderError | None:
    """What a DataLoader's own error says of its processes, in a line; None for any other."""
    text = " ".join(str(problem).split())
    died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", text)
    if isinstance(problem, RuntimeError) and died is not None:
        return LoaderError(
            f"a loader process ({died[1]}) {died[2].rstrip('. ')}: has the machine run out of "
            "memory? Fewer workers need less"
        )
    if isinstance(problem, RuntimeError) and text.startswith("DataLoader timed out"):
        return LoaderError(f"{text}: a loader process hangs, or loader_timeout is too short for it")
    if text.startswith("Caught ") and "DataLoader worker process" in text:
        lines = [line for line in str(problem).splitlines() if line.strip()]
        return LoaderError(f"a loader process raised {lines[-1].strip()}")
    return None
