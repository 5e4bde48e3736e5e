"""What an epoch gave: every loss with its step, the waits, the rates. A frozen record."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from headrace.device import LedgerStatistics
from headrace.engine.compiled import CompileReport


@dataclass(frozen=True, slots=True)
class EpochStatistics:
    """Counts and rates of one pass over a loader.

    `updates` are optimizer steps, `replays` batches that ran as a captured graph. Rates are per
    second of wall time, the reading of the last loss included. `weight_per_s` is tokens a second
    where weights are token counts; None without weights. `host_blocked_share` is the part of the
    time in which the host waited for the device; `data_wait_share` that in which it waited for the
    loader: 0 is never, 1 always. Memory in bytes.
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
    """One pass over a loader, to the last loss.

    `losses` has one float a batch, in order. `mean_loss` and `metrics` are means over batches by
    weight. `waits` is the ledger's record of this pass alone. `non_finite` lists the batches whose
    loss was NaN or infinite. `compiled` says whether the step ran as compiled code, and why not;
    None if the plan does not ask for that.
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
        """Plain dicts, lists and numbers."""
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
        """One JSON object. JSON has no NaN or infinity: those become null."""
        return json.dumps(_finite(self.to_dict()), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
