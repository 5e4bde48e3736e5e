"""The random states from which a pass over a loader draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.data.rng import drawing_from, host_rng_states

_END = object()


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
