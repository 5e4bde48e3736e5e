"""The columns of a progress line: the text, colour and importance of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.progress import ProgressColumn, Task
from rich.text import Text

MIN_BAR_WIDTH = 8
MAX_BAR_WIDTH = 40


class ValueColumn(ProgressColumn):
    """One value of the line, right-aligned below its name.

    A value that is not known yet is shown as "-".
    """

    def __init__(
        self,
        name: str,
        width: int,
        text: Callable[[Any], str] = str,
        style: str | Callable[[Any], str] = "",
    ) -> None:
        super().__init__()
        self.name, self.min_width, self.text = name, width, text
        self._style = style

    def render(self, task: Task) -> Text:
        return self.cell(task.fields["values"])

    def cell(self, values: Mapping[str, Any]) -> Text:
        value = values.get(self.name)
        if value is None:
            return Text("-", style="dim")
        return Text(self.text(value), self._style(value) if callable(self._style) else self._style)


class StatusColumn(ProgressColumn):
    """A text that replaces the values while no batch is trained on."""

    def render(self, task: Task) -> Text:
        return Text(task.description)


def head(widths: Mapping[str, int]) -> Text:
    """The names of the columns, above their values."""
    return Text(" ".join(name.rjust(width) for name, width in widths.items()), style="dim")


def aligned(cells: Sequence[Text], widths: Mapping[str, int]) -> Text:
    """The cells in one line, each right-aligned in its column."""
    line = Text()
    for cell, width in zip(cells, widths.values(), strict=True):
        line.append(" " * (bool(line) + max(0, width - len(cell))))
        line.append_text(cell)
    return line


def plain_text(values: Mapping[str, Any]) -> str:
    """The known values in one line, each after its name."""
    return "  ".join(
        f"{column.name} {column.text(values[column.name]).strip()}"
        for column in COLUMNS
        if values.get(column.name) is not None
    )


def counted(text: str, done: int | None, total: int | None) -> str:
    """A status with its count, such as "encode train 2,000/29,000"."""
    if done is None:
        return text
    return f"{text} {done:,}/{total:,}" if total else f"{text} {done:,}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.3g}"


def _bytes(count: int) -> str:
    return f"{count / (1 << 30):.1f}G" if count >= 1 << 30 else f"{count / (1 << 20):.0f}M"


def _rate(per_s: float) -> str:
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if per_s >= unit:
            return f"{per_s / unit:.1f}{letter}"
    return f"{per_s:.0f}"


def _waiting_style(share: float) -> str:
    return "green" if share < 0.1 else "yellow" if share < 0.3 else "red"


def _use_style(share: float) -> str:
    return "green" if share > 0.9 else "yellow" if share > 0.6 else "red"


COLUMNS = (
    ValueColumn("epoch", 5, style="bold"),
    ValueColumn("mem", 5, _bytes),
    ValueColumn("tok/s", 6, _rate, "magenta"),
    ValueColumn("loss", 7, _loss, "bold cyan"),
    ValueColumn("valid", 7, _loss, "cyan"),
    ValueColumn("BLEU", 5, "{:.2f}".format, "cyan"),
    ValueColumn("data", 4, "{:.0%}".format, _waiting_style),
    ValueColumn("host", 4, "{:.0%}".format, _waiting_style),
    ValueColumn("GPU", 4, "{:.0%}".format, _use_style),
    ValueColumn("batch", 5),
    ValueColumn("time", 7, _duration, "dim"),
    ValueColumn("left", 7, _duration),
)
#: Shown only in runs that have such a value: without a GPU, no GPU use.
OPTIONAL = frozenset({"mem", "valid", "BLEU", "data", "host", "GPU"})
#: A terminal that is too narrow for all columns shows those that fit, in this order.
MOST_IMPORTANT_FIRST = (
    *("epoch", "loss", "left", "batch", "tok/s", "BLEU", "GPU"),
    *("bar", "mem", "valid", "data", "host", "time"),
)
