"""When a function is captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """`watch_first` and `watch_last` are the uses of a shape from which on its calls are watched,
    `capture_after` how many run before its capture. A `cautious` function is captured only if the
    device has room for its graph beside eager calls, and if no optimizer's last digits would
    differ; why it is not captured is no warning then."""

    plan_name: str
    max_graphs: int
    watch_first: int
    watch_last: int
    capture_after: int
    recheck: int
    cautious: bool = False
