"""What is counted during a pass over a loader, and the `EpochResult` made of it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.data import Fetched, describe_batch
from headrace.device import Device
from headrace.engine.loop.results import EpochResult, EpochStatistics
from headrace.engine.stages import Launched, Progress
from headrace.engine.values.arrived import DeferredValues
from headrace.engine.values.weighted_sum import EMPTY_SUM
from headrace.parallel import Ranks


class Tally:
    """Counts the batches, samples and time of one pass over a loader.

    The first `restored` values that arrive belong to batches before this pass. Their weights do not
    count towards its rates.
    """

    def __init__(self, device: Device, *, restored: int) -> None:
        self._device, self._restored = device, restored
        self.batches = self.samples = self.replays = 0
        self._weighted = False
        self._largest = (0, 0)  # bytes and samples
        #: The batch that failed, in words.
        self.failed: str | None = None
        self._peak_bytes = 0
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
        return f"{samples:,} samples ({nbytes / 1e6:,.1f} MB)" if nbytes else None

    def note_failed(self, fetched: Fetched) -> None:
        self.failed = describe_batch(fetched.batch)

    def sum_over(self, ranks: Ranks) -> None:
        self.samples = sum(ranks.all_gather(self.samples, self._device.ledger))

    def keep_peak(self) -> None:
        """Call before another pass (an evaluation) resets the device's peak memory."""
        self._peak_bytes = max(self._peak_bytes, self._device.peak_memory())

    def end(self) -> None:
        self._ended_ns = self._device.ledger.now_ns()

    def result(
        self, progress: Progress, plan: str, entries: Sequence[DeferredValues]
    ) -> EpochResult:
        """The result of the pass, from what was counted and the values that have arrived."""
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
            peak_memory_bytes=max(self._peak_bytes, self._device.peak_memory()),
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
    """The mean of `name` by weight, over the batches that have it; NaN if none has."""
    return EMPTY_SUM.plus(entries, name).mean


def _metric_names(entries: Sequence[DeferredValues]) -> list[str]:
    names = dict.fromkeys(name for entry in entries for name in entry.values)
    return [name for name in names if name not in ("loss", "weight")]
