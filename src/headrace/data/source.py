"""`Source`: one pass over a loader, with the state that a checkpoint needs after each batch.

Batches are fetched before they are trained on, so a checkpoint cannot ask the loader where it is
now. Instead, `Source` notes with each batch:

- the loader's own state after the batch, if it keeps one;
- the states of the host's random generators before the batch, if the loader may draw from them.
  After a resume, batches that were fetched and not trained on are drawn again from these states.

With a timeout, a thread asks the loader for batches, and is abandoned if the loader hangs.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import queue
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from headrace.data.align import Aligned, Alignment
from headrace.data.loader_state import as_stateful, first_state
from headrace.data.rng import drawing_from, have_drawn, host_rng_states
from headrace.device import Device, Stream
from headrace.errors import LoaderError, StepError

log = logging.getLogger("headrace")
_LOG_EVERY_S = 5.0
_MAX_SAMPLERS = 8
_END = object()
_OUT_OF_MEMORY = "has the machine run out of memory? Fewer workers need less"


class LoaderRng:
    """The states of the host's random generators from which one pass over `loader` draws.

    In a resumed pass, `to_replay` has the states before each batch that the interrupted pass
    fetched and did not train on: those batches are drawn from the same states again. `last` has the
    states before the last batch trained on. `on_begin` is called when the loader has begun, since
    beginning may draw, too.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        to_replay: Iterable[dict[str, Any]] = (),
        last: dict[str, Any] | None = None,
        on_begin: Callable[[], object] | None = None,
    ) -> None:
        self.to_replay, self.last = deque(to_replay), last
        self.on_begin = on_begin
        # The batches of a list exist already, and workers draw from generators of their own.
        workers: int = getattr(loader, "num_workers", 0)
        self._may_draw = not (isinstance(loader, list | tuple) or workers)

    @property
    def has_states(self) -> bool:
        """Whether there is a state before any batch of this pass."""
        return self._may_draw or bool(self.to_replay)

    def before_next(self) -> dict[str, Any] | None:
        """The states from which the next batch is drawn; None if it draws nothing here."""
        if self.to_replay:
            return self.to_replay[0]
        return host_rng_states() if self._may_draw else None

    def next(self, iterator: Iterator[Any]) -> Any:
        """The iterator's next batch, drawn from the first of the states to replay."""
        with drawing_from(self.to_replay[0]):
            batch = next(iterator, _END)
        self.to_replay.popleft()  # only now: a batch that raised must be drawn again
        if batch is _END:
            raise StopIteration
        return batch


