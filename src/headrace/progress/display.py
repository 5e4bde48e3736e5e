"""Where progress is shown: a line that is redrawn on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from headrace.progress.lenient_file import LenientFile, Nowhere, is_terminal
from headrace.progress.line_text import counted, line_of

_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 8, 40
# At the end of the live line. After Ctrl-C the terminal writes "^C" there, and some terminals begin
# a new line when the last cell is written: then erasing the line would leave half of it.
_FREE_CELLS = 3
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
            force_terminal=is_terminal(sys.stderr),
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
    return Console(file=Nowhere(), quiet=True)  # type: ignore[arg-type]


class Display:
    """Prints each line below the last one, without colors."""

    is_live = False

    def __init__(self, console: Console) -> None:
        self.console = console
        console.file = LenientFile(console.file)  # type: ignore[assignment]

    def open(self) -> None:
        """Call this before anything is shown."""

    def close(self) -> None:
        """Leave the terminal clean."""

    def clear(self) -> None:
        """Remove the live line until something is shown again."""

    def show_values(self, values: Mapping[str, Any], done: int, total: int | None) -> None:
        """Show the values of a run that is `done` of `total` batches into an epoch."""
        self.print(line_of(values))

    def show_status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show what is going on, and how far it is."""
        self.print(counted(text, done, total))

    def print_epoch(self, values: Mapping[str, Any], note: str) -> None:
        """Print the values of a finished epoch, and a note."""
        self.print("  ".join(filter(None, (line_of(values), note))))

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
    """Redraws one line at the end of a terminal, with a bar, and prints all others above it.

    No thread redraws the line: a thread would compete with the training loop for the interpreter
    lock.
    """

    is_live = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = _Bar()
        self._progress = Progress(
            _Description(table_column=Column(no_wrap=True)),
            self._bar,
            console=console,
            auto_refresh=False,
            transient=True,
            # If stdout is a file, what is printed must go there, not to the terminal.
            redirect_stdout=is_terminal(sys.stdout),
        )
        self._task = self._progress.add_task("", visible=False)
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def _width(self) -> int:
        return max(0, self.console.width - _FREE_CELLS)

    def open(self) -> None:
        self._progress.start()
        # rich hides the cursor, and a process that is killed would leave it hidden.
        self.console.show_cursor(True)

    def close(self) -> None:
        with self._lock:
            self.clear()
            self._progress.stop()

    def clear(self) -> None:
        with self._lock:
            self._progress.update(self._task, visible=False)
            self._progress.refresh()

    def show_values(self, values: Mapping[str, Any], done: int, total: int | None) -> None:
        self._show(line_of(values, self._width), done, total)

    def show_status(self, text: str, done: int | None = None, total: int | None = None) -> None:
        self._show(self._printable(counted(text, done, total)), done, total)

    def print_epoch(self, values: Mapping[str, Any], note: str) -> None:
        self.print(line_of(values, self._width), "bold")
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
            line = self._cut(self._printable(text))
            line.stylize("dim")
            self.console.print(line, soft_wrap=True)

    def _cut(self, text: str) -> Text:
        line = Text(text.replace("\n", " ").replace("\t", " "))
        line.truncate(self._width, overflow="ellipsis")
        return line

    def _show(self, text: str, done: int | None, total: int | None) -> None:
        with self._lock:
            line = self._cut(text).plain
            room = min(_MAX_BAR_WIDTH, self._width - 1 - cell_len(line))
            self._bar.bar_width = room if total and done is not None else 0
            self._progress.update(
                self._task,
                description=line,
                completed=done or 0,
                total=total or None,
                visible=True,
            )
            self._progress.refresh()


class _Description(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.description)


class _Bar(BarColumn):
    def __init__(self) -> None:
        super().__init__(complete_style="cyan")

    def render(self, task: Task) -> Any:
        has_room = self.bar_width is not None and self.bar_width >= _MIN_BAR_WIDTH
        return super().render(task) if has_room else Text("")


def _undo_redirection() -> None:
    """Let a forked worker print directly: only its parent draws the live line."""
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_undo_redirection)
