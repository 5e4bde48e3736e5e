"""Twelve batch shapes under `max`: is each of them compiled, and what does that gain over `graph`?

    python benchmarks/measurements/compiled_shapes.py [--out results.json] [--tokens 27000]
        [--quick]

It trains the Transformer base of `headrace train` on batches like those of length buckets: a shape
has one source length, one target length, and enough sentences for `--tokens` target tokens. `max`
compiles the first shape as it is and the second with dynamic sizes; all others use that code. Then
each shape is captured as a graph of its own. Both plans train every shape in turns, in one process.
It needs a GPU and, with an empty compiler cache, some four minutes. `--device cpu` only shows that
the script runs.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, interleaved_ms, save, table

from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.translation import EOS, ModelSettings, Translator, translation_loss

PLANS = ("graph", "max")
#: (source, target) lengths, in no order: the second shape differs from the first in both.
LENGTHS = (
    *((24, 28), (12, 14), (40, 44), (8, 10), (60, 68), (18, 20)),
    *((30, 34), (100, 108), (14, 17), (48, 54), (22, 24), (76, 84)),
)
VOCABULARY = 32_000
#: Enough for a shape to be launched one by one, watched, captured and replayed.
FIRST_BATCHES = 5
REPEATS = 5

Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of(
    src_length: int, trg_length: int, tokens: int, vocabulary: int, pin: bool, count: int = 2
) -> list[Batch]:
    """src (sentences, src_length) and trg (sentences, trg_length + 1) of drawn ids."""
    draw = torch.Generator().manual_seed(src_length * 1000 + trg_length)
    sentences = max(1, tokens // trg_length)

    def ids(length: int) -> torch.Tensor:
        found = torch.randint(EOS + 1, vocabulary, (sentences, length), generator=draw)
        return found.pin_memory() if pin else found

    return [(ids(src_length), ids(trg_length + 1)) for _ in range(count)]


def engine_of(plan: str, device: Device, preset: str, vocabulary: int) -> Engine:
    torch.manual_seed(0)
    settings = ModelSettings.preset(preset)
    model = Translator(settings, vocabulary, vocabulary).to(device.torch_device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Engine(model, optimizer, translation_loss(), plan=plan, device=device, precision="bf16")


def train(engine: Engine, batches: list[Batch], steps: int) -> None:
    engine.epoch(itertools.islice(itertools.cycle(batches), steps))


def first_steps(engine: Engine, shapes: dict[str, list[Batch]]) -> dict[str, dict[str, Any]]:
    """Train on each shape's first batches: was it compiled, and how long did that take?"""
    found: dict[str, dict[str, Any]] = {}
    for name, batches in shapes.items():
        before, start = engine.compiled, time.perf_counter()
        train(engine, batches, FIRST_BATCHES)
        row: dict[str, Any] = {"first batches s": round(time.perf_counter() - start, 1)}
        after = engine.compiled
        if before is not None and after is not None:
            row["compiled"] = after.compiled
            row["why not"] = after.why
            row["compilations"] = after.compilations - before.compilations
        found[name] = row
    return found


def compare(
    engines: dict[str, Engine], shapes: dict[str, list[Batch]], device: Device, steps: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds per step of each plan on each shape, in turns."""

    def way(engine: Engine, batches: list[Batch]) -> Callable[[int], object]:
        return lambda count: train(engine, batches, count)

    ways = {
        f"{plan} {shape}": way(engine, batches)
        for shape, batches in shapes.items()
        for plan, engine in engines.items()
    }
    timed = interleaved_ms(ways, device, steps=steps, repeats=REPEATS, warm_up=2)
    rows: dict[str, dict[str, Any]] = {}
    for shape, batches in shapes.items():
        graph, fastest = timed[f"graph {shape}"], timed[f"max {shape}"]
        ratios = [a / b for a, b in zip(graph["all"], fastest["all"], strict=True)]
        tokens = batches[0][1].size(0) * (batches[0][1].size(1) - 1)
        rows[shape] = {
            "tokens": tokens,
            "graph ms": graph["ms"],
            "max ms": fastest["ms"],
            "max × graph": round(statistics.median(ratios), 3),
            "max tokens/s": round(tokens / fastest["ms"] * 1e3),
            "all": {"graph": graph["all"], "max": fastest["all"]},
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--tokens", type=int, default=27_000, help="target tokens per batch")
    parser.add_argument("--steps", type=int, default=8, help="steps per turn")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1,000 tokens")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = open_device(arguments.device)
    preset, vocabulary = ("tiny", 1000) if arguments.quick else ("base", VOCABULARY)
    tokens = min(arguments.tokens, 1000) if arguments.quick else arguments.tokens
    pin = device.asynchronous
    shapes = {
        f"{src} → {trg}": batches_of(src, trg, tokens, vocabulary, pin) for src, trg in LENGTHS
    }
    engines = {plan: engine_of(plan, device, preset, vocabulary) for plan in PLANS}
    firsts = {plan: first_steps(engine, shapes) for plan, engine in engines.items()}
    rows = compare(engines, shapes, device, arguments.steps)
    for shape, row in rows.items():
        row |= firsts["max"][shape]
    report = engines["max"].compiled
    assert report is not None
    found = {
        **header("compiled_shapes.py"),
        "tokens": tokens,
        "steps": arguments.steps,
        "rows": rows,
        "compiled": asdict(report),
        "graphs": {
            plan: None if engine.graphs is None else asdict(engine.graphs)
            for plan, engine in engines.items()
        },
        "all shapes": {
            f"{plan} tokens/s": round(
                sum(row["tokens"] for row in rows.values())
                / sum(row[f"{plan} ms"] for row in rows.values())
                * 1e3
            )
            for plan in PLANS
        },
    }
    shown = ("tokens", "graph ms", "max ms", "max × graph", "max tokens/s", "compiled")
    print(table({s: {key: row[key] for key in shown} for s, row in rows.items()}), flush=True)
    print(report, found["all shapes"], flush=True)
    save(arguments.out, found)


if __name__ == "__main__":
    main()
