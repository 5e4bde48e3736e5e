"""What lies between two replays of a step's graph, and whether several steps in one graph help.

    python benchmarks/measurements/replay_gap.py [--plans graph,max] [--out results.json]

Transformer base, 30 sentences of 60 tokens, bf16, milliseconds per step, all in turns:

engine              an epoch under the plan: batches from the host, losses read
its graph alone     the graph that the engine has captured, replayed and nothing else
2, 4, 8 in a graph  steps captured by hand, one after the other, as a single graph
1 in a graph        the same with one step, to compare with

"busy" is the union of all kernel and copy times that the profiler sees. It makes each kernel a
little longer or shorter. What "its graph alone" takes more than that is idle time between the
kernels of a graph: "µs each" is that time over the number of kernels and copies. What "engine"
takes more than "its graph alone" is the engine's. "pauses ms" are those over 20 µs, per step, while
the profiler looks: a pause between two replays would be one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, transformer
from measuring import header, interleaved_ms, save, table

from engine import Planned
from headrace.device import Device, Graph, open_device
from headrace.plan import Plan


def captured_by(planned: Planned, device: Device) -> Callable[[int], object]:
    """Replays the graph that the engine captures, without the engine."""
    graphs: list[Graph] = []
    capture = device.capture

    def recorded(*arguments: Any) -> Any:
        graph, result = capture(*arguments)
        graphs.append(graph)
        return graph, result

    with patch.object(device, "capture", recorded):
        planned(20)
    if len(graphs) != 1:
        raise SystemExit(f"the engine captured {len(graphs)} graphs; expected 1")
    (graph,) = graphs

    def replay(steps: int) -> None:
        with device.use(device.stream("compute")):
            for _ in range(steps):
                graph.replay()

    return replay


def traced(way: Callable[[int], object], device: Device, steps: int) -> dict[str, Any]:
    """What the profiler sees: busy milliseconds, kernels and copies, and pauses, per step."""
    with device.trace() as trace:
        way(steps)
    timeline = trace.timeline
    assert timeline is not None, trace.missing
    spans = [span for span in timeline.spans if span.kind in ("kernel", "copy")]
    until_ns, pauses_ns = spans[0].end_ns, 0
    for span in spans:
        pause_ns = span.start_ns - until_ns
        pauses_ns += pause_ns if pause_ns > 20_000 else 0
        until_ns = max(until_ns, span.end_ns)
    return {
        "busy ms": round(timeline.device_busy_ms() / steps, 3),
        "kernels": round(len(spans) / steps),
        "pauses ms": round(pauses_ns / 1e6 / steps, 3),
    }


class ByHand:
    """`several` steps as one graph, on one batch that stays on the GPU."""

    def __init__(self, work: Work, device: Device, several: int) -> None:
        self._several, self._work = several, work
        torch.manual_seed(0)
        # A graph does not keep the memory alive that was there before it was captured.
        self._model = work.make_model().to(device.torch_device).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-4, fused=True, capturable=True
        )
        self._batch = tuple(part.to(device.torch_device) for part in work.batches[0])
        self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(several):
                self._step()

    def __call__(self, steps: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(steps // self._several):
                self._graph.replay()

    def _step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self._work.loss(self._model, self._batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", default="graph,max")
    parser.add_argument("--steps", type=int, default=240, help="steps per turn: a multiple of 8")
    parser.add_argument("--repeats", type=int, default=7, help="turns")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steps % 8:
        parser.error(f"--steps {options.steps}: expected a multiple of 8")
    device, work = open_device("cuda"), transformer()
    ways: dict[str, Callable[[int], object]] = {}
    plans: dict[str, Planned] = {}
    for plan in options.plans.split(","):
        plans[plan] = Planned(work, device, Plan.preset(plan), "bf16")
        ways[f"{plan}: its graph alone"] = captured_by(plans[plan], device)
        ways[f"{plan}: engine"] = plans[plan]
    for several in (1, 2, 4, 8):
        ways[f"by hand: {several} in a graph"] = ByHand(work, device, several)
    rows = interleaved_ms(ways, device, steps=options.steps, repeats=options.repeats, warm_up=16)
    for name, way in ways.items():
        row = rows[name]
        row |= traced(way, device, 16)
        row["× busy"] = round(row["ms"] / row["busy ms"], 4)
        row["µs each"] = round(1e3 * (row["ms"] - row["busy ms"]) / row["kernels"], 3)
    save(options.out, {**header("replay_gap.py"), "steps": options.steps, "rows": rows})
    shown = ("ms", "low", "high", "busy ms", "× busy", "kernels", "µs each", "pauses ms")
    print(table({name: {key: row[key] for key in shown} for name, row in rows.items()}))


if __name__ == "__main__":
    main()
