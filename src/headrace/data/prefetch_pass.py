"""Prefetching: batches are copied to the device before they are needed.

    batch          N-1        N         N+1
    transfer  ..[copy N+1][copy N+2][copy N+3]..      one stream
    compute   ..[ step N-1 ][  step N  ][ step N+1 ]..    the caller's

A slot is the device memory of one batch, allocated on the stream that will read it. It is freed
and reused in that stream's order, so the caller may keep a batch as long as it likes. Three edges
prevent races:

- The copy waits for the work that the reading stream had queued when the memory was allocated: that
  work may still use those bytes.
- The reading stream waits for the copy.
- A pinned staging buffer is reused only after the copy's event.

A batch that needs no copy, on the CPU or on the device already, is handed out before the loader is
asked for another: the loader may use its memory again.

The calling thread does all of this. A separate thread would compete with the training loop for the
GIL; to load in parallel, use DataLoader workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from headrace.data.align import Alignment
from headrace.data.copies import Arriving, Copies
from headrace.data.source import Source

if TYPE_CHECKING:
    from headrace.data.prefetcher import Prefetcher, StatefulPrefetcher


class Prefetched(NamedTuple):
    """A batch that was fetched. `loader_state` is the loader's own state after the batch,
    `rng_before` has the random states before it."""

    arriving: Arriving
    loader_state: Any
    rng_before: dict[str, Any] | None
    alignment: Alignment | None


@dataclass(frozen=True, slots=True)
class _End:
    """How the loader ended. `error` is raised after the batches before it. `rng_before` has the
    random states before the end, or before a batch that was fetched and not copied."""

    loader_state: Any = None
    error: BaseException | None = None
    rng_before: dict[str, Any] | None = None
    rng_before_failed: dict[str, Any] | None = None


class PrefetchIterator:
    """One pass over the loader.

    It begins with the first batch, not with `iter()`, which some libraries call only to see whether
    it works. `close`, or dropping the iterator, releases the loader and all batches at once.
    `loader_state` is the loader's own state after the batch handed out last, or after the end.
    """

    def __init__(self, settings: Prefetcher) -> None:
        self._settings = settings
        self._device = settings.device
        self._owner = settings.owner or settings.device.current_stream()
        self._copies = Copies(
            settings.device,
            self._owner,
            settings.transfers,
            depth=settings.depth,
            pin=settings.pin,
            runs_on_owner=settings.runs_on_owner,
            cache=settings.cache,
        )
        self._ahead: deque[Prefetched] = deque()  # fetched and not yet handed out
        self._source: Source | None = None
        self._end = _End()
        self._shared_last = False  # whether the batch fetched last has tensors of the loader's own
        self._has_begun = False
        self.keeps_state = False
        self.loader_state: Any = None

    @property
    def rng_before_failed(self) -> dict[str, Any] | None:
        """The states of the host's generators before a batch that drew from them and then
        failed."""
        return self._end.rng_before_failed

    def begin(self) -> Self:
        """Begin the loader, unless it has begun already."""
        if not self._has_begun:
            self._has_begun = True
            options = self._settings
            source = Source(
                options.loader, self._device, options.loader_timeout, options.loader_rng
            )
            self._source = source
            self.loader_state = source.state
            self._end = _End(loader_state=source.state)
            self.keeps_state = source.keeps_state
        return self

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        return self.take().arriving.batch

    def take(self) -> Prefetched:
        """The next batch. Raises `StopIteration` at the end."""
        if not self._has_begun:
            self.begin()
        while self._source is not None and len(self._ahead) <= self._settings.depth:
            # As in a plain loop, the loader ends after its last batch was used. And it may write
            # the next batch into the tensors of one that was not copied.
            if self._ahead and (self._source.gave_last or self._ahead[-1].arriving.is_shared):
                break
            self._pull()
        if not self._ahead:
            self.close()
            error = self._end.error
            if error is not None:
                # As in a plain loop, the batches before the error have been handed out.
                self._end = replace(self._end, error=None)
                try:
                    raise error
                finally:
                    del error  # its traceback would keep this frame alive, and so the loader
            self.loader_state = self._end.loader_state
            raise StopIteration
        prefetched = self._ahead.popleft()
        reader = self._settings.owner or self._device.current_stream()
        self._copies.hand_over(prefetched.arriving, reader)
        if self._source is not None and not self._ahead:
            self._source.release_end_flag()
        self.loader_state = prefetched.loader_state
        return prefetched

    def has_more(self, must_know: Callable[[], bool]) -> bool:
        """Whether another batch, or an error, follows. With a depth of 0 nothing was fetched ahead,
        and only the loader knows: it is asked if `must_know()` is true, and otherwise the answer is
        True."""
        if not self._ahead and self._source is not None and must_know():
            self._pull()
        return bool(self._ahead) or self._source is not None or self._end.error is not None

    def drawn_ahead(self) -> list[dict[str, Any]]:
        """The states of the host's generators before each batch that was fetched and not yet handed
        out, and before the end."""
        waiting = (prefetched.rng_before for prefetched in self._ahead)
        found = [*waiting, self._end.rng_before]
        return [states for states in found if states is not None]

    def close(self) -> None:
        """Drop the fetched batches and the loader's iterator."""
        while self._ahead:
            self._copies.drop(self._ahead.popleft().arriving)
        self._has_begun = True  # so that it cannot begin any more
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __del__(self) -> None:
        self.close()  # the loop was left early

    def _pull(self) -> None:
        """Fetch one batch and start its copy. An error is raised after the batches before it."""
        assert self._source is not None
        self._source.note_rng()  # outside the wait: this is not the loader's time
        source = self._source
        if self._shared_last:
            self._let_loader_write()
        try:
            with self._device.ledger.waiting("data"):
                batch = next(source)
        except StopIteration:
            self._end = _End(loader_state=source.state, rng_before=source.rng_before)
            self._source = None
            return
        except BaseException as problem:
            failed = source.rng_before_failed(problem)
            self._end = replace(self._end, rng_before_failed=failed)
            self._end_with(problem)
            return
        try:
            arriving = self._copies.start(batch)
        except BaseException as problem:
            self._end = replace(self._end, rng_before=source.rng_before)
            self._end_with(problem)
            return
        self._shared_last = arriving.is_shared
        self._ahead.append(Prefetched(arriving, source.state, source.rng_before, source.alignment))

    def _let_loader_write(self) -> None:
        """Order the loader's work on the device behind the steps so far: it may write the next
        batch into tensors that they read."""
        producer = self._device.current_stream()
        if producer is not self._owner:
            producer.wait_stream(self._owner)

    def _end_with(self, problem: BaseException) -> None:
        """Keep an error of the loader or the copy, to be raised later. Ctrl-C is raised at once."""
        if not isinstance(problem, Exception):
            raise problem
        source, self._source = self._source, None
        self._end = replace(self._end, error=problem)
        if source is not None:
            source.close()


class StatefulIterator(PrefetchIterator):
    """A pass that notes the loader's state in its prefetcher after each batch handed out."""

    def __init__(self, settings: StatefulPrefetcher) -> None:
        super().__init__(settings)
        self._prefetcher = settings

    def begin(self) -> Self:
        if not self._has_begun:
            super().begin()
            self._note()
        return self

    def take(self) -> Prefetched:
        try:
            return super().take()
        finally:
            self._note()

    def _note(self) -> None:
        if self.keeps_state:
            self._prefetcher.note(self.loader_state)
