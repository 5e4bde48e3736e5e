"""What people watch while a run trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.engine import EpochResult, Progress

_log = logging.getLogger("headrace")
_REDRAW_S = 0.1
_MOST_DRAWING = 0.05  # share of the time, where a terminal is slow to take its text
_RECENT_S = 30.0
_ROWS_PER_HEAD = 25
# Each column with its least width, as they stand in the line.
_COLUMNS = {"epoch": 5, "mem": 5, "tok/s": 6, "loss": 7, "valid": 7, "BLEU": 5}
_COLUMNS |= {"data": 4, "host": 4, "GPU": 4, "batch": 5, "time": 7, "left": 7}
# Where the terminal is too narrow for all of them, the first to go is first here.
_DISPENSABLE = ("time", "host", "data", "valid", "GPU", "mem", "BLEU", "tok/s", "batch")
# What of an epoch's extra values has a column.
_EXTRAS = {"valid_loss": "valid", "bleu": "BLEU", "gpu_use_share": "GPU"}

_Row = dict[str, str]  # column -> what stands in it; a value that is not known is left out


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read only when a line is drawn. Shares as in `EpochStatistics`; None: not known."""

    memory_bytes: int | None = None
    data_wait_share: float | None = None
    host_blocked_share: float | None = None
    gpu_use_share: float | None = None


