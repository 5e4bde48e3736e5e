"""What a command is doing: one line on stderr, with messages and log records above it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from rich.console import Console

_log = logging.getLogger("headrace")
_REDRAW_S = 0.2


class StatusLine:
    """Shows what a command is doing, on stderr.

        with StatusLine(quiet) as line:
            line.status("encode train", 2_000, 29_000)
            line.message("29,000 pairs")

    On a terminal the line has colors and a bar and is redrawn, at most five times a second.
    Elsewhere each line is printed below the last one, and a count at most every `every_s`
    seconds. With `quiet` only warnings and `final` lines are shown.

    Inside the block, records of the logger `headrace` are printed from `log_level` on.
    `clock` returns seconds that never go back.
    """

    def __init__(
        self,
        quiet: bool = False,
        console: Console | None = None,
        *,
        log_level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 10.0,
    ) -> None:
        # rich takes 50 ms to import, which `import headrace` need not pay.
        from headrace.progress.display import open_display

        self._quiet, self._clock = quiet, clock
        self._display = open_display(console, live=not quiet)
        self._interval_s = _REDRAW_S if self._display.is_live else every_s
        self._handler = _LogHandler(self, max(log_level, logging.WARNING if quiet else 0))
        self._logger_level = logging.NOTSET
        self._stage: str | None = None
        self._draw_at_s = self._status_since_s = clock()

    def __enter__(self) -> Self:
        self._display.open()
        self._logger_level = _log.level
        if _log.level == logging.NOTSET and not _log.isEnabledFor(self._handler.level):
            _log.setLevel(self._handler.level)
        _log.addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.close()
        _log.removeHandler(self._handler)
        _log.setLevel(self._logger_level)

    def status(
        self,
        text: str,
        done: int | None = None,
        total: int | None = None,
        *,
        stage: str | None = None,
    ) -> None:
        """Say what is being done and, with `done` and `total`, how far it is.

        A new `stage` is shown at once. Within a stage (by default: the same text) most calls are
        not drawn, so call this as often as you like.
        """
        now_s = self._clock()
        stage = text if stage is None else stage
        if not self._quiet and (stage != self._stage or now_s >= self._draw_at_s):
            self._display.show_status(text, done, total)
            self._draw_at_s = now_s + self._interval_s
        if self._stage is None:
            self._status_since_s = now_s
        self._stage = stage

    def end_status(self) -> None:
        """Remove the live line: what it said is done. The next `status` shows it again."""
        self._display.clear()

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Print above the line. May be called from any thread."""
        if self._quiet and level < logging.WARNING:
            return
        if level < logging.WARNING:
            self._display.print(text)
        else:
            style = "yellow" if level < logging.ERROR else "bold red"
            self._display.print(f"{logging.getLevelName(level).lower()}: {text}", style)

    def details(self, lines: Iterable[str]) -> None:
        """Print lines that explain the line before. On a terminal each is cut to its width."""
        for line in () if self._quiet else lines:
            self._display.print_detail(line)

    def final(self, text: str) -> None:
        """Print a line even if `quiet`, and remove the live line: the process may end now."""
        self._display.clear()
        self._display.print(text)


class _LogHandler(logging.Handler):
    def __init__(self, line: StatusLine, level: int) -> None:
        super().__init__(level)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._line.message(self.format(record), record.levelno)
        except Exception:
            self.handleError(record)
