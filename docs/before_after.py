"""Draws the picture at the top of the README from two committed results.

    python docs/before_after.py          # writes docs/img/before-after.svg

Each bar is one training step: the median, with a line from the fastest to the slowest round. The
dark part is the time in which the GPU ran a kernel or a copy, as PyTorch's profiler saw it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams |= {"svg.hashsalt": "headrace", "svg.fonttype": "none"}  # small, and always the same
from matplotlib import pyplot

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
PLANS = {"baseline": "before: baseline", "graph": "after: graph", "max": "after: max"}
BUSY, IDLE, INK = "#2f6690", "#f2c6c2", "#24292f"


@dataclass(frozen=True)
class Bar:
    """One plan's step, in milliseconds."""

    median: float
    low: float
    high: float
    busy: float


def read_bench(name: str) -> dict[str, Bar]:
    """The rows of a stored `headrace bench`."""
    rows = {row["plan"]: row for row in read(name)["rows"]}
    return {plan: bench_bar(rows[plan]) for plan in PLANS}


def bench_bar(row: dict[str, Any]) -> Bar:
    ms = row["ms_per_step"]
    return Bar(ms["median"], ms["low"], ms["high"], row["gpu"]["busy_ms_per_step"])


def read_graphs(name: str, part: str) -> dict[str, Bar]:
    """The rows of one part of a stored `benchmarks/measurements/graphs.py`."""
    rows = read(name)[part]["rows"]
    return {
        plan: Bar(rows[plan]["ms"], rows[plan]["low"], rows[plan]["high"], rows[plan]["busy ms"])
        for plan in PLANS
    }


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def draw(axes: Any, title: str, bars: dict[str, Bar]) -> None:
    before = bars["baseline"].median
    for row, (plan, bar) in enumerate(bars.items()):
        axes.barh(row, bar.median, 0.62, color=IDLE)
        axes.barh(row, bar.busy, 0.62, color=BUSY)
        axes.plot([bar.low, bar.high], [row, row], color=INK, linewidth=1)
        times = "" if plan == "baseline" else f", {before / bar.median:.1f} × as fast"
        axes.text(bar.high + 1, row, f"{bar.median:.1f} ms{times}", va="center", color=INK)
    axes.set_yticks(range(len(bars)), [PLANS[plan] for plan in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 92)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    figure, (slow, fast) = pyplot.subplots(2, 1, figsize=(9, 4), sharex=True)
    draw(slow, "one run", read_bench("2026-11-15-h200-bench-30x60-bf16.json"))
    draw(
        fast,
        "another run, with a faster CPU",
        read_graphs("2026-11-15-h200-graphs.json", "30x60-bf16"),
    )
    fast.set_xlabel("milliseconds per training step")
    colors = {"GPU busy": BUSY, "GPU idle": IDLE}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, list(colors), ncols=2, frameon=False, loc="upper right")
    figure.suptitle(
        "Transformer base, 30 sentences × 60 tokens, bf16, on one H200",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    figure.patch.set_facecolor("white")
    figure.tight_layout()
    path = HERE / "img" / "before-after.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
