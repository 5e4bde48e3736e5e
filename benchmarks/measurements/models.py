"""Which models of transformers, timm and torchvision `hr.speed_up` captures, and are they equal?

    python benchmarks/measurements/models.py --processes 4 --seconds 500 --out models.json
    python benchmarks/measurements/models.py --device fake bert resnet18
    python benchmarks/measurements/models.py --table models.json
    python benchmarks/measurements/models.py --table models.json later.json --page docs/models.md

Each model trains plain, plain again, and sped up, from the same weights on the same batches: losses
and weights are compared bit for bit, with deterministic kernels where there are some. Then its step
is timed plain and sped up, in turns. Batches alternate between two, whose objects (boxes) differ in
number where the model takes some. Several processes share the GPU, so that times say whether there
is a gain, not how large it is to a percent. A model that ends its process costs its own row.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import copy
import gc
import json
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header
from model_list import LISTED, Listed, loss_of

import headrace as hr
from headrace.device import Device, deterministic_kernels, open_device
from headrace.fake import fake_cuda
from support import torchvision_ops

torchvision_ops.define_missing()  # before torchvision is imported
COMPARED_STEPS, TIMED_STEPS, ROUNDS = 8, 10, 2


@contextlib.contextmanager
def opened(name: str) -> Iterator[Device]:
    if name == "fake":
        with fake_cuda(keep_timeline=False) as device:
            yield device
    else:
        yield open_device(name)


def moved(value: Any, to: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(to)
    if isinstance(value, dict):
        return {name: moved(one, to) for name, one in value.items()}
    return (
        type(value)(moved(one, to) for one in value) if isinstance(value, list | tuple) else value
    )


class Training:
    """A plain loop over a model of its own, with the weights of `original`."""

    def __init__(self, original: torch.nn.Module, batches: list[Any], device: Device) -> None:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        self.model = copy.deepcopy(original).to(device.torch_device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batches = batches

    def train(self, steps: int) -> list[torch.Tensor]:
        losses = []
        for at in range(steps):
            args, kwargs = self._batches[at % len(self._batches)]
            loss = loss_of(self.model(*args, **kwargs))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses


def compared(original: Any, batches: list[Any], device: Device, *, sped_up: bool) -> Any:
    """All losses and the last weights of a short run; the report, and what was captured."""
    training = Training(original, batches, device)
    scope: Any = contextlib.nullcontext()
    if sped_up:
        scope = hr.speed_up(training.model, training.optimizer, plan="graph", device=device)
    with scope as handle:
        losses = [float(one) for one in training.train(COMPARED_STEPS)]
        weights = [one.detach().cpu() for one in training.model.state_dict().values()]
        return losses, weights, handle.report() if sped_up else None


def is_equal(one: Any, other: Any) -> bool:
    return repr(one[0]) == repr(other[0]) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one[1], other[1], strict=True)
    )


def milliseconds(original: Any, batches: list[Any], device: Device) -> dict[str, list[float]]:
    """Of a step, plain and sped up in turns."""
    plain, fast = (Training(original, batches, device) for _ in range(2))
    found: dict[str, list[float]] = {"plain_ms": [], "sped_up_ms": []}
    with hr.speed_up(fast.model, fast.optimizer, plan="graph", device=device):
        for training in (plain, fast):
            training.train(6)
        for _ in range(ROUNDS):
            for name, training in (("plain_ms", plain), ("sped_up_ms", fast)):
                device.synchronize("benchmark")
                begun_s = time.perf_counter()
                training.train(TIMED_STEPS)
                device.synchronize("benchmark")
                found[name].append(round((time.perf_counter() - begun_s) / TIMED_STEPS * 1e3, 2))
    return found


def way_of(report: hr.SpeedUpReport) -> str:
    """How the model runs: "whole", as "children" or "eager"."""
    models = [part for part in report.parts if part.name.count(".") or part is report.parts[0]]
    if models[0].replays:
        return "whole"
    return "children" if any(part.replays for part in models[1:]) else "eager"


def measure(listed: Listed, device: Device, *, tiny: bool, timed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    original, draw = listed.make(tiny)
    batches = [moved(draw(), device.torch_device) for _ in range(2)]
    with deterministic_kernels(True):
        # The backward of CTC's loss and of torchvision's operators has no deterministic kernel.
        torch.use_deterministic_algorithms(True, warn_only=True)
        plain, again, fast = (
            compared(original, batches, device, sped_up=sped_up) for sped_up in (False, False, True)
        )
    report = fast[2]
    row = {
        "library": listed.library,
        "model": listed.name,
        "way": way_of(report),
        "why": report.parts[0].why or "; ".join(report.parts[0].eager),
        "equal": is_equal(plain, fast),
        "plain_differs_from_itself": not is_equal(plain, again),
        "losses": [plain[0][-1], fast[0][-1]],
        "report": str(report),
    }
    if timed:
        row |= milliseconds(original, batches, device)
    return row


def work(options: argparse.Namespace) -> None:
    """Measure the models that were named, and print a line of JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import transformers

        transformers.logging.set_verbosity_error()
    for name in options.models:
        listed = next(one for one in LISTED if name == f"{one.library}/{one.name}")
        print(json.dumps({"begun": name}), flush=True)
        try:
            with opened(options.device) as device:
                fake = options.device == "fake"
                row = measure(listed, device, tiny=fake or options.tiny, timed=not fake)
                gc.collect()
                device.release_unused()
        except Exception as problem:
            text = (str(problem).splitlines() or [""])[0]
            row = {"library": listed.library, "model": listed.name, "way": "failed",
                   "why": f"{type(problem).__name__}: {text}"}  # fmt: skip
        print(json.dumps(without_folders(row)), flush=True)


