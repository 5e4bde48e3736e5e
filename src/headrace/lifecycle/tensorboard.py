"""The metrics of a run as TensorBoard events."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import RunError
from headrace.extras import install_command

log = logging.getLogger("headrace")


class Events:
    """Writes numbers, and sample translations as text, as TensorBoard events. It starts the writer,
    a thread, when it is needed. If that cannot write, a warning says so, and this object does
    nothing more: the metrics file has the same numbers."""

    def __init__(self, folder: Path) -> None:
        try:
            # Imported here, because it takes a second.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as problem:
            raise RunError(
                f"TensorBoard is not installed ({problem}); install it with "
                f"{install_command('tensorboard')}, or train with --no-tensorboard"
            ) from problem
        self._folder = folder
        self._new_writer = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._has_failed = False

    def write(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        if self._has_failed:
            return
        with self._giving_up():
            for name, number in _numbers(content):
                if name not in ("step", "epoch", "at_s"):
                    self._open().add_scalar(f"{kind}/{name}", number, step)
            if samples := content.get("samples"):
                self._open().add_text(f"{kind}/samples", _markdown(samples, content), step)

    def rewind(self, step: int) -> None:
        """Make TensorBoard hide the events from `step` on that were written so far."""
        self.close()
        self._purge_step = step

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._giving_up():
                writer.close()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Turn an error of the writer or of its thread into a warning, and write no more."""
        try:
            yield
        except OSError as problem:
            self._writer, self._has_failed = None, True
            log.warning(
                "%s: TensorBoard events cannot be written (%s); training continues without them",
                self._folder,
                problem.strerror or problem,
            )

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._new_writer(str(self._folder), purge_step=self._purge_step)
        return self._writer


def _markdown(samples: Sequence[Sequence[str]], content: Mapping[str, Any]) -> str:
    """A table of sample translations. Epochs are stored from 0 and shown from 1."""
    epoch = content.get("epoch")
    title = f"after epoch {epoch + 1}\n\n" if isinstance(epoch, int) else ""
    rows = [("source", "reference", "translation"), ("---", "---", "---"), *samples]
    return title + "\n".join(
        f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in rows
    )


def _numbers(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
