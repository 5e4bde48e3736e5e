"""Numbers as text: three significant digits and a unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

_UNKNOWN = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits: 0.0123, 8.61, 36.2, 1,250."""
    if value is None:
        return _UNKNOWN
    if value == 0:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    after = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{after}f}"
    return text.rstrip("0").rstrip(".") if "." in text and value == int(value) else text


def brief(value: float | None) -> str:
    """At most three significant digits, without trailing zeros: 0.01."""
    return _UNKNOWN if value is None else f"{value:.3g}"


def ms(value: float | None) -> str:
    """Milliseconds; below 0.1 ms, microseconds."""
    if value is None:
        return _UNKNOWN
    return f"{number(value)} ms" if abs(value) >= 0.1 or not value else f"{number(value * 1e3)} µs"


def score(value: float | None) -> str:
    """A score from 0 to 100, such as BLEU: 47.0."""
    return _UNKNOWN if value is None else f"{value:.1f}"


def tick(value: float) -> str:
    """A number on an axis, without trailing zeros."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def share(value: float | None) -> str:
    """A share of 1 as percent: 12 %, with one more digit near 0 and 100."""
    if value is None:
        return _UNKNOWN
    percent = max(-1e306, min(1e306, value)) * 100
    if percent in (0, 100) or 1 <= abs(percent) < 99 or abs(percent) > 100:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if abs(percent) >= 0.05 else f"{percent:.2g} %"


def times(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def factor(value: float) -> str:
    """A factor in a sentence, "4.2 times as fast": 4.2, 1.05, 12."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:.0f}"


def size(value: float | None) -> str:
    """Bytes, in the largest unit of which there is at least one."""
    if value is None:
        return _UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    if value < 60:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(value: object) -> str:
    """An ISO date and time, to the minute: 2026-11-15 09:51. Empty without one."""
    return str(value or "")[:16].replace("T", " ")


def plain(value: object) -> str:
    """The value of a setting, of any type."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return _UNKNOWN
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(plain(inner) for inner in value) or _UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items()) or _UNKNOWN
    return str(value)


def watts(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f} W" if abs(value) < 1e15 else f"{number(value)} W"


def joined(names: Sequence[str]) -> str:
    """Names in a sentence: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def words(name: str) -> str:
    """The name of a field as words: `run_ahead` is `run ahead`."""
    return name.replace("_", " ")


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About `about` round numbers from `low` to `high`."""
    rough = (high - low) / max(1, about)
    if not 1e-300 < rough < 1e300:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
