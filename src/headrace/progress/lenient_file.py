"""Files that a command writes to although nobody may read them any more."""

from __future__ import annotations

import contextlib
import io
from typing import IO


class LenientFile(io.TextIOBase):
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
        return is_terminal(self._file)

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"


class Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def is_terminal(file: IO[str] | None) -> bool:
    try:
        return file is not None and file.isatty()
    except ValueError:  # it is closed
        return False
