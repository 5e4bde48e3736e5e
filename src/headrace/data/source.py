"""`Source`: one pass over a loader, with the state that a checkpoint needs after each batch.

Batches are fetched before they are trained on, so a checkpoint cannot ask the loader where it is
now. Instead, `Source` notes with each batch:

- the loader's own state after the batch, if it keeps one;
- the states of the host's random generators before the batch, if the loader may draw from them.
  After a resume, batches that were fetched and not trained on are drawn again from these states.

With a timeout, a thread asks the loader for batches, and is abandoned if the loader hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from headrace.data.align import Aligned, Alignment
from headrace.data.end_flag import EndFlag
from headrace.data.loader_rng import LoaderRng
from headrace.data.loader_state import first_state
from headrace.data.partial_loaders import Skipping
from headrace.data.rng import have_drawn
from headrace.data.timed_iterator import TimedIterator
from headrace.device import Device

log = logging.getLogger("headrace")


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
