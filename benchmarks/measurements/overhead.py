"""How much more CPU time the engine takes than a hand-written loop that does the same.

    python benchmarks/measurements/overhead.py [--out results.json]

The loop by hand does what the plan `pipeline` does: it copies pinned batches ahead on a separate
stream, collects losses on the device, reads them ten at a time, and limits its run-ahead. On the
CPU nothing overlaps in either loop, and both only keep their losses.

Each turn of the engine, an epoch of `--steps` steps, is compared with the turns by hand before and
after it, since a CPU's speed drifts. The CPU time of all threads of the process counts; wall time
is reported, too. Epochs of 4 steps show what starting and ending an epoch costs without its steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work, mlp
from measuring import header, interleaved_ms, save, table

from headrace.device import Device, open_device
from headrace.engine import Engine

DEPTH, AHEAD, EVERY = 2, 8, 10
SHORT = 4


def batches_of(work: Work, device: Device) -> list[Any]:
    if not device.asynchronous:
        return work.batches
    return [tuple(part.pin_memory() for part in batch) for batch in work.batches]


def by_hand(work: Work, device: Device) -> Callable[[int], object]:
    model, optimizer = work.fresh(device.torch_device)
    host = batches_of(work, device)
    return (_cuda_loop if device.asynchronous else _cpu_loop)(work, model, optimizer, host)


def _cpu_loop(work: Work, model: Any, optimizer: Any, host: list[Any]) -> Callable[[int], object]:
    def run(steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            loss = work.loss(model, host[step % len(host)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    return run


def _cuda_loop(work: Work, model: Any, optimizer: Any, host: list[Any]) -> Callable[[int], object]:
    transfer, readback = torch.cuda.Stream(), torch.cuda.Stream()

    def run(steps: int) -> list[float]:
        compute = torch.cuda.current_stream()
        ahead: deque[Any] = deque()
        flying: deque[torch.cuda.Event] = deque()
        losses: list[float] = []
        sent: deque[Any] = deque()
        gathered = torch.empty(EVERY, device="cuda")

        def send(step: int) -> None:
            slots = tuple(torch.empty_like(part, device="cuda") for part in host[step % len(host)])
            transfer.wait_stream(compute)
            with torch.cuda.stream(transfer):
                for slot, part in zip(slots, host[step % len(host)], strict=True):
                    slot.copy_(part, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record()
            ahead.append((slots, ready))

        for step in range(min(DEPTH, steps)):
            send(step)
        for step in range(steps):
            if step + DEPTH < steps:
                send(step + DEPTH)
            batch, ready = ahead.popleft()
            compute.wait_event(ready)
            if len(flying) == AHEAD:
                flying.popleft().synchronize()
            loss = work.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            gathered[step % EVERY].copy_(loss.detach())
            if (step + 1) % EVERY == 0 or step + 1 == steps:
                pinned = torch.empty(EVERY, pin_memory=True)
                readback.wait_stream(compute)
                with torch.cuda.stream(readback):
                    pinned.copy_(gathered, non_blocking=True)
                    arrived = torch.cuda.Event()
                    arrived.record()
                sent.append((pinned, arrived, gathered))
                gathered = torch.empty(EVERY, device="cuda")
            while sent and sent[0][1].query():
                losses += sent.popleft()[0].tolist()
            done = torch.cuda.Event(blocking=True)
            done.record()
            flying.append(done)
        for pinned, arrived, _ in sent:
            arrived.synchronize()
            losses += pinned.tolist()
        return losses[:steps]

    return run


def through_the_engine(work: Work, device: Device) -> Callable[[int], object]:
    model, optimizer = work.fresh(device.torch_device)
    engine = Engine(model, optimizer, work.loss, plan="pipeline", device=device, precision="tf32")
    host = batches_of(work, device)

    def run(steps: int) -> object:
        return engine.epoch(host[step % len(host)] for step in range(steps)).losses

    return run


def difference(found: dict[str, Any], kind: str) -> tuple[float, float]:
    """Milliseconds per step by which the engine is slower than its neighbors by hand, and by which
    these differ from each other: medians over repeats."""
    turns = zip(*(found[way][kind] for way in ("by hand", "engine", "by hand again")), strict=True)
    more, noise = zip(*((b - (a + c) / 2, c - a) for a, b, c in turns), strict=True)
    return statistics.median(more), abs(statistics.median(noise))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # deep layers' tiny gradients would take the CPU ages
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = open_device("auto")
    large = mlp(rows=512, width=512, layers=60) if device.asynchronous else mlp(rows=256, layers=20)
    works = [mlp(), mlp(layers=20), large]
    gc.freeze()  # a collection looks at what loops make, not at all of PyTorch's modules
    rows: dict[str, dict[str, Any]] = {}
    for work in works:
        ways = {
            "by hand": by_hand(work, device),
            "engine": through_the_engine(work, device),
            "by hand again": by_hand(work, device),  # the same loop twice shows the noise
        }
        found = interleaved_ms(
            ways, device, steps=arguments.steps, repeats=arguments.repeats, warm_up=20
        )
        more, noise = difference(found, "cpu")
        slower, _ = difference(found, "all")
        short = interleaved_ms(ways, device, steps=SHORT, repeats=arguments.repeats, warm_up=1)
        apiece, _ = difference(short, "cpu")
        epoch = (apiece - more) / (1 / SHORT - 1 / arguments.steps)
        step = more - epoch / arguments.steps
        hand = found["by hand"]["ms"]
        rows[work.name] = {
            "by hand ms": hand,
            "engine ms": found["engine"]["ms"],
            "more CPU µs a step": round(step * 1e3, 1),
            "and an epoch": round(epoch * 1e3),
            "all, a step": round(more * 1e3, 1),
            "noise µs": round(noise * 1e3, 1),
            "more wall µs": round(slower * 1e3, 1),
            "more wall %": round(slower / hand * 100, 1),
            "spread by hand": f"{found['by hand']['low']}–{found['by hand']['high']}",
            "spread engine": f"{found['engine']['low']}–{found['engine']['high']}",
        }
    print(table(rows))
    save(arguments.out, {**header("overhead.py"), "rows": rows})


if __name__ == "__main__":
    main()
