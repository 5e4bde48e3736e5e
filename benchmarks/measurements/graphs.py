"""The graph and max plans on this machine's GPU: speed, losses and memory.

    python benchmarks/measurements/graphs.py [--out results.json] [--corpus lengths.npz ...]
        [--parts ...]

Speed is compared with `baseline` in the same run, and with the GPU's busy time: the union of all
kernel and copy times that the profiler sees. A corpus is a file with two arrays, `src` and `trg`:
the lengths of each sentence pair. The lengths are real, the token ids are random.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Translator, Work, transformer, translation_loss
from measuring import header, interleaved_ms, save, table
from peers import PEERS

from engine import Planned
from headrace.bench.equality import remove_dropout
from headrace.data import BucketBatches, Buckets
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.machine import BusyWindow
from headrace.plan import Plan

SENTENCES = 30
TIMED = 96
RAGGED = ("baseline", "pipeline", "graph")


def busy_ms(way: Callable[[int], object], device: Device, steps: int = 10) -> float:
    """Milliseconds per step in which the GPU runs a kernel or a copy."""
    with device.trace() as trace:
        way(steps)
    window = BusyWindow.of(trace, steps)
    assert window is not None, trace.missing
    return window.busy_ms_per_step


def speed(
    work: Work,
    device: Device,
    precision: str,
    plans: tuple[str, ...],
    keep: Callable[[dict[str, Any]], None],
    *,
    peers: bool = False,
    steps: int,
) -> None:
    """Time every plan and peer in turns; then measure the plans' busy time with the profiler."""
    planned = {name: Planned(work, device, Plan.preset(name), precision) for name in plans}
    ways: dict[str, Callable[[int], object]] = dict(planned)
    if peers:
        ways |= {name: make(work, device, precision) for name, make in PEERS.items()}
    with device.numerics(precision):
        rows = interleaved_ms(ways, device, steps=steps, repeats=5, warm_up=12)
    for row in rows.values():
        pairs = zip(rows["baseline"]["all"], row["all"], strict=True)
        row["× baseline"] = round(statistics.median(base / ms for base, ms in pairs), 2)
    found = {"precision": precision, "steps": steps, "rows": rows}
    for name, way in planned.items():
        row = rows[name]
        row["peak MB"] = way.result.statistics.peak_memory_bytes >> 20
        row["replays"] = way.result.statistics.replays
        report = way.engine.graphs
        if report is not None:
            row["graphs"] = asdict(report)
    keep(found)
    for name, way in planned.items():
        if name != "pipeline":
            row = rows[name]
            row["busy ms"] = round(busy_ms(way, device), 3)
            row["over busy %"] = round((row["ms"] / row["busy ms"] - 1) * 100, 1)
            keep(found)
    show(f"{work.name}, {precision}", rows)


class WithoutDropout(Translator):
    def __init__(self) -> None:
        super().__init__()
        remove_dropout(self)


def same_losses(work: Work, device: Device, precision: str, steps: int = 20) -> dict[str, Any]:
    """Compare the losses of `graph` with `pipeline`, bit for bit, and of `max`, without dropout."""
    bare = Work(work.name, WithoutDropout, work.loss, work.batches)
    found: dict[str, tuple[float, ...]] = {}
    for name, of, plan in (
        ("pipeline", work, "pipeline"),
        ("graph", work, "graph"),
        ("pipeline without dropout", bare, "pipeline"),
        ("max without dropout", bare, "max"),
    ):
        model, optimizer = of.fresh(device.torch_device)
        torch.manual_seed(1)
        engine = Engine(
            model,
            optimizer,
            of.loss,
            plan=plan,
            device=device,
            precision=precision,
            deterministic=plan != "max",
        )
        found[name] = engine.epoch(itertools.islice(itertools.cycle(of.batches), steps)).losses
        engine.close()
    bare_losses = zip(found["pipeline without dropout"], found["max without dropout"], strict=True)
    return {
        "steps": steps,
        "graph as pipeline, bit for bit": found["graph"] == found["pipeline"],
        "max from pipeline, at most": max(abs(a - b) / abs(a) for a, b in bare_losses),
        "losses": found,
    }


def real_lengths(path: Path, sentences: int = SENTENCES) -> tuple[Work, dict[str, Any]]:
    """Batches with the lengths of a corpus, one bucket per batch; token ids are random."""
    stored = numpy.load(path)
    lengths = numpy.stack([stored["src"], stored["trg"]], axis=1)
    buckets = Buckets.choose(lengths, max_buckets=16)
    # Last partial batches would be shapes of their own.
    sampler = BucketBatches(lengths, buckets, sentences, seed=0, drop_last=True)
    draw = torch.Generator().manual_seed(0)
    batches, real, padded = [], [], 0
    for indices in sampler:
        rows = lengths[indices]
        src_edge, trg_edge = buckets.edges[int(buckets.of(rows).max())]
        batch = []
        for side, edge in ((0, src_edge), (1, trg_edge)):
            ids = torch.randint(4, 32_000, (len(rows), edge), generator=draw)
            ids[torch.arange(edge) >= torch.tensor(rows[:, side])[:, None]] = 0
            batch.append(ids)
        real.append(int(rows.sum()))
        padded += len(rows) * (src_edge + trg_edge)
        batches.append(tuple(batch))
    figures = {
        "pairs": len(lengths),
        "batches": len(batches),
        "shapes": len(buckets.edges),
        "waste": round(1 - sum(real) / padded, 4),
        "real tokens a timed batch": statistics.mean(real[:TIMED]),
    }
    name = f"{path.stem}, {sentences} sentences"
    return Work(name, Translator, translation_loss, batches), figures


