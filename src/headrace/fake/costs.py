"""How long operations take on the fake device's virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.device import Kind

_NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class Costs:
    """How long operations take on the virtual clock, in microseconds.

    `by_name` sets the cost of single operations ("aten::mm", "copy h2d"). Streams do not slow each
    other down: on this ideal device everything overlaps that the program's order allows to.
    """

    kernel_us: float = 10.0
    copy_us: float = 10.0
    copy_gb_per_s: float = 25.0
    launch_us: float = 0.0
    query_us: float = 1.0
    by_name: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str, kind: Kind, nbytes: int) -> int:
        """The cost of one operation in nanoseconds."""
        if name in self.by_name:
            return round(self.by_name[name] * _NS_PER_US)
        if kind == "copy":
            return round(self.copy_us * _NS_PER_US + nbytes / self.copy_gb_per_s)
        return round(self.kernel_us * _NS_PER_US)
