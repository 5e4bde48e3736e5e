"""What is counted on the way through a loader, and the result made of it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.data import Fetched, describe_batch
from headrace.device import Device
from headrace.engine.deferred import DeferredValues
from headrace.engine.results import EpochResult, EpochStatistics
from headrace.engine.stages import Launched, Progress
from headrace.engine.weighted_sum import NOTHING
from headrace.parallel import Ranks


class Tally:
    """What is counted on the way through a loader. `restored` of the values that arrive are of
    batches before it, whose time is not counted here."""

    def __init__(self, device: Device, *, restored: int) -> None:
        self._device, self._restored = device, restored
        self.batches = self.samples = self.replays = 0
        self._weighted = False
        self._largest = (0, 0)  # bytes and samples
        #: A batch that failed, in words.
        self.failed: str | None = None
        self._peak = 0
        self._begun_ns = self._ended_ns = device.ledger.now_ns()

    def begin(self) -> None:
        self._begun_ns = self._device.ledger.now_ns()

    def count(self, launched: Launched) -> None:
        fetched = launched.fetched
        self.batches += 1
        self.samples += fetched.samples
        self.replays += launched.replayed
        self._weighted = self._weighted or launched.weighted
        if fetched.nbytes > self._largest[0]:
            self._largest = (fetched.nbytes, fetched.samples)

    @property
    def largest(self) -> str | None:
        """The largest batch so far, in words."""
        nbytes, samples = self._largest
        return f"of {samples:,} samples, {nbytes / 1e6:,.1f} MB" if nbytes else None

    def note_failed(self, fetched: Fetched) -> None:
        self.failed = describe_batch(fetched.batch)

    def sum_over(self, ranks: Ranks) -> None:
        self.samples = sum(ranks.all_gather(self.samples, self._device.ledger))

    def keep_peak(self) -> None:
        """Before another pass counts the device's memory anew."""
        self._peak = max(self._peak, self._device.peak_memory())

    def end(self) -> None:
        self._ended_ns = self._device.ledger.now_ns()

    def result(
        self, progress: Progress, plan: str, entries: Sequence[DeferredValues]
    ) -> EpochResult:
        """Put together what was counted and what came back from the device."""
        waits = self._device.ledger.epoch_statistics()
        losses = tuple(entry.values["loss"] for entry in entries if "loss" in entry.values)
        weights = tuple(entry.values.get("weight", 1.0) for entry in entries)
        elapsed_s = (self._ended_ns - self._begun_ns) / 1e9
        seconds = max(elapsed_s, 1e-9)
        data_ms = waits["data"].total_ms
        statistics = EpochStatistics(
            batches=self.batches,
            updates=progress.updates,
            replays=self.replays,
            samples=self.samples,
            elapsed_s=elapsed_s,
            batches_per_s=self.batches / seconds,
            updates_per_s=progress.updates / seconds,
            samples_per_s=self.samples / seconds,
            weight_per_s=sum(weights[self._restored :]) / seconds if self._weighted else None,
            host_blocked_share=min(1.0, max(0.0, waits.wall_ms - data_ms) / 1e3 / seconds),
            data_wait_share=min(1.0, data_ms / 1e3 / seconds),
            peak_memory_bytes=max(self._peak, self._device.peak_memory()),
        )
        return EpochResult(
            epoch=progress.epoch,
            plan=plan,
            device=str(self._device),
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


def _metric_names(entries: Sequence[DeferredValues]) -> list[str]:
    names = dict.fromkeys(name for entry in entries for name in entry.values)
    return [name for name in names if name not in ("loss", "weight")]