class Source:
    """One pass over a loader.

    `state` is the loader's `state_dict()` after the batch that `__next__` returned last, or after
    the end; None if the loader keeps no state. `rng_before` has the states of the host's generators
    before that batch, if it may have drawn from them; call `note_rng` before each `__next__`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Device,
        timeout_s: float = 0,
        rng: LoaderRng | None = None,
    ) -> None:
        self._stateful, self.state = first_state(loader)
        self._aligned = loader if isinstance(loader, Aligned) else None
        #: With several ranks: how the batch returned last relates to those of the other ranks.
        self.alignment: Alignment | None = None
        self._end_flag = EndFlag.of(loader)
        self._rng = rng if rng is not None and rng.has_states else None
        self.rng_before: dict[str, Any] | None = None
        skipping = loader if isinstance(loader, Skipping) else None
        self._iterator: Any = iter(loader if skipping is None else skipping.loader)
        if timeout_s:
            self._iterator = TimedIterator(self._iterator, device, timeout_s)
        try:
            if skipping is not None:
                skipping.drop(self._iterator, None if rng is None else rng.last)
            if rng is not None and rng.on_begin is not None:
                rng.on_begin()
        except BaseException:
            self.close()
            raise

    def note_rng(self) -> None:
        """Set `rng_before` for the next batch."""
        if self._rng is not None:
            self.rng_before = self._rng.before_next()

    def rng_before_failed(self, problem: BaseException) -> dict[str, Any] | None:
        """After an error in `__next__`: `rng_before`, if the failed batch has drawn anything. After
        Ctrl-C that is assumed, since the loader's thread may still be drawing."""
        before = self.rng_before
        if before is None or (self._rng is not None and self._rng.to_replay):
            return None  # a batch that is replayed stays in `to_replay`
        return before if not isinstance(problem, Exception) or have_drawn(before) else None

    def __next__(self) -> Any:
        rng, iterator = self._rng, self._iterator
        try:
            batch = rng.next(iterator) if rng is not None and rng.to_replay else next(iterator)
        except StopIteration:
            self._note_state()  # the loader may have moved on to its next epoch
            raise
        self._note_state()
        if self._aligned is not None:
            self.alignment = self._aligned.alignment
        if self._end_flag is not None:
            self._end_flag.hold_back()
        return batch

    @property
    def keeps_state(self) -> bool:
        return self._stateful is not None

    @property
    def gave_last(self) -> bool:
        """Whether the batch returned last is known to be the last one."""
        return self._end_flag is not None and self._end_flag.held_back

    def release_end_flag(self) -> None:
        """Call this when the last batch is handed out: the loader's end flag is set then."""
        if self._end_flag is not None:
            self._end_flag.release()

    def _note_state(self) -> None:
        if self._stateful is not None:
            self.state = self._stateful.state_dict()

    def close(self) -> None:
        """Close the loader's iterator, so that a generator cleans up now and not when it is
        collected."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()


class EndFlag:
    """The flag `end_of_dataloader` of a loader prepared by Accelerate.

    The loader sets it when it yields its last batch, and Accelerate's gradient accumulation reads
    it in the training loop. The loop may be several batches behind, so the flag is held back until
    the last batch is handed out.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.held_back = False

    @classmethod
    def of(cls, loader: Any) -> EndFlag | None:
        # Statically: a wrapper that forwards the loader's attributes has no flag of its own.
        value = inspect.getattr_static(loader, "end_of_dataloader", None)
        return cls(loader) if isinstance(value, bool) else None

    def hold_back(self) -> None:
        if self._loader.end_of_dataloader:
            self._loader.end_of_dataloader, self.held_back = False, True

    def release(self) -> None:
        if self.held_back:
            self._loader.end_of_dataloader = True


def with_samplers(loader: Any) -> list[Any]:
    """A loader and all samplers inside it. A batch sampler has a sampler of its own, and Accelerate
    wraps another batch sampler around it."""
    found = [loader]
    for owner in found:
        for name in ("sampler", "batch_sampler"):
            part = getattr(owner, name, None)
            if part is not None and all(part is not other for other in found):
                found.append(part)
        if len(found) > _MAX_SAMPLERS:  # an object that has every attribute
            break
    return found