def silent_console() -> Console:
    """For a rank that shows nothing: the first one does."""
    from rich.console import Console

    return Console(file=_Nowhere(), quiet=True)  # type: ignore[arg-type]


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class ProgressLine:
    """Shows a run of `total_epochs` epochs, on stderr.

        with ProgressLine(10, gauges=monitor.gauges) as progress:
            progress.epoch_begins(0, len(loader))
            result = engine.epoch(loader)                # with on_step=progress.on_step
            progress.status("validating …")
            progress.epoch_ends(result, {"valid_loss": 3.1, "bleu": 27.3})

    On a terminal there is one live line, drawn at most ten times a second; elsewhere a plain line
    every `every_s` seconds. With `quiet` only warnings, `final` lines and the last epoch are shown.
    Inside the block, records of the logger `headrace` are shown too, from INFO on. `gauges` is
    called when a line is drawn; `clock` returns seconds that never go back.
    """

    def __init__(
        self,
        total_epochs: int,
        quiet: bool = False,
        console: Console | None = None,
        *,
        gauges: Callable[[], Gauges] = Gauges,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 10.0,
    ) -> None:
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        self._total_epochs = total_epochs
        self._quiet = quiet
        self._gauges, self._clock = gauges, clock
        self._screen = _Screen(console, live=not quiet)
        self._interval_s = _REDRAW_S if self._screen.live else every_s
        self._handler = _Records(self, logging.WARNING if quiet else logging.INFO)
        self._level_before = logging.NOTSET
        self._epoch = self._first_batch = self._done = self._rows = 0
        self._batches: int | None = None
        self._most: int | None = None
        self._epoch_batches: int | None = None  # of the last whole epoch, for loaders without len
        self._tokens = self._loss_sum = self._weight = 0.0
        self._now_s = self._begun_s = self._draw_at_s = self._status_since_s = clock()
        self._pace = _Pace(self._now_s)
        self._status: str | None = None
        self._between_s = 0.0  # from an epoch's last batch to the next one's beginning
        self._kept: dict[str, Any] = {}  # valid and BLEU, until there are newer ones
        self._columns: dict[str, int] = {}
        self._last_line: str | None = None

    def __enter__(self) -> ProgressLine:
        self._level_before = _log.level
        if _log.level == logging.NOTSET and not _log.isEnabledFor(self._handler.level):
            _log.setLevel(self._handler.level)
        _log.addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        self._screen.show("")
        self.final("")
        _log.removeHandler(self._handler)
        _log.setLevel(self._level_before)

    def epoch_begins(
        self, epoch: int, batches: int | None, *, first_batch: int = 0, most: int | None = None
    ) -> None:
        """Epoch `epoch` (from 0) begins, with `batches` if that is known. A run that was resumed
        has `first_batch` of them behind it; one that may end early has `most` ahead, in all."""
        now_s = self._clock()
        if self._done:
            self._between_s = now_s - self._now_s
        self._pace.skipped_s += now_s - self._now_s
        self._now_s = self._begun_s = now_s
        self._epoch, self._batches, self._most = epoch, batches, most
        self._first_batch = self._done = first_batch
        self._tokens = self._loss_sum = self._weight = 0.0
        self._pace.begin_epoch(now_s)
        self._status = None
        if self._screen.live:
            self._head()
            self._draw()
        self._draw_at_s = now_s + self._interval_s

    def batch(self, *, tokens: float | None = None, loss: float | None = None) -> None:
        """A batch has been launched. `loss` and `tokens` may be those of an earlier one."""
        self._done += 1
        self._add(loss, tokens)
        self._tick()

    def on_step(self, info: Progress) -> None:
        """The same, as an engine's `on_step`: tokens are the batches' weights."""
        self._done = info.batch + 1
        for entry in info.come_back:
            self._add(entry.values.get("loss"), entry.values.get("weight"))
        self._tick()

    def epoch_ends(self, result: EpochResult, extra: Mapping[str, Any] | None = None) -> None:
        """An epoch is over, its validation too. `valid_loss`, `bleu` and `gpu_use_share` of
        `extra` have a column; anything else is named beside them."""
        extra = extra or {}
        self._status = None
        self._epoch_batches = self._done
        self._between_s = self._clock() - self._now_s
        self._pace.mark(self._now_s, self._done - self._first_batch, self._tokens)
        self._kept |= {_EXTRAS[key]: extra[key] for key in ("valid_loss", "bleu") if key in extra}
        figures = result.statistics
        gauges = Gauges(
            figures.peak_memory_bytes or None,
            figures.data_wait_share,
            figures.host_blocked_share,
            extra.get("gpu_use_share"),
        )
        row = self._row(gauges, result.mean_loss, figures.weight_per_s, figures.elapsed_s)
        others = [f"{key} {_value(extra[key])}" for key in extra if key not in _EXTRAS]
        self._last_line = "  ".join([_plain(row), *others])
        if self._screen.live:
            self._rows += 1
            self._screen.print(_aligned(row, self._columns), fits=True)
            if others:
                self._screen.print("      " + "  ".join(others))
        elif not self._quiet:
            self._screen.print(self._last_line)

    def status(self, text: str) -> None:
        """Say what is done while no batch comes: time that is not held against the batches. The
        same words with other numbers are shown as seldom as batches are."""
        now_s = self._clock()
        if self._status is None:
            self._status_since_s = now_s
        counting = self._status is not None and _words(text) == _words(self._status)
        self._status = text
        if not self._quiet and not (counting and now_s < self._draw_at_s):
            self._screen.show(text)
            self._draw_at_s = now_s + self._interval_s

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Print above the live line. From any thread."""
        if level >= self._handler.level:
            marked = f"{logging.getLevelName(level).lower()}: {text}"
            self._screen.print(text if level < logging.WARNING else marked)

    def final(self, text: str) -> None:
        """Print what is shown in any case; if nothing else was, the last epoch before it."""
        for line in filter(None, (self._last_line if self._quiet else None, text)):
            self._screen.print(line)
        self._last_line = None

    def _add(self, loss: float | None, tokens: float | None) -> None:
        weight = 1.0 if tokens is None else tokens
        self._tokens += tokens or 0.0
        if loss is not None and weight:  # a batch of no tokens has no loss, but 0/0
            self._loss_sum += loss * weight
            self._weight += weight

    def _tick(self) -> None:
        """After every batch: costs a microsecond unless it is time to draw."""
        now_s = self._clock()
        if self._status is not None:
            self._pace.skipped_s += now_s - self._status_since_s
            self._status = None
        self._now_s = now_s
        if now_s < self._draw_at_s:
            return
        self._pace.mark(now_s, self._done - self._first_batch, self._tokens)
        if not self._quiet:
            self._draw()
        took_s = self._clock() - now_s
        self._draw_at_s = now_s + took_s + max(self._interval_s, took_s / _MOST_DRAWING)

    def _draw(self) -> None:
        loss = self._loss_sum / self._weight if self._weight else None
        row = self._row(self._gauges(), loss, self._pace.rates()[1], self._now_s - self._begun_s)
        self._screen.show(_aligned(row, self._columns) if self._screen.live else _plain(row))

    def _row(
        self, gauges: Gauges, loss: float | None, tokens_per_s: float | None, elapsed_s: float
    ) -> _Row:
        whole = "" if self._batches is None else f"/{self._batches}"
        values = self._kept | {
            "epoch": f"{self._epoch + 1}/{self._total_epochs}",
            "mem": gauges.memory_bytes,
            "tok/s": tokens_per_s,
            "loss": loss,
            "data": gauges.data_wait_share,
            "host": gauges.host_blocked_share,
            "GPU": gauges.gpu_use_share,
            "batch": f"{self._done}{whole}",
            "time": elapsed_s,
            "left": self._left_s(),
        }
        return {name: _FORMATS[name](value) for name, value in values.items() if value is not None}

    def _left_s(self) -> float | None:
        """By the rate of recent batches, and what the last epoch took besides its batches."""
        after = self._total_epochs - self._epoch - 1
        whole = self._batches if self._batches is not None else self._epoch_batches
        batches_per_s, _ = self._pace.rates()
        if whole is None or not batches_per_s:
            return None
        here = max(0, whole - self._done)
        most = math.inf if self._most is None else self._most - self._done + self._first_batch
        batches = max(0, min(here + after * whole, most))
        # Of each epoch that is still to end; at this one's end its validation is over.
        pauses = (min(here, batches) > 0) + math.ceil(max(0, batches - here) / max(1, whole))
        return batches / batches_per_s + pauses * self._between_s

    def _head(self) -> None:
        """The headings: at first, when the terminal's width has changed, and now and then."""
        batches = self._batches or self._epoch_batches or 0
        counts = {"epoch": self._total_epochs, "batch": batches}
        columns = _COLUMNS | {name: max(5, 2 * len(str(n)) + 1) for name, n in counts.items()}
        for name in _DISPENSABLE:
            if sum(columns.values()) + len(columns) <= self._screen.console.width:
                break
            del columns[name]
        if columns != self._columns or self._rows >= _ROWS_PER_HEAD:
            self._columns, self._rows = columns, 0
            self._screen.print(_aligned({name: name for name in columns}, columns), fits=True)


