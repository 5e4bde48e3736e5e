"""A terminal in memory, for tests of what is drawn."""

from __future__ import annotations

import io
import re

from rich.console import Console

_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n")


class Terminal(io.StringIO):
    """Interprets what is written as a terminal does: `screen()` is what a user sees.

    `drawn` has the line of the cursor after each write. A control sequence that is not known here
    fails the test.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines, self._row, self._column = [""], 0, 0
        self.drawn: list[str] = []
        self.is_cursor_hidden = False

    def write(self, text: str) -> int:
        at = 0
        for found in _CONTROL.finditer(text):
            self._put(text[at : found.start()])
            self._control(found)
            at = found.end()
        self._put(text[at:])
        self.drawn.append(self._lines[self._row])
        return super().write(text)

    def screen(self) -> list[str]:
        """The lines down to the cursor, without spaces at their ends."""
        assert not any(line.strip() for line in self._lines[self._row + 1 :])
        return [line.rstrip() for line in self._lines[: self._row + 1]]

    def _put(self, text: str) -> None:
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)

    def _control(self, found: re.Match[str]) -> None:
        if found[0] == "\r":
            self._column = 0
        elif found[0] == "\n":
            self._row, self._column = self._row + 1, 0
            self._lines += [""] * (self._row + 1 - len(self._lines))
        elif found[2] == "A":
            self._row -= int(found[1] or 1)
            assert self._row >= 0
        elif found[0] == "\x1b[2K":
            self._lines[self._row] = ""
        elif found[1] == "?25":
            self.is_cursor_hidden = found[2] == "l"
        else:
            assert found[2] == "m", repr(found[0])


def new_console(terminal: io.StringIO, *, width: int = 100, is_terminal: bool = True) -> Console:
    """A console on `terminal` that takes nothing from the environment."""
    return Console(
        file=terminal,
        force_terminal=is_terminal,
        width=width,
        legacy_windows=False,
        _environ={},
    )
