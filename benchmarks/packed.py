"""The trainer with packed and with padded batches, in turns: target tokens per second, and why.

    python benchmarks/packed.py --data FOLDER [--corpus multi30k|long] [--out FILE]

FOLDER holds `multi30k` (train and val, .en.gz and .de.gz). `multi30k` trains on four numbered
copies of it, `long` on paragraphs of five of its sentences. Both ways train Transformer base under
`max` in one process, with all that `headrace train` does but validation: clipping, schedule,
metrics, checkpoints. They take turns of some epochs each. Rates are of real target tokens, padding
not counted, as the epoch lines of `metrics.jsonl` have them. Then the profiler looks at some steps:
milliseconds per step by kind of kernel, and how long the GPU is busy.

With an empty compiler cache it takes some six minutes on an H200. `--quick --device cpu` only shows
that the script runs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.attention.flex_attention as flex
from measuring import header, save, table

from headrace.checkpoint import CheckpointWriter
from headrace.device import Timeline
from headrace.parallel import SINGLE
from headrace.runs import BusyWindow, MetricsLog, RunFolder, StopRequests, read_metrics
from headrace.translation import Prepared, TrainSettings, prepared_for
from headrace.translation.build import build_run
from headrace.translation.observers import (
    EpochGauges,
    Observers,
    new_monitor,
    new_progress,
    new_watchdog,
)
from headrace.translation.trainer import Checkpoints, EpochLoss, TrainingLoop, Validation
from headrace.translation.weights import WeightFiles
from translation import four, paragraphs

#: The settings of both ways. Padded batches of 29,500 tokens have some 26,000 real ones.
BASE: dict[str, Any] = {
    "src": "en", "trg": "de", "preset": "base", "vocabulary": 32_000, "plan": "max",
    "monitor": False, "tensorboard": True, "valid_sentences": 0, "samples": 0, "hang_after": 0,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"packed": "on", "tokens": 27_136},
    "padded": {"packed": "off", "tokens": 29_500, "shapes": 12},
}
QUICK = {"preset": "tiny", "layers": 1, "vocabulary": 400, "plan": "pipeline", "tokens": 600}
KINDS = {
    "attention": r"flex_attention|tem_fused|fmha|flash|attention",
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitKreduce",
    "layer norm": r"layer_norm",
    "loss": r"softmax",
    "embedding": r"embedding|index_put|sort|Radix",
    "dropout and ReLU": r"dropout|relu|threshold|bernoulli|philox",
    "optimizer and clipping": r"multi_tensor|adam|foreach|norm",
    "copies": r"Memcpy|Memset|copy",
}


class _WithoutValidation(TrainingLoop):
    """The trainer's loop. Validation would be compiled too, and is not what is measured."""

    def _validate(self) -> Validation:
        return Validation({"valid_loss": 0.0, "valid_nll": 0.0, "bleu": 0.0}, (), 0.0)


class Way:
    """A training run that can train one epoch at a time."""

    def __init__(
        self, name: str, settings: TrainSettings, data: Prepared, runs: Path, stack: ExitStack
    ) -> None:
        self.name, folder = name, RunFolder.create(runs, name)
        self.parts = parts = build_run(settings, data)
        self.device = device = parts.device
        self._metrics_file, gauges, losses = folder.metrics, EpochGauges(), EpochLoss()
        progress = stack.enter_context(new_progress(settings, SINGLE, True, gauges, None))
        metrics = stack.enter_context(MetricsLog(folder.metrics, folder.events))
        writer = stack.enter_context(CheckpointWriter(device, folder.state, 2))
        watchdog = stack.enter_context(new_watchdog(settings, SINGLE, folder, device))
        monitor = stack.enter_context(new_monitor(settings, SINGLE, folder, metrics, parts.engine))
        weight_files = WeightFiles(folder.weights, parts.model, device, SINGLE, 0)
        self._loop = _WithoutValidation(
            parts,
            Checkpoints(parts, folder, writer, weight_files, losses),
            weight_files,
            losses,
            Observers(device, progress, gauges, metrics, watchdog, monitor),
            stack.enter_context(StopRequests()),
        )

    def train(self, epochs: int) -> list[dict[str, Any]]:
        """Train some epochs. Returns their lines in `metrics.jsonl`."""
        for _ in range(epochs):
            if self._loop._epoch(0) is not None:
                raise SystemExit("stopped by a signal")
        self.device.synchronize("bench")
        lines = [line for line in read_metrics(self._metrics_file) if line["kind"] == "epoch"]
        return lines[-epochs:]

    def trace(self, steps: int) -> tuple[Timeline | None, BusyWindow | None]:
        engine, loader = self.parts.engine, self.parts.loader
        loader.sampler.set_epoch(engine.epochs)
        with self.device.trace() as trace:
            for _ in engine.steps(loader, max_steps=steps):
                pass
        return trace.timeline, BusyWindow.of(trace, steps)


