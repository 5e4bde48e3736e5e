"""Twelve slow training loops with a known cause, and their fixed versions.

    python benchmarks/inputs/slow_scripts.py item --steps 100
    python benchmarks/inputs/slow_scripts.py item --fixed --steps 100
    headrace diagnose benchmarks/inputs/slow_scripts.py item --steps 200

`benchmarks/measurements/diagnosis.py` compares what `headrace diagnose` says about each with the
truth. The line to blame ends with a comment, `# slow`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset

import headrace

CLASSES = 100


@dataclass(frozen=True)
class Case:
    """`cause` is the part of a step that must be the largest idle one; `change` is what predicts
    the fixed version: "line", or the name of a prediction."""

    cause: str
    change: str
    step: Callable[[Parts, bool], Callable[[Any], None]]
    loader: str


class Parts:
    """A model, its optimizer and its device.

    A step begins with many small kernels and goes on with few large ones. A host that is ahead
    launches the small ones while the device still computes; one that has waited does not.
    """

    def __init__(self, device: torch.device, tiny: bool, **optimizer: Any) -> None:
        self.device, self.tiny = device, tiny
        self.width, layers, self.small = (16, 2, 3) if tiny else (4096, 6, 60)
        self.batch, width = (8 if tiny else 512), self.width
        self.scale = torch.ones(self.width).to(device)
        torch.manual_seed(0)
        body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*body, nn.Linear(width, CLASSES)).to(device)
        options: dict[str, Any] = {"lr": 1e-4, "fused": True} | optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)

    def update(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self, batch: Any) -> Tensor:
        x, y = (part.to(self.device, non_blocking=True) for part in batch)
        return cross_entropy(self.logits(x), y)

    def logits(self, x: Tensor) -> Tensor:
        scale = self.scale
        for _ in range(self.small):
            scale = scale * 1.0001
        logits: Tensor = self.model(x * scale)
        return logits


# --- synchronization ------------------------------------------------------------------------------


def item(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    total = torch.zeros((), device=parts.device)
    seen: list[float] = []

    def step(batch: Any) -> None:
        loss = parts.loss(batch)
        parts.update(loss)
        if fixed:
            total.add_(loss.detach())
        else:
            seen.append(loss.item())  # slow

    return step


def printing(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    lines: list[str] = []

    def step(batch: Any) -> None:
        loss = parts.loss(batch)
        parts.update(loss)
        if not fixed:
            lines.append(f"loss {loss:.4f}")  # slow

    return step


def nan_check(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    bad = torch.zeros((), dtype=torch.bool, device=parts.device)

    def step(batch: Any) -> None:
        loss = parts.loss(batch)
        parts.update(loss)
        if fixed:
            bad.logical_or_(loss.detach().isnan())
        elif torch.isnan(loss):  # slow
            raise ValueError("the loss is NaN")

    return step


def mask(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        x, y = (part.to(parts.device, non_blocking=True) for part in batch)
        keep = y >= 0
        x = torch.where(keep[:, None], x, 0) if fixed else x[keep]  # slow
        parts.update(cross_entropy(parts.logits(x), y))

    return step


def clipping(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        loss = parts.loss(batch)
        loss.backward()
        weights = parts.model.parameters()
        nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=not fixed)  # slow
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)

    return step


def timing(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        parts.update(parts.loss(batch))
        if not fixed and parts.device.type == "cuda":
            torch.cuda.synchronize()  # slow

    return step


def metrics(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    right = torch.zeros((), device=parts.device)
    found: list[Any] = []

    def step(batch: Any) -> None:
        x, y = (part.to(parts.device, non_blocking=True) for part in batch)
        logits = parts.logits(x)
        parts.update(cross_entropy(logits, y))
        best = logits.detach().argmax(1)
        if fixed:
            right.add_((best == y).sum())
        else:
            found[:] = [best.cpu()]  # slow

    return step


# --- transfer, input, host, launch ----------------------------------------------------------------


def pageable(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    head = nn.Linear(64, parts.width).to(parts.device)

    def step(batch: Any) -> None:
        images, y = batch
        if not fixed:  # else `headrace.prefetch` has copied it
            images = images.to(parts.device)  # slow
            y = y.to(parts.device, non_blocking=True)
        x = head(images.view(len(images), -1, 64).float().mean(1))
        parts.update(cross_entropy(parts.logits(x), y))

    return step


def plain(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        parts.update(parts.loss(batch))

    return step


def logging(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    settings = {str(number): [0.5] * 40 for number in range(10 if parts.tiny else 1000)}

    def step(batch: Any) -> None:
        parts.update(parts.loss(batch))
        if not fixed:
            json.dumps(settings)  # slow

    return step


def tokenizing(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    text = "the cat sat on the mat " * (20 if parts.tiny else 12_000)
    words: dict[str, int] = {}

    def step(batch: Any) -> None:
        if not fixed:
            for word in text.split():  # slow
                words.setdefault(word, len(words))  # slow
        parts.update(parts.loss(batch))

    return step


def many_launches(parts: Parts, fixed: bool) -> Callable[[Any], None]:
    """Small layers, and an optimizer that launches a dozen kernels per parameter."""
    layers = 3 if parts.tiny else 100
    small = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).to(parts.device)
    kind: dict[str, Any] = {"foreach": False, "capturable": parts.device.type == "cuda"}
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-4, **kind)
    x = torch.randn(256, 64).to(parts.device)

    def train() -> None:
        optimizer.zero_grad(set_to_none=False)
        mse_loss(small(x), x).backward()  # slow
        optimizer.step()

    if not fixed or parts.device.type != "cuda":
        return lambda batch: train()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    return lambda batch: graph.replay()


# --- loaders --------------------------------------------------------------------------------------


class Vectors(Dataset[Any]):
    """Random vectors. `work` is how many times a sample is decoded, as images would be."""

    def __init__(self, width: int, work: int = 0, image: int = 0) -> None:
        self.x = torch.randn(256, width)
        self.images = torch.randint(0, 255, (8, image), dtype=torch.uint8) if image else None
        self.work = work

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        x = self.x[at % 256]
        for _ in range(self.work):
            x = x.sort().values
        return (x if self.images is None else self.images[at % 8]), at % CLASSES


#: What makes batches: ready ones in pinned memory, a loader that decodes, or large images.
LOADED, SLOW_LOADER, IMAGES = "ready", "decodes", "images"
CASES = {
    "item": Case("synchronization", "line", item, LOADED),
    "printing": Case("synchronization", "line", printing, LOADED),
    "nan_check": Case("synchronization", "line", nan_check, LOADED),
    "mask": Case("synchronization", "line", mask, LOADED),
    "clipping": Case("synchronization", "line", clipping, LOADED),
    "timing": Case("synchronization", "line", timing, LOADED),
    "metrics": Case("synchronization", "line", metrics, LOADED),
    "pageable": Case("transfer", "with the plan pipeline", pageable, IMAGES),
    "slow_loader": Case("input", "with a loader that is always ready", plain, SLOW_LOADER),
    "logging": Case("host", "without Python between launches", logging, LOADED),
    "tokenizing": Case("host", "without Python between launches", tokenizing, LOADED),
    "many_launches": Case("launch", "with the plan graph", many_launches, LOADED),
}


def batches(case: Case, parts: Parts, fixed: bool) -> Iterator[Any]:
    """Batches as the case needs them, without end."""
    on_gpu = parts.device.type == "cuda"
    if case.loader == LOADED:
        data = Vectors(parts.width)
    elif case.loader == SLOW_LOADER:
        data = Vectors(parts.width, work=1)
    else:
        data = Vectors(parts.width, image=64 * (4 if parts.tiny else 768))
    loader: DataLoader[Any] = DataLoader(data, parts.batch, num_workers=0)
    if case.loader == SLOW_LOADER and not fixed:
        while True:
            yield from loader
    ready = list(islice(loader, 2))
    if on_gpu and (case.loader == LOADED or (case.loader == IMAGES and fixed)):
        ready = [tuple(part.pin_memory() for part in batch) for batch in ready]
    if fixed and case.loader == IMAGES:
        yield from headrace.prefetch(cycle(ready), parts.device)
    yield from cycle(ready)


def train(
    name: str, device: torch.device, *, fixed: bool = False, tiny: bool = False
) -> Iterator[None]:
    """The training loop of a case. Yields after each step."""
    case, parts = CASES[name], Parts(device, tiny, fused=device.type == "cuda")
    step = case.step(parts, fixed)
    for batch in batches(case, parts, fixed):
        step(batch)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for _ in islice(
        train(options.case, device, fixed=options.fixed, tiny=options.tiny), options.steps
    ):
        pass


if __name__ == "__main__":
    main()