class Worker:
    """A process that measures models one after another; one that ends early is started again
    with the models that are left."""

    def __init__(self, names: list[str], options: argparse.Namespace) -> None:
        self._names, self._options = names, options
        self._is_over = False
        self._start()

    def _start(self) -> None:
        command = [sys.executable, __file__, "--worker", "--device", self._options.device]
        self._process = subprocess.Popen(
            [*command, *(["--tiny"] if self._options.tiny else []), *self._names],
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self) -> None:
        """Leave what has not been measured."""
        self._is_over = True
        self._process.kill()

    def rows(self) -> Any:
        while self._names and not self._is_over:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                found = json.loads(line) if line.startswith("{") else {}
                if "model" in found:
                    self._names.pop(0)
                    yield found
            code = self._process.wait()
            if self._names and not self._is_over:
                library, model = self._names.pop(0).split("/")
                yield {"library": library, "model": model, "way": "failed",
                       "why": f"its process ended with {code}"}  # fmt: skip
                if self._names:
                    self._start()


def without_folders(value: Any) -> Any:
    """A row without the folders of this machine."""
    if isinstance(value, str):
        return re.sub(r"/\S*/(?:site|dist)-packages/", "", value)
    return (
        {key: without_folders(one) for key, one in value.items()}
        if isinstance(value, dict)
        else value
    )


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of some models over those of all."""
    rows = {(row["library"], row["model"]): row for one in results for row in one["models"]}
    commands = "` and `".join(one["command"] for one in results)
    return results[-1] | {"command": commands, "models": list(rows.values())}


def page(result: dict[str, Any]) -> str:
    """The page of the documentation, from a stored result."""
    rows = sorted(result["models"], key=lambda one: (one["library"], one["model"]))
    where = result["gpu"] or "the [fake device](testing.md), in tiny sizes"
    lines = [
        "# Which models are captured",
        "",
        "```python",
        "handle = hr.speed_up(model, optimizer)",
        "print(handle.report().way)            # parts, children or eager",
        "```",
        "",
        f"{len(rows)} models of transformers, timm and torchvision with random weights, on",
        f"{where}: each trains plain and sped up, from the same weights on the",
        "same batches. *Whole* means that the model's forward and backward are graphs, *children*",
        "that [the largest parts of it](speed-up.md#a-model-in-pieces) are. *Equal* compares all",
        "losses and weights bit for bit.",
        "",
        "| library | models | whole | children | eager | did not run | equal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        ways = [row["way"] for row in own]
        counts = [ways.count(way) for way in ("whole", "children", "eager", "failed")]
        equal = sum(bool(row.get("equal")) for row in own)
        ran = len(own) - ways.count("failed")
        lines.append(
            f"| {library} | {len(own)} | " + " | ".join(map(str, counts)) + f" | {equal} of {ran} |"
        )
    for library in dict.fromkeys(row["library"] for row in rows):
        lines += ["", f"## {library}", "", "| model | captured | equal | why not whole |",
                  "| --- | --- | --- | --- |"]  # fmt: skip
        for row in rows:
            if row["library"] == library:
                failed = row["way"] == "failed"
                equal = "" if failed else "yes" if row["equal"] else "no"
                way = "did not run" if failed else row["way"]
                why = "" if way == "whole" else first_reason(row["why"])
                lines.append(f"| {row['model']} | {way} | {equal} | {why} |")
    lines += ["", f"Made from the results of `{result['command']}`, {result['date']}, PyTorch "
              f"{result['torch']}.", ""]  # fmt: skip
    return "\n".join(lines)


def first_reason(why: str) -> str:
    """What stands in the way, and its line, without what to do about it."""
    found = re.match(r"(.*? at [\w./-]+\.py:\d+|[^;:]*)", without_folders(why))
    return (why if found is None else found[1]).replace("|", "\\|")


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, and the totals."""
    lines = ["| model | captured | equal | plain ms | sped up ms | why not whole |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in sorted(rows, key=lambda one: (one["library"], one["model"])):
        equal = "yes" if row.get("equal") else "no"
        if not row.get("equal") and row.get("plain_differs_from_itself"):
            equal = "as plain runs"
        times = [
            f"{min(row[name]):.1f}–{max(row[name]):.1f}" if name in row else ""
            for name in ("plain_ms", "sped_up_ms")
        ]
        why = "" if row["way"] == "whole" else row["why"]
        cells = (f"{row['library']}/{row['model']}", row["way"], equal, *times, why)
        lines.append("| " + " | ".join(cells) + " |")
    ways = [row["way"] for row in rows]
    wrong = [
        row["model"]
        for row in rows
        if row["way"] != "failed" and not (row["equal"] or row["plain_differs_from_itself"])
    ]
    counts = ", ".join(f"{ways.count(one)} {one}" for one in dict.fromkeys(sorted(ways)))
    return "\n".join(lines) + f"\n\n{len(rows)} models: {counts}; different: {wrong or 'none'}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="library/model, or its name [default: all]")
    parser.add_argument("--device", default="auto", help="cuda, fake, … [default: auto]")
    parser.add_argument("--processes", type=int, default=1, help="how many at once [default: 1]")
    parser.add_argument("--tiny", action="store_true", help="small models [fake: always]")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print stored results as a table; later ones count"
    )
    parser.add_argument("--page", type=Path, help="with --table: write the page of the docs")
    parser.add_argument("--seconds", type=float, help="leave what is not measured by then")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if options.table:
        result = merged([json.loads(one.read_text(encoding="utf-8")) for one in options.table])
        if options.page:
            options.page.write_text(page(result), encoding="utf-8")
        else:
            print(table(result["models"]))
        return
    names = [f"{one.library}/{one.name}" for one in LISTED]
    if options.models:
        names = [one for one in names if {one, one.split("/")[1]} & set(options.models)]
    rows: list[dict[str, Any]] = []

    def take(worker: Worker) -> None:
        for row in worker.rows():
            rows.append(row)
            print(f"{row['library']}/{row['model']}: {row['way']}, equal: {row.get('equal')}, "
                  f"{row.get('plain_ms', '')} {row.get('sped_up_ms', '')}", flush=True)  # fmt: skip
            if options.out:
                options.out.write_text(json.dumps(header("models.py") | {"models": rows}, indent=1))

    shares = [names[at :: options.processes] for at in range(options.processes)]
    workers = [Worker(share, options) for share in shares if share]
    timers = [threading.Timer(options.seconds or threading.TIMEOUT_MAX, one.end) for one in workers]
    for timer in timers:
        timer.start()
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(take, workers))
    for timer in timers:
        timer.cancel()
    print(table(rows))
    measured = {f"{row['library']}/{row['model']}" for row in rows}
    if left := [one for one in names if one not in measured]:
        print(f"left out, for want of time: {' '.join(left)}")


if __name__ == "__main__":
    main()
