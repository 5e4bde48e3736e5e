"""What operations take on the fake device's virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.device import Kind

_NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take on the virtual clock, in microseconds.

    `by_name` overrides all for one operation ("aten::mm", "copy h2d"). Streams do not slow each
    other down: this is an ideal device, on which all overlap that the order allows takes place.
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
