"""How far a training run is: epoch, loss, rate and time left, in one line on stderr."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.progress.recent_loss import RecentLoss
from headrace.progress.recent_rates import EpochPosition, RecentRates
from headrace.progress.status_line import StatusLine

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.engine import EpochResult, Progress

_MAX_DRAWING_SHARE = 0.01  # of the loop's time
# Values that a caller passes at the end of an epoch, and their columns.
_EXTRA_COLUMNS = {"valid_loss": "valid", "bleu": "BLEU", "gpu_use_share": "GPU"}


@dataclass(frozen=True, slots=True)
class Gauges:
    """Readings of the device and the host. Shares as in `EpochStatistics`; None if not known."""

    memory_bytes: int | None = None
    data_wait_share: float | None = None
    host_blocked_share: float | None = None
    gpu_use_share: float | None = None


class ProgressLine(StatusLine):
    """Shows a run of `total_epochs` epochs, on stderr.

        with ProgressLine(10, gauges=read_gauges) as progress:
            progress.epoch_begins(0, len(loader))
            result = engine.epoch(loader)                # with on_step=progress.on_step
            progress.status("validating")
            progress.epoch_ends(result, {"valid_loss": 3.1, "bleu": 27.3})

    During an epoch the loss is that of recent batches; the epoch's own line has its mean. A status
    stays until the next batch; its time does not count in the rate of the batches. With `quiet` the
    last epoch is shown, too. `gauges` is called whenever a line is drawn, not for every batch.
    Drawing takes at most one per cent of the loop's time. `ends_at_s`, on the same clock, is when
    the run will be stopped.
    """

    def __init__(
        self,
        total_epochs: int,
        quiet: bool = False,
        console: Console | None = None,
        *,
        gauges: Callable[[], Gauges] = Gauges,
        log_level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 10.0,
        ends_at_s: float | None = None,
    ) -> None:
        super().__init__(quiet, console, log_level=log_level, clock=clock, every_s=every_s)
        self._total_epochs, self._gauges, self._ends_at_s = total_epochs, gauges, ends_at_s
        self._last_batch_s = clock()
        self._epoch = EpochPosition(0, None, 0, None, self._last_batch_s)
        self._rates = RecentRates(self._last_batch_s)
        self._batches_before: int | None = None  # of the epoch before
        self._between_s = 0.0  # from an epoch's last batch to the next one's beginning
        self._recent_loss = RecentLoss()
        self._hidden_epoch: tuple[dict[str, Any], str] | None = None  # the last one, by `quiet`

    def __exit__(self, *exception: object) -> None:
        self._print_hidden_epoch()
        super().__exit__(*exception)

    def epoch_begins(
        self, epoch: int, batches: int | None, *, first_batch: int = 0, limit: int | None = None
    ) -> None:
        """Call this when epoch `epoch` (from 0) begins.

        `batches` is its length, None if the loader has none. A resumed epoch begins at
        `first_batch`. `limit` is how many batches the run may still train on, in all epochs.
        """
        now_s = self._clock()
        if self._epoch.done:
            self._between_s = now_s - self._last_batch_s
        self._rates.skip(now_s - self._last_batch_s)
        self._last_batch_s = now_s
        self._epoch = EpochPosition(epoch, batches, first_batch, limit, now_s)
        self._rates.begin_epoch(now_s)
        self._stage = None
        if self._display.is_live:
            self._draw()
        self._draw_at_s = now_s + self._interval_s

    def on_step(self, progress: Progress) -> None:
        """Call this after each batch, as an engine does. Most calls take less than 1 µs."""
        epoch = self._epoch
        epoch.reach(progress.batch + 1)
        for arrived in progress.arrived:
            loss, tokens = arrived.values.get("loss"), arrived.values.get("weight")
            epoch.add_tokens(tokens or 0.0)
            if loss is not None:
                self._recent_loss.add(loss, 1.0 if tokens is None else tokens)
        now_s = self._clock()
        if self._stage is not None:
            self._rates.skip(now_s - self._status_since_s)
            self._stage = None
        self._last_batch_s = now_s
        if now_s < self._draw_at_s:
            return
        self._rates.record(now_s, epoch.trained, epoch.tokens)
        if not self._quiet:
            self._draw()
        took_s = self._clock() - now_s
        pause_s = max(self._interval_s, took_s / _MAX_DRAWING_SHARE)
        self._draw_at_s = now_s + took_s + pause_s

    def epoch_ends(self, result: EpochResult, extra: Mapping[str, Any] | None = None) -> None:
        """Call this after an epoch and its validation.

        `valid_loss`, `bleu` and `gpu_use_share` of `extra` have columns. Its other values are
        named after them.
        """
        extra = extra or {}
        self._stage = None
        self._batches_before = self._epoch.done
        self._between_s = self._clock() - self._last_batch_s
        self._rates.record(self._last_batch_s, self._epoch.trained, self._epoch.tokens)
        statistics = result.statistics
        gauges = Gauges(
            statistics.peak_memory_bytes or None,
            statistics.data_wait_share,
            statistics.host_blocked_share,
            extra.get("gpu_use_share"),
        )
        values = self._values(
            gauges, result.mean_loss, statistics.weight_per_s, statistics.elapsed_s
        )
        for key in extra.keys() & {"valid_loss", "bleu"}:
            values[_EXTRA_COLUMNS[key]] = extra[key]
        others = [f"{key} {_text(extra[key])}" for key in extra if key not in _EXTRA_COLUMNS]
        if self._quiet:
            self._hidden_epoch = (values, "  ".join(others))
        else:
            self._display.print_epoch(values, "  ".join(others))

    def final(self, text: str) -> None:
        """Print a line even if `quiet`. If `quiet` hid the last epoch, that is printed first."""
        self._print_hidden_epoch()
        super().final(text)

    def _print_hidden_epoch(self) -> None:
        if self._hidden_epoch is not None:
            self._display.print_epoch(*self._hidden_epoch)
            self._hidden_epoch = None

    def _draw(self) -> None:
        epoch = self._epoch
        _, tokens_per_s = self._rates.per_second()
        values = self._values(
            self._gauges(),
            self._recent_loss.mean,
            tokens_per_s,
            self._last_batch_s - epoch.begun_s,
        )
        self._display.show_values(values, epoch.done, epoch.batches)

    def _values(
        self, gauges: Gauges, loss: float | None, tokens_per_s: float | None, elapsed_s: float
    ) -> dict[str, Any]:
        """The value of each column; None if it is not known."""
        epoch = self._epoch
        return {
            "epoch": _of(epoch.number + 1, self._total_epochs),
            "mem": gauges.memory_bytes,
            "tok/s": tokens_per_s,
            "loss": loss,
            "data": gauges.data_wait_share,
            "host": gauges.host_blocked_share,
            "GPU": gauges.gpu_use_share,
            "batch": _of(epoch.done, epoch.batches),
            "time": elapsed_s,
            "left": self._left_s(),
        }

    def _left_s(self) -> float | None:
        """The time that is left: for batches at the recent rate, and for the work between epochs,
        which is assumed to take as long as the last time."""
        epoch = self._epoch
        per_epoch = self._batches_before if epoch.batches is None else epoch.batches
        batches_per_s, _ = self._rates.per_second()
        if per_epoch is None or not batches_per_s:
            return None
        in_epoch = max(0, per_epoch - epoch.done)
        left = in_epoch + (self._total_epochs - epoch.number - 1) * per_epoch
        if epoch.limit is not None:
            left = max(0, min(left, epoch.limit - epoch.trained))
        # After this epoch's last batch, its validation is not counted any more: it is over.
        epoch_ends = (min(in_epoch, left) > 0) + math.ceil(
            max(0, left - in_epoch) / max(1, per_epoch)
        )
        left_s = left / batches_per_s + epoch_ends * self._between_s
        if self._ends_at_s is not None:
            left_s = min(left_s, max(0.0, self._ends_at_s - self._last_batch_s))
        return left_s


def _of(done: int, total: int | None) -> str:
    """Such as "  7/480". It always has the same width, so that the columns do not move."""
    return str(done) if total is None else f"{done:>{len(str(total))}}/{total}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
