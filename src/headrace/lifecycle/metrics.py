"""The metrics of a run: a file of JSON lines and, if wanted, TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.atomic_files import replace_file
from headrace.errors import RunError
from headrace.lifecycle.tensorboard import Events
from headrace.text_table import counted

log = logging.getLogger("headrace")


class MetricsLog:
    """Appends lines of JSON to a file. `write` returns once the system has the line.

        with MetricsLog(folder.metrics, tensorboard=folder.events) as metrics:
            metrics.write("step", 100, loss=3.2, lr=3e-4)
            metrics.write("valid", 100, bleu=27.3)

    JSON has no NaN or infinity: they become null. TensorBoard's names are `step/loss` and so on.
    If a killed process has left half a line at the end of the file, it is removed. A line that
    cannot be written (the disk may be full) is an error or, with `warn_only`, a warning. After an
    event that cannot be written there is a warning, and no further event.
    """

    def __init__(
        self, path: str | Path, tensorboard: str | Path | None = None, *, warn_only: bool = False
    ) -> None:
        self._warn_only = warn_only
        self._path = Path(path)
        self._events = None if tensorboard is None else Events(Path(tensorboard))
        try:
            self._file = self._path.open("ab", buffering=0)
        except OSError as problem:
            raise RunError(f"{path}: cannot be opened ({problem.strerror})") from problem
        self._remove_half_line()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, kind: str, step: int, **values: object) -> None:
        """Append a line. Values are numbers, text, booleans, None, lists and dicts."""
        content = {"kind": kind, "step": step} | {
            name: _finite(value) for name, value in values.items()
        }
        text = json.dumps(content, allow_nan=False, ensure_ascii=False) + "\n"
        # UTF-8 cannot encode half a surrogate pair; written as `\\udc80` it is valid JSON.
        self._append(text.encode(errors="backslashreplace"))
        if self._events is not None:
            self._events.write(kind, step, content)

    def rewind(
        self, step: int, is_outdated: Callable[[Mapping[str, Any]], bool] = lambda content: False
    ) -> None:
        """Drop the lines of steps after `step`, and those for which `is_outdated` returns true.

        A resumed run calls this, because it will write them again.
        """
        self._file.close()
        kept: list[tuple[bytes, dict[str, Any]]] = []
        first_dropped = step + 1
        for line, content in _lines(self._path):
            number = content.get("step")
            is_later = isinstance(number, int) and number > step
            if not is_later and not is_outdated(content):
                kept.append((line, content))
            elif isinstance(number, int):
                first_dropped = min(first_dropped, number)
        replace_file(self._path, b"".join(line for line, _ in kept), RunError)
        self._file = self._path.open("ab", buffering=0)
        if self._events is not None:
            self._events.rewind(first_dropped)
            # TensorBoard drops whole steps: write those lines again that are kept.
            for _, content in kept:
                if isinstance(content.get("step"), int) and content["step"] >= first_dropped:
                    self._events.write(str(content.get("kind")), content["step"], content)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _append(self, line: bytes) -> None:
        rest, size = memoryview(line), self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as problem:
            with suppress(OSError):
                self._file.truncate(size)  # else the next line would follow half a line
            error = RunError(f"{self._path}: cannot be written ({problem.strerror})")
            if not self._warn_only:
                raise error from problem
            log.warning("%s; training continues", error)

    def _remove_half_line(self) -> None:
        with self._path.open("rb") as file:
            size = end = file.seek(0, 2)
            while end:
                start = max(0, end - 65536)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
        if end < size:
            self._file.truncate(end)


class NoMetrics:
    """Replaces a `MetricsLog` on ranks that write no metrics."""

    def __enter__(self) -> NoMetrics:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def write(self, kind: str, step: int, **values: object) -> None:
        """Do nothing: rank 0 writes."""

    def rewind(self, step: int, is_outdated: object = None) -> None:
        """Do nothing: rank 0 rewinds."""


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, which may still be growing."""
    return (content for _, content in _lines(Path(path)))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each complete line with its content. Lines that are not JSON objects are skipped."""
    damaged = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue  # the last line, which is still being written
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    content = None
                if isinstance(content, dict):
                    yield line, content
                else:
                    damaged += 1
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror})") from problem
    if damaged:
        log.warning("%s: skipped %s", path, counted(damaged, "damaged line"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
