"""Draws the pictures in plans.md and graphs.md: timelines from the fake device's virtual clock.

    python docs/timelines.py          # writes docs/img/timeline-*.svg

A batch takes 3 ms to load and 3 ms to copy, forward 4 ms, backward 6 ms, the update 2 ms. On a real
GPU the figures differ; the order, which is what the pictures show, does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

mpl.use("svg")
mpl.rcParams |= {"svg.hashsalt": "headrace", "svg.fonttype": "none"}  # small, and always the same
from matplotlib import pyplot

from headrace.device import Span, Timeline
from headrace.engine import Engine
from headrace.fake import Costs, FakeDevice

HERE = Path(__file__).parent
PLANS = ("baseline", "interval", "event", "streams4", "pipeline")
BATCHES = 6
COLOURS = {
    "load": "#8d99ae",
    "copy": "#f4a259",
    "forward": "#3a7ca5",
    "backward": "#2f6690",
    "update": "#81c3d7",
    "wait": "#d62828",
}
COSTS = Costs(kernel_us=0, query_us=0, by_name={"copy h2d": 3000, "copy d2h": 200})


def run(plan: str) -> Timeline:
    """A few batches under the plan, on the virtual clock."""
    with FakeDevice(costs=COSTS) as device:

        class Timed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
                device.work(4.0, "forward")
                return value.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                device.work(6.0, "backward")
                return gradient.clone()

        def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return Timed.apply(model(batch).sum())

        def loader() -> Iterator[torch.Tensor]:
            for _ in range(BATCHES):
                device.host_work(3.0, "load")
                yield torch.ones(4, 1).pin_memory()

        model = torch.nn.Linear(1, 1).to(device.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: device.work(2.0, "update"))
        engine = Engine(model, optimizer, loss, plan=plan, device=device)
        begins_ns = round(device.now_ms * 1e6)
        engine.epoch(loader())
        spans = [span for span in device.timeline().spans if span.start_ns >= begins_ns]
    return Timeline(
        replace(span, start_ns=span.start_ns - begins_ns, end_ns=span.end_ns - begins_ns)
        for span in spans
    )


def color(span: Span) -> str:
    if span.kind == "wait":
        return COLOURS["wait"]
    return COLOURS["copy"] if span.kind == "copy" else COLOURS[span.name]


def draw(plan: str, timeline: Timeline) -> None:
    order = ["host", "transfer", "transfer_next", "forward", "default", "backward", "losses"]
    lanes = [lane for lane in order if timeline.on(lane)]
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(lanes) + 0.9))
    for row, lane in enumerate(lanes):
        for span in timeline.on(lane):
            axes.broken_barh(
                [(span.start_ms, span.duration_ms)],
                (row - 0.4, 0.8),
                facecolors=color(span),
                edgecolor="white",
                linewidth=0.5,
            )
    names = {"default": "compute (the caller's)"}
    axes.set_yticks(range(len(lanes)), [names.get(lane, lane) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xlabel("ms")
    axes.set_title(f"{plan}: {BATCHES} batches in {timeline.length_ms:.1f} ms", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=shade) for shade in COLOURS.values()]
    axes.legend(handles, list(COLOURS), ncols=6, fontsize=7, frameon=False, loc="upper right",
                bbox_to_anchor=(1, 1.22))  # fmt: skip
    path = HERE / "img" / f"timeline-{plan}.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def kernels(plan: str, steps: int) -> list[Span]:
    """The kernels of a few steps that take 8 µs each on the device and 30 µs to launch."""
    costs = Costs(kernel_us=8, copy_us=8, launch_us=30, query_us=0)
    with FakeDevice(costs=costs) as device:
        layers = [part for _ in range(3) for part in (torch.nn.Linear(8, 8), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers).to(device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = Engine(
            model, optimizer, lambda m, b: m(b).square().mean(), plan=plan, device=device
        )
        batches = [torch.ones(4, 8).pin_memory() for _ in range(steps)]
        engine.epoch(batches)
        begins_ns = round(device.now_ms * 1e6)
        engine.epoch(batches)
        spans = [s for s in device.timeline().on("default") if s.start_ns >= begins_ns]
    first_ns = min(span.start_ns for span in spans)
    return [
        replace(span, start_ns=span.start_ns - first_ns, end_ns=span.end_ns - first_ns)
        for span in spans
    ]


def draw_launches(steps: int = 8) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 1.8))
    rows = {"one by one": kernels("pipeline", steps), "as a graph": kernels("graph", steps)}
    for row, spans in enumerate(rows.values()):
        bars = [(span.start_ms, span.duration_ms) for span in spans]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=COLOURS["forward"], linewidth=0)
        ends = max(span.end_ms for span in spans)
        axes.text(ends, row, f" {ends / steps:.2f} ms a step", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, max(span.end_ms for span in rows["one by one"]) * 1.16)
    axes.set_xlabel("ms")
    axes.set_title(
        f"the compute stream over {steps} steps: 8 µs a kernel, 30 µs to launch one", loc="left"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path = HERE / "img" / "timeline-graph.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main() -> None:
    draw_launches()
    for plan in PLANS:
        timeline = run(plan)
        draw(plan, timeline)
        print(f"{plan}: {timeline.length_ms:.1f} ms, overlap {timeline.overlap_ms():.1f} ms")


if __name__ == "__main__":
    main()
