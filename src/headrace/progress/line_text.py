"""The text of a line: values with their names, as many as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.cells import cell_len


def line_of(values: Mapping[str, Any], width: int | None = None) -> str:
    """The known values in one line, each after its name. Where they are wider than `width`, the
    least important are left out."""
    shown = [name for name in _TEXTS if values.get(name) is not None]
    line = ""
    for left_out in ("", *_LEAST_IMPORTANT_FIRST):
        shown = [name for name in shown if name != left_out]
        line = "  ".join(f"{name} {_TEXTS[name](values[name]).strip()}" for name in shown)
        if width is None or cell_len(line) <= width:
            break
    return line


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


_TEXTS: dict[str, Callable[[Any], str]] = {
    "epoch": str,
    "mem": _bytes,
    "tok/s": _rate,
    "loss": _loss,
    "valid": _loss,
    "BLEU": "{:.2f}".format,
    "data": "{:.0%}".format,
    "host": "{:.0%}".format,
    "GPU": "{:.0%}".format,
    "batch": str,
    "time": _duration,
    "left": _duration,
}


_LEAST_IMPORTANT_FIRST = (
    *("time", "host", "data", "valid", "mem", "GPU", "BLEU", "tok/s", "batch", "left", "loss"),
)
