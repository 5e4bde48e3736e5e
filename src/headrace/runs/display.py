"""Where progress is shown: a line that is redrawn on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from headrace.runs.progress_columns import (
    COLUMNS,
    MAX_BAR_WIDTH,
    MIN_BAR_WIDTH,
    MOST_IMPORTANT_FIRST,
    OPTIONAL,
    StatusColumn,
    ValueColumn,
    aligned,
    counted,
    head,
    plain_text,
)

_EPOCHS_PER_HEAD = 25
# At the end of the live line. After Ctrl-C the terminal writes "^C" there, and some terminals begin
# a new line when the last cell is written: then erasing the line would leave half of it.
_FREE_CELLS = 3
_STATUS_COLUMN = StatusColumn()
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ASCII = str.maketrans({"…": "...", "–": "-", "—": "-", "×": "x", "µ": "u", "→": "->"})


def open_display(console: Console | None, *, live: bool) -> Display:
    """A live display if that is wanted and the console can redraw a line, else a plain one.

    Without a `console`, it shows on stderr.
    """
    if console is None:
        console = Console(
            stderr=True,
            # CI systems set FORCE_COLOR, which rich takes for a terminal.
            force_terminal=_is_terminal(sys.stderr),
            force_jupyter=False,
            soft_wrap=True,
            markup=False,
            highlight=False,
            emoji=False,
        )
    can_redraw = console.is_terminal and not console.is_dumb_terminal and not console.legacy_windows
    return LiveDisplay(console) if live and can_redraw else Display(console)


def silent_console() -> Console:
    """A console that shows nothing, for every rank but the first."""
    return Console(file=_Nowhere(), quiet=True)  # type: ignore[arg-type]


class Display:
    """Prints each line below the last one, without colours."""

    is_live = False

    def __init__(self, console: Console) -> None:
        self.console = console
        console.file = _LenientFile(console.file)  # type: ignore[assignment]

    def open(self) -> None:
        """Call this before anything is shown."""

    def close(self) -> None:
        """Leave the terminal clean."""

    def clear(self) -> None:
        """Remove the live line until something is shown again."""

    def show_values(self, values: Mapping[str, Any], done: int, total: int | None) -> None:
        """Show the values of a run that is `done` of `total` batches into an epoch."""
        self.print(plain_text(values))

    def show_status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show what is going on, and how far it is."""
        self.print(counted(text, done, total))

    def print_epoch(self, values: Mapping[str, Any], note: str) -> None:
        """Print the values of a finished epoch, and a note."""
        self.print("  ".join(filter(None, (plain_text(values), note))))

    def print_detail(self, text: str) -> None:
        """Print a line that may be cut."""
        self.print(text)

    def print(self, text: str, style: str = "") -> None:
        """Print lines. May be called from any thread, and in a forked process."""
        self.console.file.write(f"{self._printable(text)}\n")
        self.console.file.flush()

    def _printable(self, text: str) -> str:
        """`text` without control characters and without what the encoding lacks."""
        text, encoding = _CONTROL.sub("?", text), self.console.encoding
        if encoding.startswith("utf"):
            return text
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding, "replace")


