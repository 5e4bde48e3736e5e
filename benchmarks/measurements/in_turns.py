"""The engine against the loop by hand, in turns within one process: what each costs the host.

    python benchmarks/measurements/in_turns.py --out result.json
    python benchmarks/measurements/in_turns.py --parts calls,plain --works wgan_gp,dlrm --rounds 9

Three parts:

calls   what single calls cost the host on this machine: a launch, an event, a copy. A step that is
        bound by launching pays for each
plain   `pipeline` against the plain script, for the works of inputs/works and a small WGAN-GP with
        a step of its own. Each turn of the engine lies between two of the plain script. "more %" is
        the median over rounds of what the engine's step takes more than its neighbors', "noise %"
        the same for the plain script's second turn against its first. A pass is timed apart, as
        `bench` does: "pass ms"
graph   `graph` and `max` against the graph that they have captured, replayed by hand, Transformer
        base, bf16: passes of 20 and of 200 steps, begin and end included
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is loaded

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from eleven_works import FOLDER, PlainScript
from engine_works import transformer
from measuring import header, interleaved_ms, save, table
from replay_gap import captured_by
from torch import Tensor, nn

from engine import Planned
from headrace.bench import entries_of, find_work
from headrace.bench.trainable import EngineTrainable, Timing
from headrace.bench.works.work import Workload, work_of
from headrace.device import Device, open_device
from headrace.plan import Plan

PARTS = ("calls", "plain", "graph")
WORKS = ("wgan_gp", "dlrm", "lstm", "dcgan", "nanogpt", "bert_base")
SHORT_PASS = 2


# --- calls ----------------------------------------------------------------------------------------


def calls(device: Device) -> dict[str, dict[str, Any]]:
    """Microseconds of the host for one call of each kind, while the device is ahead."""
    one, other = torch.zeros(2, device=device.torch_device).unbind()
    host = device.pinned.take(1024).view((256,), torch.float32)
    there = torch.empty(256, device=device.torch_device)
    stream, event = device.stream("transfer"), device.event()
    caller = device.current_stream()
    event.record(caller)

    def switch() -> None:
        with device.use(stream):
            pass

    ways: dict[str, Callable[[], object]] = {
        "a kernel": lambda: one.add_(1),
        "a copy on the device, 4 bytes": lambda: one.copy_(other),
        "a copy to the device, 1 KB": lambda: there.copy_(host, non_blocking=True),
        "record an event": lambda: event.record(caller),
        "wait for an event": lambda: stream.wait_event(event),
        "ask an event": event.query,
        "make an event": lambda: device.event().record(caller),
        "switch streams": switch,
        "ask whether memory is pinned": lambda: device.is_pinned(host),
        "allocate 1 KB": lambda: torch.empty_like(host, device=device.torch_device),
        "read the peak of memory": device.peak_memory,
    }
    found = {}
    for name, way in ways.items():
        took = []
        for _ in range(20):
            device.synchronize("bench")
            start = time.perf_counter()
            for _ in range(50):
                way()
            took.append((time.perf_counter() - start) / 50 * 1e6)
        found[name] = {
            "µs": round(statistics.median(took), 2),
            "low": round(min(took), 2),
            "high": round(max(took), 2),
        }
    return found


# --- pipeline against the plain script ------------------------------------------------------------


def wgan_step(device: torch.device) -> Callable[[Any], Tensor]:
    """WGAN-GP on vectors: the critic with its gradient penalty, and the generator every time."""

    def layers(*sizes: int) -> nn.Module:
        found: list[nn.Module] = []
        for into, out in itertools.pairwise(sizes):
            found += [nn.Linear(into, out), nn.LeakyReLU(0.2)]
        return nn.Sequential(*found[:-1]).to(device)

    generator = layers(128, 512, 512, 512, 784)
    critic = layers(784, 512, 512, 512, 1)
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.5, 0.9), "fused": device.type == "cuda"}
    g_optimizer = torch.optim.Adam(generator.parameters(), **options)
    c_optimizer = torch.optim.Adam(critic.parameters(), **options)

    def step(batch: Any) -> Tensor:
        (real,) = batch
        for _ in range(3):
            made = generator(torch.randn(len(real), 128, device=real.device)).detach()
            share = torch.rand(len(real), 1, device=real.device)
            mixed = (share * real + (1 - share) * made).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss: Tensor = critic(made).mean() - critic(real).mean() + 10 * penalty
            c_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            c_optimizer.step()
        g_optimizer.zero_grad(set_to_none=True)
        made = generator(torch.randn(len(real), 128, device=real.device))
        (-critic(made).mean()).backward()
        g_optimizer.step()
        return loss.detach()

    return step


def wgan_batches(pin: bool) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 784, generator=draw) for _ in range(16)]
    return [(batch.pin_memory() if pin else batch,) for batch in batches]


def wgan_work(device: Device) -> Workload:
    pin = device.torch_device.type == "cuda"

    def make() -> Any:
        return wgan_step(device.torch_device), wgan_batches(pin)

    return work_of(make, name="wgan_gp")


class PlainWgan(PlainScript):
    """The loop of a plain script, without a loader."""

    def __init__(self, device: Device) -> None:
        self._device, self._precision, self.lead_in = device, None, 0
        self._losses = plain_wgan(device.torch_device)


def plain_wgan(where: torch.device) -> Iterator[Tensor]:
    step = wgan_step(where)
    batches = wgan_batches(where.type == "cuda")
    while True:
        for batch in batches:
            yield step([part.to(where, non_blocking=True) for part in batch])


def contestants(name: str, device: Device, tiny: bool) -> tuple[PlainScript, EngineTrainable]:
    precision = None
    if name == "wgan_gp":
        work = wgan_work(device)
        plain: PlainScript = PlainWgan(device)
    else:
        given: dict[str, Any] = {"tiny": True, "workers": 0} if tiny else {}
        work = find_work(f"{FOLDER / name}.py:work", given)
        precision = work.build.__globals__["PRECISION"]
        plain = PlainScript(work, device, precision, 0)
    (entry,) = entries_of(["pipeline"], precision)
    return plain, EngineTrainable(work, device, entry, seed=0)


def against_plain(name: str, device: Device, options: argparse.Namespace) -> dict[str, Any]:
    plain, engine = contestants(name, device, options.tiny)
    for way in (plain, engine):
        way.run(options.warm_up)
    gc.collect()
    gc.freeze()
    rounds: list[tuple[Timing, Timing, Timing]] = []
    try:
        for _ in range(options.rounds):
            before, own, after = (turn(way, options.steps) for way in (plain, engine, plain))
            rounds.append((before, own, after))
    finally:
        gc.unfreeze()
        plain.close()
        engine.close()
    times = [[timing.ms_per_step for timing in turns] for turns in rounds]
    more = [b / ((a + c) / 2) - 1 for a, b, c in times]
    noise = [c / a - 1 for a, _, c in times]
    passes = [timing.pass_ns / 1e6 for _, timing, _ in rounds if timing.pass_ns is not None]
    return {
        "plain ms": round(statistics.median([ms for a, _, c in times for ms in (a, c)]), 3),
        "pipeline ms": round(statistics.median([b for _, b, _ in times]), 3),
        "more %": round(100 * statistics.median(more), 2),
        "low": round(100 * min(more), 2),
        "high": round(100 * max(more), 2),
        "noise %": round(100 * statistics.median([abs(one) for one in noise]), 2),
        "pass ms": round(statistics.median(passes), 2) if passes else None,
        "all": times,
    }


def turn(way: PlainScript | EngineTrainable, steps: int) -> Timing:
    if way.lead_in:
        way.run(way.lead_in)
    whole = way.run(steps + SHORT_PASS)
    return whole.without(way.run(SHORT_PASS))


# --- graphs against graphs by hand ----------------------------------------------------------------


def against_graphs(device: Device, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    work, ways = transformer(), {}
    for plan in options.plans.split(","):
        planned = Planned(work, device, Plan.preset(plan), "bf16")
        ways[f"{plan}, by hand"] = captured_by(planned, device)
        ways[plan] = planned
    rows: dict[str, dict[str, Any]] = {}
    for steps, repeats in ((20, 4 * options.rounds), (200, options.rounds)):
        found = interleaved_ms(ways, device, steps=steps, repeats=repeats, warm_up=8)
        for plan in options.plans.split(","):
            hand, own = found[f"{plan}, by hand"], found[plan]
            more = [b / a - 1 for a, b in zip(hand["all"], own["all"], strict=True)]
            rows[f"{plan}, {steps} steps a pass"] = {
                "by hand ms": hand["ms"],
                "engine ms": own["ms"],
                "more %": round(100 * statistics.median(more), 2),
                "low": round(100 * min(more), 2),
                "high": round(100 * max(more), 2),
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--works", default=",".join(WORKS), help="of benchmarks/inputs/works, or wgan_gp"
    )
    parser.add_argument("--plans", default="graph,max", help="for the part graph")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn, for the part plain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, result = open_device(options.device), header("in_turns.py")
    parts = options.parts.split(",")
    if "calls" in parts:
        result["calls"] = calls(device)
        save(options.out, result)
    if "plain" in parts:
        result["plain"] = {}
        for name in options.works.split(","):
            start = time.monotonic()
            result["plain"][name] = against_plain(name, device, options)
            device.release_unused()
            save(options.out, result)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if "graph" in parts:
        result["graph"] = against_graphs(device, options)
        save(options.out, result)
    for part in parts:
        rows = {name: dict(row) for name, row in result[part].items()}
        for row in rows.values():
            row.pop("all", None)
        print(f"{part}:\n{table(rows)}\n")


if __name__ == "__main__":
    main()
