"""How far an epoch is, and how fast it has been of late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


_RECENT_S = 30.0


@dataclass(slots=True)
class EpochPosition:
    """The current epoch: its length, and how far it is."""

    number: int
    batches: int | None
    first_batch: int
    limit: int | None
    begun_s: float
    done: int = 0
    tokens: float = 0.0

    def __post_init__(self) -> None:
        self.done = self.first_batch

    def reach(self, done: int) -> None:
        """So many batches of the epoch are done."""
        self.done = done

    def add_tokens(self, tokens: float) -> None:
        """So many more tokens have arrived with their losses."""
        self.tokens += tokens

    @property
    def trained(self) -> int:
        """Batches trained on by this process, which may have resumed the epoch."""
        return self.done - self.first_batch


class RecentRates:
    """Batches and tokens per second over the last half minute.

    Time in which no batch was expected (`skip`) does not count.
    """

    def __init__(self, now_s: float) -> None:
        self._skipped_s = 0.0
        self._earlier_epochs = (0.0, 0.0)  # batches, tokens
        self._records = deque([(now_s, 0.0, 0.0)])

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds

    def begin_epoch(self, now_s: float) -> None:
        _, batches, tokens = self._records[-1]
        self._earlier_epochs = (batches, tokens)
        self.record(now_s, 0, 0.0)

    def record(self, now_s: float, batches: int, tokens: float) -> None:
        """Note what this epoch has trained on so far."""
        training_s = now_s - self._skipped_s
        earlier_batches, earlier_tokens = self._earlier_epochs
        self._records.append((training_s, earlier_batches + batches, earlier_tokens + tokens))
        # One record older than half a minute stays: the rate is measured from there.
        while len(self._records) > 2 and self._records[1][0] <= training_s - _RECENT_S:
            self._records.popleft()

    def per_second(self) -> tuple[float | None, float | None]:
        """Batches and tokens per second; None if there were none."""
        (first_s, *first), (last_s, *last) = self._records[0], self._records[-1]
        if last_s <= first_s:
            return None, None
        batches, tokens = (
            (new - old) / (last_s - first_s) for old, new in zip(first, last, strict=True)
        )
        return batches or None, tokens or None