class LiveDisplay(Display):
    """Redraws one line at the end of a terminal, in colours, and prints all others above it.

    The names of the columns are drawn above the line until they are printed above the lines of
    finished epochs. No thread redraws the line: a thread would compete with the training loop for
    the interpreter lock.
    """

    is_live = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._line = _LiveLine(
            console=console,
            auto_refresh=False,
            transient=True,
            # If stdout is a file, what is printed must go there, not to the terminal.
            redirect_stdout=_is_terminal(sys.stdout),
        )
        self._task = self._line.add_task("", visible=False)
        self._widths = {one.name: one.min_width for one in COLUMNS if one.name not in OPTIONAL}
        self._printed_head: Mapping[str, int] = {}
        self._epochs_below_head = 0
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def open(self) -> None:
        self._line.start()
        # rich hides the cursor, and a process that is killed would leave it hidden.
        self.console.show_cursor(True)

    def close(self) -> None:
        with self._lock:
            self.clear()
            self._line.stop()

    def clear(self) -> None:
        with self._lock:
            self._line.update(self._task, visible=False)
            self._line.refresh()

    def show_values(self, values: Mapping[str, Any], done: int, total: int | None) -> None:
        with self._lock:
            widths, bar_width = self._fitting_widths(values)
            self._line.shown = [one for one in COLUMNS if one.name in widths]
            self._line.widths = widths
            self._line.has_head = self._needs_head(widths)
            self._draw("", values, done, total, bar_width)

    def show_status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        line = self._printable(counted(text, done, total)).replace("\n", " ").replace("\t", " ")
        bar_width = min(MAX_BAR_WIDTH, self.console.width - _FREE_CELLS - 1 - cell_len(line))
        with self._lock:
            self._line.shown, self._line.widths = [_STATUS_COLUMN], {"status": 0}
            self._line.has_head = False
            self._draw(line, {}, done, total, bar_width)

    def print_epoch(self, values: Mapping[str, Any], note: str) -> None:
        with self._lock:
            self.clear()
            widths, _ = self._fitting_widths(values)
            if self._needs_head(widths):
                self._printed_head, self._epochs_below_head = widths, 0
                self._print(head(widths))
            self._epochs_below_head += 1
            self._print(
                aligned([one.cell(values) for one in COLUMNS if one.name in widths], widths)
            )
            if note:
                self.print(f"      {note}", "dim")

    def print(self, text: str, style: str = "") -> None:
        if os.getpid() != self._pid:  # a forked worker, which does not draw the live line
            super().print(text)
            return
        with self._lock:
            self.console.print(Text(self._printable(text), style), soft_wrap=True)

    def print_detail(self, text: str) -> None:
        with self._lock:
            line = Text(self._printable(text).replace("\n", " "), "dim")
            line.truncate(max(0, self.console.width - _FREE_CELLS), overflow="ellipsis")
            self.console.print(line, soft_wrap=True)

    def _print(self, line: Text) -> None:
        line.truncate(max(0, self.console.width - _FREE_CELLS), overflow="crop")
        self.console.print(line, soft_wrap=True)

    def _draw(
        self,
        text: str,
        values: Mapping[str, Any],
        done: int | None,
        total: int | None,
        bar_width: int,
    ) -> None:
        has_bar = done is not None and total and bar_width >= MIN_BAR_WIDTH
        self._line.bar_width = bar_width if has_bar else 0
        self._line.update(
            self._task,
            description=text,
            values=values,
            completed=done or 0,
            total=total or None,
            visible=True,
        )
        self._line.refresh()

    def _needs_head(self, widths: Mapping[str, int]) -> bool:
        return widths != self._printed_head or self._epochs_below_head >= _EPOCHS_PER_HEAD

    def _fitting_widths(self, values: Mapping[str, Any]) -> tuple[dict[str, int], int]:
        """The columns that fit into the terminal with their widths, and the width of the bar.

        A column that has had a value stays, and none gets narrower, so that nothing jumps.
        """
        for column in COLUMNS:
            if (value := values.get(column.name)) is not None:
                width = max(column.min_width, len(column.text(value)))
                self._widths[column.name] = max(width, self._widths.get(column.name, 0))
        wanted = self._widths | {"bar": MIN_BAR_WIDTH}
        free = self.console.width - _FREE_CELLS
        fitting = set()
        for name in MOST_IMPORTANT_FIRST:
            if name in wanted and wanted[name] <= free:
                fitting.add(name)
                free -= wanted[name] + 1
        widths = {one.name: wanted[one.name] for one in COLUMNS if one.name in fitting}
        bar_width = min(MIN_BAR_WIDTH + free + 1, MAX_BAR_WIDTH) if "bar" in fitting else 0
        return widths, bar_width


class _LiveLine(Progress):
    """rich's progress with one task, whose columns and bar are in one line.

    rich puts the columns into a table, which takes four times as long to draw.
    """

    shown: Sequence[ValueColumn | StatusColumn] = ()
    widths: Mapping[str, int] = {}
    bar_width = 0
    has_head = False

    def get_renderable(self) -> RenderableType:
        lines: list[RenderableType] = []
        for task in self.tasks:
            if task.visible:
                if self.has_head:
                    lines.append(_Fitted(head(self.widths)))
                cells = [column.render(task) for column in self.shown]
                bar = None
                if self.bar_width:
                    bar = ProgressBar(
                        task.total, task.completed, self.bar_width, complete_style="cyan"
                    )
                lines.append(_Fitted(aligned(cells, self.widths), bar))
        return Group(*lines)


class _Fitted:
    """A text that is cut to the width of the terminal, and perhaps a bar after it."""

    def __init__(self, text: Text, bar: ProgressBar | None = None) -> None:
        self._text, self._bar = text, bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._text.copy()
        line.truncate(max(0, options.size.width - _FREE_CELLS), overflow="crop")
        yield from line.render(console)
        if self._bar is not None:
            yield Segment(" ")
            yield from console.render(self._bar, options)
        yield Segment.line()


class _LenientFile(io.TextIOBase):
    """A file whose errors are ignored: if the terminal is closed, training continues."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()

    def isatty(self) -> bool:
        return _is_terminal(self._file)

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def _is_terminal(file: IO[str] | None) -> bool:
    try:
        return file is not None and file.isatty()
    except ValueError:  # it is closed
        return False


def _undo_redirection() -> None:
    """Let a forked worker print directly: only its parent draws the live line."""
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_undo_redirection)
