"""What the ranks of a run share out among themselves: who shows, who writes, who translates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.device import Device, Ledger
from headrace.engine import Engine
from headrace.parallel import Ranks
from headrace.runs import (
    Gauges,
    MetricsLog,
    NoMetrics,
    Progress,
    RunFolder,
    RunMonitor,
    replace_file,
    shared_folder,
    silent_console,
)
from headrace.translation.saved_model import TrainedModel
from headrace.translation.score import Scores, score
from headrace.translation.settings import PLAN_FILE, TrainSettings, is_plan_file


def new_folder(ranks: Ranks, settings: TrainSettings, project: Path, name: str | None) -> RunFolder:
    """A folder for a new run: the first rank makes it, for all. A plan that is a file of its own is
    copied into it: the run keeps to it, whatever becomes of the file."""
    path = Path()
    if ranks.is_first:
        folder = RunFolder.create(project, name)
        if is_plan_file(settings.plan):
            replace_file(folder.path / PLAN_FILE, Path(settings.plan).read_bytes())
            settings = settings.but(plan=PLAN_FILE)
        folder.write_config(settings.to_dict())
        path = folder.path
    return shared_folder(Path(ranks.told(str(path), Ledger())))


def new_progress(
    ranks: Ranks, settings: TrainSettings, quiet: bool, gauges: Callable[[], Gauges]
) -> Progress:
    """What people watch: the first rank's."""
    epochs = settings.epochs
    if ranks.is_first:
        return Progress(epochs, quiet, gauges=gauges)
    return Progress(epochs, quiet=True, console=silent_console())


def new_metrics(ranks: Ranks, folder: RunFolder, settings: TrainSettings) -> MetricsLog | NoMetrics:
    """What is measured: written by the first rank."""
    if not ranks.is_first:
        return NoMetrics()
    events = folder.events if settings.tensorboard else None
    return MetricsLog(folder.metrics, events, goes_on=True)


def new_monitor(
    ranks: Ranks,
    device: Device,
    metrics: MetricsLog | NoMetrics,
    folder: RunFolder,
    settings: TrainSettings,
    engine: Engine,
) -> RunMonitor:
    """What device and host do: the first rank's."""

    def replayed() -> bool:
        graphs = engine.graphs
        return graphs is not None and graphs.why is None and graphs.replays > 0

    return RunMonitor(
        device,
        metrics,
        folder.metrics,
        wanted=settings.monitor and ranks.is_first,
        look_after=20 if engine.plan.graphs == "off" else 100,
        replayed=replayed,
    )


def batches_left(settings: TrainSettings, engine: Engine, each: int, batch: int) -> int:
    """Batches that are to come in a run of `each` an epoch, after this one."""
    left = each * (settings.epochs - engine.epochs) - batch - 1
    if settings.max_steps is None:
        return left
    in_group = (batch + 1) % settings.accumulate
    return min(left, (settings.max_steps - engine.updates) * settings.accumulate - in_group)


def translate_and_score(
    model: TrainedModel, pairs: Sequence[tuple[str, str]], beam: int, ranks: Ranks
) -> tuple[Scores, list[str]]:
    """Translate and score `pairs`, each rank its share of them; all get the same."""
    mine = model.translate([src for src, _ in pairs[ranks.rank :: ranks.size]], beam=beam)
    shares = ranks.gathered(mine, model.device.ledger)
    found = [shares[at % ranks.size][at // ranks.size] for at in range(len(pairs))]
    return score(found, [trg for _, trg in pairs], language=model.settings.trg), found


def gauges_of(device: Device, begun_ns: int, monitor: RunMonitor) -> Gauges:
    """For the progress line: what the ledger and the device say of this epoch so far."""
    ledger = device.ledger
    elapsed_ms = max(1e-3, (ledger.now_ns() - begun_ns) / 1e6)
    waits = ledger.epoch_statistics()
    data_ms = waits["data"].total_ms
    return Gauges(
        memory_bytes=device.peak_memory() or None,
        data_wait_share=min(1.0, data_ms / elapsed_ms),
        host_blocked_share=min(1.0, max(0.0, waits.wall_ms - data_ms) / elapsed_ms),
        gpu_use_share=monitor.gpu_share(),
    )