def generators_of(loader: Any) -> list[torch.Generator]:
    """The `torch.Generator`s that were passed to a DataLoader and its samplers."""
    found = [getattr(owner, "generator", None) for owner in with_samplers(loader)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


class ResumedLoader:
    """A loader that begins in the middle of an epoch.

    It has no length, since the loader's length is that of a whole epoch. It has the loader's
    `state_dict`, if there is one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        stateful = as_stateful(loader)
        if stateful is not None:
            self.state_dict = stateful.state_dict
            self.load_state_dict = stateful.load_state_dict

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

    def first(self, limit: int) -> Skipping:
        """The first `limit` batches after the skipped ones."""
        return Skipping(First(self.loader, self._count + limit), self._count, self._clock)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._count)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        self.drop(iterator)
        return iterator

    def drop(self, iterator: Any, rng_before_last: dict[str, Any] | None = None) -> None:
        """Load the skipped batches and drop them, with progress in the log.

        `rng_before_last` has the states of the host's generators before the last of them. A loader
        that works one batch ahead, as Accelerate's does, makes the first batch to train on while it
        yields the last one to drop. That batch must come out as it did before.
        """
        log.warning(
            "the loader has no state_dict() and no start_at(): to resume, the first %d batches of "
            "this epoch, trained on before, are loaded and dropped",
            self._count,
        )
        logged_at = self._clock()
        for done in range(self._count):
            states = rng_before_last if done == self._count - 1 else None
            try:
                with nullcontext() if states is None else drawing_from(states):
                    next(iterator)
            except StopIteration:
                raise StepError(
                    f"the loader ended after {done} batches, and {self._count} of this epoch were "
                    "trained on before: expected the same loader"
                ) from None
            if self._clock() - logged_at > _LOG_EVERY_S:
                logged_at = self._clock()
                log.warning("%d of %d batches dropped", done + 1, self._count)


def first_of(loader: Iterable[Any], limit: int) -> Iterable[Any]:
    """The first `limit` batches of a loader. It is asked for no more than these."""
    return loader.first(limit) if isinstance(loader, Skipping) else First(loader, limit)


class First:
    """The first `limit` batches of a loader. It is asked for no more, because prefetched batches
    beyond the limit would be lost."""

    def __init__(self, loader: Iterable[Any], limit: int) -> None:
        self._loader, self._limit = loader, limit
        stateful = as_stateful(loader)
        if stateful is not None:
            self.state_dict = stateful.state_dict
            self.load_state_dict = stateful.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._limit)

    def __len__(self) -> int:
        return min(self._limit, len(self._loader))  # type: ignore[arg-type]


class TimedIterator:
    """An iterator that raises `LoaderError` when a batch takes longer than `timeout_s` seconds.

    A daemon thread asks the inner iterator. Threads cannot be stopped: one that hangs is abandoned,
    with its iterator.
    """

    def __init__(self, iterator: Iterator[Any], device: Device, timeout_s: float) -> None:
        self._iterator, self._device, self._timeout_s = iterator, device, timeout_s
        self._requests: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._received = 0
        self._hangs = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headrace-loader", daemon=True)
            self._thread.start()
        # A loader that puts tensors on the device must use the stream of the caller.
        self._requests.put(self._device.current_stream())
        try:
            batch, problem = self._results.get(timeout=self._timeout_s)
        except queue.Empty:
            self._hangs = True
            raise LoaderError(
                f"the loader produced no batch for {self._timeout_s:g} s (waiting for batch "
                f"{self._received + 1} of this pass): it hangs, or loader_timeout is too short"
            ) from None
        self._received += 1
        if problem is not None:
            raise problem
        return batch

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            self._close_iterator()
            return
        self._requests.put(None)
        if not self._hangs:
            thread.join(self._timeout_s)  # after Ctrl-C it may still wait for the loader

    def _work(self) -> None:
        while (stream := self._requests.get()) is not None:
            try:
                with self._device.use(stream):
                    self._results.put((next(self._iterator), None))
            except BaseException as problem:  # `__next__` raises it
                self._results.put((None, problem))
                return
        self._close_iterator()

    def _close_iterator(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()


def end_workers(loader: Any) -> None:
    """End the worker processes of a DataLoader with `persistent_workers`. Otherwise an error whose
    traceback refers to the loader would keep them alive."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


def _raised_in_multiprocessing(problem: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("multiprocessing.")


def loader_error(problem: BaseException) -> LoaderError | None:
    """A one-line error for a DataLoader's error about its worker processes; None for others."""
    text = " ".join(str(problem).split())
    died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", text)
    if isinstance(problem, RuntimeError) and died is not None:
        return LoaderError(f"a loader process ({died[1]}) {died[2].rstrip('. ')}: {_OUT_OF_MEMORY}")
    if isinstance(problem, ConnectionError | EOFError) and _raised_in_multiprocessing(problem):
        # It died while it handed over a tensor, before PyTorch noticed.
        return LoaderError(f"a loader process exited unexpectedly ({text}): {_OUT_OF_MEMORY}")
    if isinstance(problem, RuntimeError) and text.startswith("DataLoader timed out"):
        return LoaderError(f"{text}: a loader process hangs, or loader_timeout is too short")
    if text.startswith("Caught ") and "DataLoader worker process" in text:
        lines = [line for line in str(problem).splitlines() if line.strip()]
        return LoaderError(f"a loader process raised {lines[-1].strip()}")
    return None
