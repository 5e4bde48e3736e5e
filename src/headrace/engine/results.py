"""What an epoch gave: every loss with its step, the waits, the rates. A frozen record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.data import Draws
from headrace.device import LedgerStatistics
from headrace.engine.compiled import CompileReport
from headrace.engine.deferred import DeferredValues


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


@dataclass(frozen=True, slots=True)
class Pass:
    """What was counted on the way through a loader. `restored` of the values that came back are
    of batches before it, whose time is not counted here."""

    epoch: int
    plan: str
    device: str
    batches: int
    updates: int
    replays: int
    samples: int
    weighted: bool
    restored: int
    elapsed_s: float
    peak_memory_bytes: int


def epoch_result(
    counted: Pass, entries: Sequence[DeferredValues], waits: LedgerStatistics
) -> EpochResult:
    """Put together what was counted and what came back from the device."""
    losses = tuple(entry.values["loss"] for entry in entries if "loss" in entry.values)
    weights = tuple(entry.values.get("weight", 1.0) for entry in entries)
    elapsed_s = max(counted.elapsed_s, 1e-9)
    data_ms = waits["data"].total_ms
    statistics = EpochStatistics(
        batches=counted.batches,
        updates=counted.updates,
        replays=counted.replays,
        samples=counted.samples,
        elapsed_s=counted.elapsed_s,
        batches_per_s=counted.batches / elapsed_s,
        updates_per_s=counted.updates / elapsed_s,
        samples_per_s=counted.samples / elapsed_s,
        weight_per_s=sum(weights[counted.restored :]) / elapsed_s if counted.weighted else None,
        host_blocked_share=min(1.0, max(0.0, waits.wall_ms - data_ms) / 1e3 / elapsed_s),
        data_wait_share=min(1.0, data_ms / 1e3 / elapsed_s),
        peak_memory_bytes=counted.peak_memory_bytes,
    )
    return EpochResult(
        epoch=counted.epoch,
        plan=counted.plan,
        device=counted.device,
        losses=losses,
        weights=weights,
        mean_loss=weighted_mean(entries, "loss"),
        metrics={name: weighted_mean(entries, name) for name in _metric_names(entries)},
        non_finite=tuple(entry.step for entry in entries if "loss" in entry.non_finite),
        waits=waits,
        statistics=statistics,
    )


def weighted_mean(entries: Sequence[DeferredValues], name: str) -> float:
    """The mean of `name` over the batches that gave it, by weight; NaN over none."""
    return NOTHING.plus(entries, name).mean


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Values × weights, and weights, added up batch by batch: in parts it is the same sum."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, entries: Iterable[DeferredValues], name: str) -> WeightedSum:
        """With what the batches gave under `name`, too."""
        total, weight = self.total, self.weight
        for entry in entries:
            if name in entry.values:
                share = entry.values.get("weight", 1.0)
                # A batch of weight 0 has nothing in it: its loss is often 0/0.
                total += entry.values[name] * share if share else 0.0
                weight += share
        return WeightedSum(total, weight)

    @property
    def mean(self) -> float:
        """NaN over nothing."""
        return self.total / self.weight if self.weight else math.nan


NOTHING = WeightedSum()


@dataclass(frozen=True, slots=True)
class Start:
    """Where in its epoch a pass begins: at batch `first`, which is the loader's first. Of those
    before, `own` were this rank's, which has no more if it has `ended` (the others only stood in).
    `loader` is the loader's own state there, if it keeps one. `pending` are values that were not
    reported yet, and `loss` is the sum of those that were."""

    first: int = 0
    own: int = 0
    ended: bool = False
    loader: Any = None
    pending: tuple[DeferredValues, ...] = ()
    loss: WeightedSum = NOTHING
    draws: Draws | None = None


def _metric_names(entries: Sequence[DeferredValues]) -> list[str]:
    names = dict.fromkeys(name for entry in entries for name in entry.values)
    return [name for name in names if name not in ("loss", "weight")]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
