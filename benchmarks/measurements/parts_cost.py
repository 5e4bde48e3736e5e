"""What `hr.speed_up` costs the host for each call, beside the launches of the graphs themselves.

    python benchmarks/measurements/parts_cost.py [--layers 100] [--profile] [--out parts_cost.json]

The device is the CPU with graphs that do nothing when they are replayed, so that what is left of a
sped-up step is Python: comparing what the graphs depend on, handing out copies of the outputs, one
autograd node, giving gradients to their parameters. The model has two parameters a layer. Printed
are microseconds, the best of several turns' medians, beside the same calls of plain parts: of
a model of one layer, whose kernels are as good as none.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))
import headrace as hr
from support.graphs.no_graphs import NoGraphs


class Parts:
    """A model, its optimizer, and the parts of a step, each timed by itself."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4, device="cpu") for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randn(2, 4, device="cpu")
        self.took: dict[str, list[float]] = {"call": [], "backward": [], "update": []}

    def step(self) -> None:
        times = [time.perf_counter()]
        out = self.model(self.batch)
        times.append(time.perf_counter())
        loss = out.sum()
        between = time.perf_counter()
        loss.backward()
        times[1:] = [times[1] - times[0], time.perf_counter() - between]
        begun = time.perf_counter()
        self.optimizer.step()
        for name, took in zip(self.took, (*times[1:], time.perf_counter() - begun), strict=True):
            self.took[name].append(1e6 * took)
        self.optimizer.zero_grad()

    def medians(self) -> dict[str, float]:
        found = {name: statistics.median(times or [0]) for name, times in self.took.items()}
        for times in self.took.values():
            times.clear()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100, help="[default: 100]")
    parser.add_argument("--steps", type=int, default=300, help="steps of a turn [default: 300]")
    parser.add_argument("--turns", type=int, default=7, help="[default: 7]")
    parser.add_argument("--profile", action="store_true", help="print a profile of the steps")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sped_up, plain = Parts(options.layers), Parts(1)
    turns: list[tuple[dict[str, float], dict[str, float]]] = []
    parts = sped_up.model, sped_up.optimizer
    with hr.speed_up(*parts, plan="graph", device=NoGraphs(), recheck=0) as handle:
        for _ in range(20):
            sped_up.step()
            plain.step()
        for _ in range(options.turns):
            for parts in (sped_up, plain):
                parts.medians()
                for _ in range(options.steps):
                    parts.step()
            turns.append((sped_up.medians(), plain.medians()))
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda: [sped_up.step() for _ in range(2000)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        report = handle.report()
    assert all(part.replays > 10 for part in report.parts), str(report)
    found = {
        name: {
            "µs": round(min(one[name] for one, _ in turns), 1),
            "plain, one layer": round(min(one[name] for _, one in turns), 1),
        }
        for name in sped_up.took
    }
    for name, row in found.items():
        row["more"] = round(row["µs"] - row["plain, one layer"], 1)
        print(f"{name:10}", "  ".join(f"{key} {value:6.1f}" for key, value in row.items()))
    if options.out:
        options.out.write_text(json.dumps({"parameters": 2 * options.layers, **found}, indent=1))


if __name__ == "__main__":
    main()
