"""The result of an epoch: its losses, rates and host waits, as a frozen record."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from headrace.device import LedgerStatistics
from headrace.engine.loss.compiled import CompileReport


@dataclass(frozen=True, slots=True)
class EpochStatistics:
    """Counts and rates of one pass over a loader.

    `updates` counts optimizer steps, `replays` counts batches that ran as a graph. Rates are per
    second of wall time, until the last loss was read. `weight_per_s` is tokens per second if
    weights are token counts; None without weights. `host_blocked_share` is the share of the time
    in which the host waited for the device, `data_wait_share` that in which it waited for the
    loader: 0 is never, 1 is always.
    """

    batches: int
    updates: int
    replays: int
    samples: int
    elapsed_s: float
    batches_per_s: float
    updates_per_s: float
    samples_per_s: float
    weight_per_s: float | None
    host_blocked_share: float
    data_wait_share: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class EpochResult:
    """The result of one pass over a loader.

    `losses` has one float per batch, in order. `mean_loss` and `metrics` are means over batches,
    by weight. A mean of no batches is NaN: the engine logs a warning if the loader was empty.
    `waits` holds the host waits of this pass. `non_finite` lists the batches whose loss was NaN or
    infinite. `compiled` says whether the step ran as compiled code, and if not, why; None if the
    plan does not compile.
    """

    epoch: int
    plan: str
    device: str
    losses: tuple[float, ...]
    weights: tuple[float, ...]
    mean_loss: float
    metrics: dict[str, float]
    non_finite: tuple[int, ...]
    waits: LedgerStatistics
    statistics: EpochStatistics
    compiled: CompileReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts, lists, numbers and strings."""
        content = {
            name: getattr(self, name)
            for name in ("epoch", "plan", "device", "mean_loss", "metrics")
        }
        return content | {
            "losses": list(self.losses),
            "weights": list(self.weights),
            "non_finite": list(self.non_finite),
            "waits": self.waits.to_dict(),
            "statistics": asdict(self.statistics),
            "compiled": None if self.compiled is None else asdict(self.compiled),
        }

    def to_json(self) -> str:
        """The result as a JSON object. NaN and infinity become null: JSON has neither."""
        return json.dumps(_finite(self.to_dict()), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
