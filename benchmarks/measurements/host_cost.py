"""What the engine's own Python code costs the host per step, under each eager plan.

    python benchmarks/measurements/host_cost.py [--device cpu|fake|cuda] [--out results.json]

There are two kinds of figures. The counts are exact, also on a busy machine: calls of the package's
Python functions, and of the standard library's that they call, the Python instructions in them, and
what is asked of the device (events, stream switches). They are the difference between two epochs of
different lengths, so what an epoch costs once is not in them.

The times are CPU time, of all threads, and wall time. Each turn of the engine is compared with the
turns of a plain loop before and after it. That loop copies each batch, computes, updates and keeps
the loss. Times on a busy machine say little. The fake device, which has copies and streams like a
GPU, has counts only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, mlp
from measuring import header, interleaved_ms, save, table

import headrace
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.fake import FakeDevice

PLANS = ("baseline", "interval", "event", "streams4", "pipeline")
PACKAGE = f"{Path(headrace.__file__).parent}/"
# What the fake device does is no cost of the engine.
IGNORED = (f"{PACKAGE}fake/", f"{PACKAGE}races/", f"{PACKAGE}source_lines.py")
STANDARD = f"{Path(os.__file__).parent}/"
SHORT, LONG = 40, 80
# What is asked of the device, by the name and file of the function that asks.
REQUESTS = {
    "events made": {("device", "event")},
    "events recorded": {("device", "record")},
    "events queried": {("device", "query")},
    "stream waits": {("device", "wait_event"), ("device", "wait_stream")},
    "stream switches": {("base.py", "__enter__")},
    "host waits": {("ledger.py", "__enter__")},
}


class Counts:
    """Counts calls and Python instructions in the package, in the thread that enters it."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.instructions: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Counts:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not _is_own(frame) and not (_is_helper(frame) and _is_own(frame.f_back)):
            return None
        place = (frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname)
        self.calls[place] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def opcode(frame: FrameType, event: str, _: object) -> Any:
            self.instructions[place] += event == "opcode"
            return opcode

        return opcode


def _is_own(frame: FrameType | None) -> bool:
    file = "" if frame is None else frame.f_code.co_filename
    return file.startswith(PACKAGE) and not file.startswith(IGNORED)


def _is_helper(frame: FrameType) -> bool:
    """Whether it is a function of the standard library, or one that it has generated."""
    file = frame.f_code.co_filename
    return file == "<string>" or (file.startswith(STANDARD) and "site-packages" not in file)


def steps_through(engine: Engine, batches: list[Any]) -> Callable[[int], object]:
    def run(steps: int) -> object:
        return engine.epoch([batches[step % len(batches)] for step in range(steps)])

    return run


def plain(work: Work, device: Device, batches: list[Any]) -> Callable[[int], object]:
    model, optimizer = work.fresh(device.torch_device)

    def run(steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            batch = batches[step % len(batches)]
            there = tuple(part.to(device.torch_device, non_blocking=True) for part in batch)
            loss = work.loss(model, there)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    return run


def under_plan(work: Work, device: Device, batches: list[Any], plan: str, own: bool) -> Engine:
    model, optimizer = work.fresh(device.torch_device)
    if not own:
        return Engine(model, optimizer, work.loss, plan=plan, device=device)

    loss_of = work.loss  # a closure with `work` would have all batches, which graphs compare

    def step(batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Engine.from_step(step, plan=plan, device=device)


def counted(run: Callable[[int], object]) -> dict[str, Any]:
    """Counts per step, and the places with the most instructions."""
    run(SHORT)
    found = []
    for steps in (SHORT, LONG):
        with Counts() as counts:
            run(steps)
        found.append(counts)
    more = LONG - SHORT
    calls = Counter(found[1].calls)
    calls.subtract(found[0].calls)
    instructions = Counter(found[1].instructions)
    instructions.subtract(found[0].instructions)
    row: dict[str, Any] = {
        "calls": round(calls.total() / more, 1),
        "instructions": round(instructions.total() / more),
    }
    for name, places in REQUESTS.items():
        asked = sum(
            count
            for (file, function), count in calls.items()
            for where, what in places
            if where in file.split("/") and function.rpartition(".")[2] == what
        )
        row[name] = round(asked / more, 1)
    row["by place"] = {
        f"{file} {function}": [round(calls[file, function] / more, 2), round(count / more)]
        for (file, function), count in instructions.most_common()
        if count > more / 2
    }
    return row


def pinned(work: Work, device: Device) -> list[Any]:
    """The batches in pinned memory, as a loader with `pin_memory=True` has them."""
    if not device.asynchronous:
        return work.batches
    found = []
    for batch in work.batches:
        parts = []
        for part in batch:
            buffer = device.pinned.take(part.numel() * part.element_size())
            parts.append(buffer.view(part.shape, part.dtype).copy_(part))
        found.append(tuple(parts))
    return found


def timed(
    work: Work, device: Device, engines: dict[str, Engine], batches: list[Any], options: Any
) -> dict[str, dict[str, Any]]:
    """Microseconds per step that each engine takes more than its plain neighbors."""
    rows: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        ways = {
            "before": plain(work, device, batches),
            "engine": steps_through(engine, batches),
            "after": plain(work, device, batches),
        }
        found = interleaved_ms(
            ways, device, steps=options.steps, repeats=options.repeats, warm_up=20
        )
        row: dict[str, Any] = {"plain ms": found["before"]["ms"], "ms": found["engine"]["ms"]}
        for kind, title in (("cpu", "more CPU µs"), ("all", "more wall µs")):
            turns = zip(*(found[way][kind] for way in ways), strict=True)
            more, noise = zip(*((b - (a + c) / 2, c - a) for a, b, c in turns), strict=True)
            row[title] = round(statistics.median(more) * 1e3, 1)
            row[f"noise of {title[5:]}"] = round(abs(statistics.median(noise)) * 1e3, 1)
        row["all"] = found
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, fake or cuda")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--layers", type=int, default=3, help="of the model; few: a short step")
    parser.add_argument("--steps", type=int, default=100, help="steps per turn")
    parser.add_argument("--repeats", type=int, default=11, help="turns; 0 counts only")
    parser.add_argument("--places", type=int, default=0, help="show this many places of each plan")
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_fake = options.device == "fake"
    device = FakeDevice(check=False) if is_fake else open_device(options.device)
    if is_fake:
        device.__enter__()
    work = mlp(layers=options.layers)
    batches = pinned(work, device)
    engines = {
        f"{plan}{', own step' * own}": under_plan(work, device, batches, plan, own)
        for plan in options.plans.split(",")
        for own in (False, True)
    }
    rows = {name: counted(steps_through(engine, batches)) for name, engine in engines.items()}
    if not is_fake and options.repeats:
        for name, row in timed(work, device, engines, batches, options).items():
            rows[name] |= row
    save(options.out, {**header("host_cost.py"), "layers": options.layers, "rows": rows})
    for name, row in rows.items():
        places = row.pop("by place")
        row.pop("all", None)
        for place, (calls, instructions) in list(places.items())[: options.places]:
            print(f"{name}: {instructions:5} instructions in {calls:5} calls: {place}")
    print(table(rows))


if __name__ == "__main__":
    main()
