"""What the race checker costs per launch, and that it does not grow with the steps.

    python benchmarks/measurements/checker_cost.py [--steps 10000] [--out results.json]

A small model trains on the fake device with prefetched batches, clipping and AdamW. The CPU time of
this thread is divided by the number of launches, for each tenth of the steps. `--profile` prints
the functions that take most of it instead.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save

from headrace.fake import FakeDevice


def training(device: FakeDevice) -> Callable[[], None]:
    """One step: copy the next batch on a stream of its own, train on this one."""
    place = device.torch_device
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    ).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    host = torch.ones(16, 32).pin_memory()
    slots = [torch.zeros(16, 32, device=place) for _ in range(2)]
    ready = [device.event() for _ in slots]
    done = [device.event() for _ in slots]
    transfer, compute = device.stream("transfer"), device.current_stream()
    transfer.wait_stream(compute)
    count = 0

    def send(slot: int) -> None:
        if done[slot].recorded:
            transfer.wait_event(done[slot])
        with device.use(transfer):
            slots[slot].copy_(host, non_blocking=True)
            ready[slot].record()

    def step() -> None:
        nonlocal count
        slot = count % 2
        send(1 - slot)
        compute.wait_event(ready[slot])
        loss = model(slots[slot]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done[slot].record()
        count += 1

    send(0)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the costs to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with FakeDevice(keep_timeline=False) as device:
        step = training(device)
        for _ in range(20):
            step()
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda: [step() for _ in range(arguments.steps)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
            return
        tenths = []
        for _ in range(10):
            gc.collect()
            launches, start = device.launches, time.thread_time()
            for _ in range(arguments.steps // 10):
                step()
            seconds = time.thread_time() - start
            tenths.append(1000 * seconds / (device.launches - launches))
    print("ms per launch, each tenth:", *(f"{cost:.3f}" for cost in tenths))
    print(f"{device.launches / (arguments.steps + 20):.0f} launches a step")
    save(arguments.out, {**header("checker_cost.py"), "ms_per_launch": tenths})


if __name__ == "__main__":
    main()