def by_kind(timeline: Timeline, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per step by kind of kernel, and of the slowest kernels by name."""
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for lane in timeline.lanes():
        for span in timeline.on(lane):
            found = (kind for kind, names_of in KINDS.items() if re.search(names_of, span.name))
            kinds[next(found, "other")] += span.duration_ms / steps
            names[span.name[:120]] += span.duration_ms / steps
    slowest = sorted(names, key=lambda name: -names[name])[:16]
    return dict(kinds), {name: round(names[name], 3) for name in slowest}


def rate(name: str, lines: list[dict[str, Any]], way: Way) -> dict[str, Any]:
    rates = [line["tokens_per_s"] for line in lines]
    batches = way.parts.loader.sampler.batches
    train = way.parts.data.splits["train"]
    tokens = (train.tokens[1] - len(train)) / len(batches)
    median = statistics.median(rates)
    return {
        "target tokens/s": round(median),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
        "ms per step": round(1e3 * tokens / median, 2),
        "tokens per step": round(tokens),
        "data wait %": round(100 * statistics.median(x["data_wait_share"] for x in lines), 2),
        "blocked %": round(100 * statistics.median(x["host_blocked_share"] for x in lines), 2),
    }


def measure(corpus: Path, cache: Path, runs: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    longest = 320 if arguments.corpus == "long" else 60
    common = BASE | {"data": str(corpus), "max_length": longest, "device": arguments.device}
    rows: dict[str, dict[str, Any]] = {}
    details: dict[str, Any] = {}
    with ExitStack() as stack:
        ways, lines = [], defaultdict(list)
        for name, choice in WAYS.items():
            settings = TrainSettings.from_dict(common | choice | (QUICK if arguments.quick else {}))
            data = prepared_for(settings, cache)
            before, begun = _allocated(ways), time.perf_counter()
            way = Way(name, settings, data, runs, stack)
            first = way.train(arguments.warm_up)
            ways.append(way)
            report, graphs = way.parts.engine.compiled, way.parts.engine.graphs
            details[name] = {
                "batches": str(way.parts.loader.sampler.batches),
                "warm-up s": round(time.perf_counter() - begun, 1),
                "peak MB": round((max(x["peak_memory_bytes"] for x in first) - before) / 1e6),
                "compiled": None if report is None else asdict(report),
                "graphs": None if graphs is None else asdict(graphs),
            }
            print(name, details[name], flush=True)
        for _ in range(arguments.turns):
            for way in ways:
                lines[way.name] += way.train(arguments.epochs)
        for way in ways:
            rows[way.name] = rate(way.name, lines[way.name], way)
            rows[way.name]["peak MB"] = details[way.name]["peak MB"]
            timeline, window = way.trace(arguments.steps)
            if timeline is not None and window is not None:
                busy = window.busy_ms_per_step
                rows[way.name]["busy ms"] = round(busy, 2)
                rows[way.name]["busy %"] = round(100 * busy / rows[way.name]["ms per step"], 1)
                kinds, details[way.name]["slowest kernels"] = by_kind(timeline, arguments.steps)
                details[way.name]["kinds"] = {k: round(ms, 3) for k, ms in kinds.items()}
            way.parts.engine.close()
    packed, padded = rows["packed"], rows["padded"]
    packed["× padded"] = round(packed["target tokens/s"] / padded["target tokens/s"], 3)
    for name, found in lines.items():
        details[name]["epochs"] = [round(line["tokens_per_s"]) for line in found]
    return {"rows": rows, "details": details}


def _allocated(ways: list[Way]) -> int:
    """Bytes that the ways before this one hold."""
    return ways[0].device.memory().allocated if ways else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", choices=("multi30k", "long"), default="multi30k")
    parser.add_argument("--cache", type=Path, default=Path("build/cache"))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2, help="epochs per turn")
    parser.add_argument("--warm-up", type=int, default=3, help="epochs before the first turn")
    parser.add_argument("--steps", type=int, default=16, help="steps under the profiler")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--flex-options", nargs="+", default=[], help="flex_attention's kernel_options to set"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, not compiled")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.flex_options:
        options = dict.fromkeys(arguments.flex_options, True)
        flex.flex_attention = partial(flex.flex_attention, kernel_options=options)
    corpus = {"multi30k": four, "long": paragraphs}[arguments.corpus](arguments.data)
    with tempfile.TemporaryDirectory() as runs:
        found = measure(corpus, arguments.cache, Path(runs), arguments)
    save(arguments.out, {**header("packed.py"), "corpus": arguments.corpus, **found})
    kinds = {name: one.get("kinds", {}) for name, one in found["details"].items()}
    print(table(kinds))
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