class _Pace:
    """Rates over the last half minute. Time in which no batch was to be expected is taken out."""

    def __init__(self, now_s: float) -> None:
        self.skipped_s = 0.0
        self._before = (0, 0.0)  # of earlier epochs: batches, tokens
        self._marks = deque([(now_s, 0, 0.0)])

    def begin_epoch(self, now_s: float) -> None:
        _, batches, tokens = self._marks[-1]
        self._before = (batches, tokens)
        self.mark(now_s, 0, 0.0)

    def mark(self, now_s: float, batches: int, tokens: float) -> None:
        """So far in this epoch. At least one mark stays that is older than half a minute."""
        busy_s = now_s - self.skipped_s
        self._marks.append((busy_s, self._before[0] + batches, self._before[1] + tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= busy_s - _RECENT_S:
            self._marks.popleft()

    def rates(self) -> tuple[float | None, float | None]:
        """Batches and tokens a second; None where none have come."""
        first, last = self._marks[0], self._marks[-1]
        if (elapsed_s := last[0] - first[0]) <= 0:
            return None, None
        return (last[1] - first[1]) / elapsed_s or None, (last[2] - first[2]) / elapsed_s or None


class _Screen:
    """A console with, on a terminal, one line at its end that is drawn over again."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self.console = console
        dumb = console.is_dumb_terminal or console.legacy_windows
        self.live = live and console.is_terminal and not dumb
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._shown = ""

    def show(self, text: str) -> None:
        """Put `text` in the live line, empty to take it away; if there is none, print it."""
        if text and not self.live:
            self.print(text)
        elif text or self._shown:
            with self._lock:
                self._shown = self._fitted(text)
                self._write("\r\x1b[2K" + self._shown)

    def print(self, text: str, *, fits: bool = False) -> None:
        """Print lines above the live one; with `fits`, one line in its place."""
        text = self._fitted(text) if fits else self._encodable(_UNSEEN.sub("?", text))
        if os.getpid() != self._pid:  # a forked worker, which knows nothing of the live line
            self._write(text + "\n")
            return
        with self._lock:
            over = "\r\x1b[2K" if self._shown else ""
            self._shown = "" if fits else self._shown
            self._write(f"{over}{text}\n{self._shown}")

    def _fitted(self, text: str) -> str:
        from rich.cells import cell_len, set_cell_size

        width = self.console.width
        line = self._encodable(_UNSEEN.sub("?", text).replace("\n", " ").replace("\t", " "))
        # In the last column some terminals begin a new line.
        return set_cell_size(line, width - 1) if cell_len(line) >= width else line

    def _encodable(self, text: str) -> str:
        encoding = self.console.encoding
        if encoding.startswith("utf"):
            return text
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding, "replace")

    def _write(self, text: str) -> None:
        """A terminal that has gone away is no reason to stop training."""
        with contextlib.suppress(OSError, ValueError):
            self.console.file.write(text)
            self.console.file.flush()


class _Records(logging.Handler):
    def __init__(self, progress: ProgressLine, level: int) -> None:
        super().__init__(level)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._progress.message(self.format(record), record.levelno)
        except Exception:
            self.handleError(record)


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_words = partial(re.sub, r"[\d.,]+", "")  # without its numbers
_ASCII = str.maketrans({"…": "...", "–": "-", "—": "-", "×": "x", "µ": "u", "→": "->"})


def _aligned(row: _Row, columns: Mapping[str, int]) -> str:
    return " ".join(row.get(name, "-").rjust(width) for name, width in columns.items())


def _plain(row: _Row) -> str:
    return "  ".join(f"{name} {row[name]}" for name in _COLUMNS if name in row)


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.3g}"


def _bytes(count: int) -> str:
    return f"{count / (1 << 30):.1f}G" if count >= 1 << 30 else f"{count / (1 << 20):.0f}M"


def _short(rate: float) -> str:
    for least, unit in ((1e6, "M"), (1e3, "k")):
        if rate >= least:
            return f"{rate / least:.1f}{unit}"
    return f"{rate:.0f}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


_FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("epoch", "batch"), str),
    **dict.fromkeys(("loss", "valid"), _loss),
    **dict.fromkeys(("data", "host", "GPU"), "{:.0%}".format),
    **dict.fromkeys(("time", "left"), _duration),
    "mem": _bytes,
    "tok/s": _short,
    "BLEU": "{:.2f}".format,
}
