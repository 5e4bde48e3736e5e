"""Other ways to train the same workload: plain loops, Lightning, Accelerate.

Each is a function of (work, device, precision) that returns a way: a function of the number of
steps. All have the same model, optimizer and batches, in pinned memory where possible.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Work
from torch.utils.data import DataLoader, Dataset

from headrace.device import Device

Way = Callable[[int], object]


class _Batches(Dataset[Any]):
    def __init__(self, batches: list[Any], steps: int) -> None:
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        return self._batches[index % len(self._batches)]


def _autocast(precision: str) -> Any:
    return torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")


def _pinned(work: Work) -> list[Any]:
    return [tuple(part.pin_memory() for part in batch) for batch in work.batches]


def reduce_overhead(work: Work, device: Device, precision: str) -> Way:
    """`torch.compile(mode="reduce-overhead")` in a plain loop that copies ahead on a stream."""
    model, optimizer = work.fresh(device.torch_device)
    compiled = torch.compile(model, mode="reduce-overhead")
    host = _pinned(work)
    copies = torch.cuda.Stream()

    def run(steps: int) -> None:
        compute = torch.cuda.current_stream()

        def send(step: int) -> tuple[Any, torch.cuda.Event]:
            with torch.cuda.stream(copies):
                there = tuple(
                    part.to(device.torch_device, non_blocking=True)
                    for part in host[step % len(host)]
                )
                ready = torch.cuda.Event()
                ready.record()
            return there, ready

        ahead = [send(0), send(1)]
        losses = []
        for step in range(steps):
            batch, ready = ahead.pop(0)
            compute.wait_event(ready)
            for part in batch:
                part.record_stream(compute)
            torch.compiler.cudagraph_mark_step_begin()
            with _autocast(precision):
                loss = work.loss(compiled, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())
            ahead.append(send(step + 2))
        torch.stack(losses).tolist()

    return run


def lightning(work: Work, device: Device, precision: str) -> Way:
    import lightning as pl

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model, _ = work.fresh(device.torch_device)
    host = _pinned(work)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return work.loss(self.inner, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.inner.parameters(), lr=1e-4, fused=True)

    module = Module()

    def run(steps: int) -> None:
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            precision="bf16-mixed" if precision == "bf16" else "32-true",
        )
        trainer.fit(module, DataLoader(_Batches(host, steps), batch_size=None))

    return run


def accelerate(work: Work, device: Device, precision: str) -> Way:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if precision == "bf16" else "no")
    model, optimizer = accelerator.prepare(*work.fresh(device.torch_device))
    host = _pinned(work)

    def run(steps: int) -> None:
        loader = accelerator.prepare(DataLoader(_Batches(host, steps), batch_size=None))
        losses = []
        for batch in loader:
            with accelerator.autocast():
                loss = work.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).tolist()

    return run


PEERS = {
    "compile reduce-overhead, plain loop": reduce_overhead,
    "Lightning": lightning,
    "Accelerate": accelerate,
}