def every_shape(work: Work, times: int = 4) -> list[Any]:
    """Batches of every shape, each often enough to be captured."""
    by_shape: dict[Any, list[Any]] = {}
    for batch in work.batches:
        by_shape.setdefault(tuple(part.shape for part in batch), []).append(batch)
    return [same[turn % len(same)] for turn in range(times) for same in by_shape.values()]


def ragged(path: Path, device: Device, precision: str, keep: Callable[[Any], None]) -> None:
    """Tokens per second on real lengths, and memory with all shapes captured and without."""
    work, figures = real_lengths(path)
    rows: dict[str, Any] = {}
    for name in ("pipeline", "graph"):  # one after the other: each alone in memory
        way = Planned(work, device, Plan.preset(name), precision)
        way.engine.epoch(every_shape(work))
        device.release_unused()
        device.reset_peak_memory()
        way.engine.epoch(every_shape(work))
        way(TIMED)
        rows[name] = {"peak reserved MB": device.memory().peak_reserved >> 20}
        if way.engine.graphs is not None:
            figures["graphs"] = asdict(way.engine.graphs)
        way.engine.close()
        del way
        device.release_unused()
    over = rows["graph"]["peak reserved MB"] / rows["pipeline"]["peak reserved MB"] - 1
    figures["graph's memory over eager's %"] = round(over * 100, 1)
    planned = {name: Planned(work, device, Plan.preset(name), precision) for name in RAGGED}
    planned["graph"].engine.epoch(every_shape(work))
    timed = interleaved_ms(dict(planned), device, steps=TIMED, repeats=3)
    for name, row in timed.items():
        rows.setdefault(name, {}).update(row)
        rows[name]["real tokens/s"] = round(figures["real tokens a timed batch"] / row["ms"] * 1e3)
        pairs = zip(timed["baseline"]["all"], row["all"], strict=True)
        rows[name]["× baseline"] = round(statistics.median(b / ms for b, ms in pairs), 2)
        rows[name][f"replays of {TIMED}"] = planned[name].result.statistics.replays
    found = {"precision": precision, **figures, "rows": rows}
    keep(found)
    show(f"{work.name}, {precision}", rows)
    print(figures, flush=True)


def show(name: str, rows: dict[str, Any]) -> None:
    shown = {
        way: {key: value for key, value in row.items() if key not in ("all", "cpu", "graphs")}
        for way, row in rows.items()
    }
    print(f"{name}\n{table(shown)}", flush=True)


PLANS = ("baseline", "pipeline", "graph", "max")
PARTS = ("30x60-tf32", "30x60-bf16", "256x64-bf16", "losses")


def run_part(part: str, device: Device, steps: int, keep: Callable[[Any], None]) -> None:
    if part.endswith(".npz"):
        ragged(Path(part), device, "bf16", keep)
    elif part == "losses":
        found = same_losses(transformer(30, 60), device, "bf16")
        print({key: value for key, value in found.items() if key != "losses"}, flush=True)
        keep(found)
    elif part == "30x60-tf32":
        speed(transformer(30, 60), device, "tf32", PLANS[:3], keep, steps=steps)
    elif part == "30x60-bf16":
        speed(transformer(30, 60), device, "bf16", PLANS, keep, peers=True, steps=steps)
    else:
        speed(transformer(256, 64), device, "bf16", PLANS, keep, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--corpus", nargs="*", default=[], help="files of lengths, *.npz")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        faulthandler.enable()
        keep = partial(save, arguments.out)
        run_part(arguments.part, open_device("cuda"), arguments.steps, keep)
        return
    # A process each: CUPTI, compilers and other libraries leave things behind.
    result: dict[str, Any] = header("graphs.py")
    for part in (*arguments.parts, *arguments.corpus):
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "part.json"
            command = [sys.executable, __file__, "--part", part, "--out", str(kept)]
            run = subprocess.run([*command, "--steps", str(arguments.steps)])
            if run.returncode:
                print(f"{part}: exit code {run.returncode}", flush=True)
            if kept.exists():
                result[Path(part).stem] = json.loads(kept.read_text(encoding="utf-8"))
                save(arguments.out, result)


if __name__ == "__main__":
    # The profiler must not take itself down between a capture and its replay.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    warnings.filterwarnings("ignore")
    main()
