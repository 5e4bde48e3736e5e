"""The plain scripts of inputs/works with `hr.speed_up` added, against the same scripts without.

    python benchmarks/measurements/parts_works.py --out parts_works.json
    python benchmarks/measurements/parts_works.py dcgan lstm --steps 60

Each script's own loop runs plain and sped up, in turns. A line for each: ms a step, whether losses
are equal, and the report. Losses are compared with deterministic kernels, in runs of their own.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import functools
import gc
import importlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

import headrace as hr
from headrace.device import Device, deterministic_kernels, open_device

WORKS = (
    *("dcgan", "actor_critic", "lstm", "bert_base", "nanogpt", "dlrm", "vit_small"),
    *("transformer", "gpt2_small", "unet", "convnext_tiny"),
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inputs" / "works"))


def parts_in(made: Any) -> list[Any]:
    """The models and optimizers that a work returns, or that its step uses."""
    found: list[Any] = []
    todo = list(made)
    while todo:
        one = todo.pop(0)
        if isinstance(one, torch.nn.Module | torch.optim.Optimizer):
            found.append(one)
        elif isinstance(one, list | tuple):
            todo += one
        elif callable(one) and getattr(one, "__closure__", None):
            todo += [cell.cell_contents for cell in one.__closure__]
    return list({id(one): one for one in found}.values())


@contextlib.contextmanager
def sped_up(
    namespace: dict[str, Any],
    device: Device,
    handles: list[hr.SpeedUpHandle],
    plan: Literal["auto", "graph"] = "graph",
) -> Iterator[None]:
    """In the block, `work()` of a module's namespace returns parts that are sped up."""
    original = namespace["work"]

    @functools.wraps(original)
    def work(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        handles.append(hr.speed_up(*parts_in(made), plan=plan, device=device))
        return made

    namespace["work"] = work
    try:
        yield
    finally:
        namespace["work"] = original


def run(
    module: Any, device: Device, steps: int, *, speed: bool, tiny: bool
) -> tuple[list[float], float, str]:
    """The losses of a run, ms a step over its second half, and the report."""
    handles: list[hr.SpeedUpHandle] = []
    options = {"tiny": True} if tiny else {}
    with sped_up(vars(module), device, handles) if speed else contextlib.nullcontext():
        losses, begun = [], 0.0
        training = module.train(device.torch_device, **options)
        for at, loss in enumerate(islice(training, steps)):
            losses.append(loss.clone())
            if at == steps // 2 - 1:
                device.synchronize("benchmark")
                begun = time.perf_counter()
        device.synchronize("benchmark")
        ms = (time.perf_counter() - begun) / (steps - steps // 2) * 1e3
        training.close()
    report = "\n".join(str(one.report()) for one in handles)
    for one in handles:
        one.close()
    numbers = [float(one) for one in losses]
    gc.collect()
    device.release_unused()
    return numbers, ms, report


def measure(name: str, device: Device, steps: int, rounds: int, *, tiny: bool) -> dict[str, Any]:
    module = importlib.import_module(name)
    with deterministic_kernels(True):
        compared = [run(module, device, 16, speed=s, tiny=tiny)[0] for s in (False, True, False)]
    plain, speed, again = compared
    found: dict[str, Any] = {
        "work": name,
        "first_different": next((at for at in range(16) if plain[at] != speed[at]), None),
        "plain_differs_from_itself": plain != again,
        "largest_difference": max(abs(a - b) for a, b in zip(plain, speed, strict=True)),
        "plain_ms": [],
        "sped_up_ms": [],
    }
    for _ in range(rounds):
        found["plain_ms"].append(run(module, device, steps, speed=False, tiny=tiny)[1])
        _, ms, found["report"] = run(module, device, steps, speed=True, tiny=tiny)
        found["sped_up_ms"].append(ms)
    return found


def line(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{found['work']:14} FAILED {found['failed']}"
    plain, speed = (" ".join(f"{one:.2f}" for one in found[k]) for k in ("plain_ms", "sped_up_ms"))
    equal = "equal"
    if found["first_different"] is not None:
        equal = (
            f"differs from step {found['first_different']}, by {found['largest_difference']:.2g}"
        )
    if found["plain_differs_from_itself"]:
        equal += " (the plain script differs from itself)"
    head = f"{found['work']:14} plain {plain} ms, sped up {speed} ms; {equal}"
    return head + "".join(f"\n    {one}" for one in found["report"].splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="*", help="which works [default: all]")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run [default: 60]")
    parser.add_argument("--rounds", type=int, default=2, help="timed runs of each [default: 2]")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    device, results = open_device("auto"), []
    for name in options.works or WORKS:
        try:
            found = measure(name, device, options.steps, options.rounds, tiny=options.tiny)
        except Exception as problem:
            found = {"work": name, "failed": f"{type(problem).__name__}: {problem}"}
        results.append(found)
        print(line(found), flush=True)
        if options.out:
            options.out.write_text(
                json.dumps({"torch": torch.__version__, "works": results}, indent=1)
            )


if __name__ == "__main__":
    main()
