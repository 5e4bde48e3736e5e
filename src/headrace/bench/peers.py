"""Peers: Lightning, Accelerate and a plain loop with `torch.compile` train the same workload.

All have the same model, optimizer and batches in pinned memory. Only steps are timed, not what a
library does before the first and after the last.
"""

from __future__ import annotations

import abc
import importlib.util
import logging
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headrace.bench.endless_batches import EndlessBatches
from headrace.bench.trainable import Timing, Trainable, timed
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import Workload, seed_all
from headrace.data import prefetch
from headrace.device import Device
from headrace.engine import autocast
from headrace.errors import BenchError
from headrace.extras import install_command
from headrace.schema import listed, nearest

_LEAD_IN = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """A library to compare with; `package` is the package that it needs."""

    name: str
    package: str | None
    build: Callable[[Workload, Device, str | None, int], Trainable]

    def make(self, work: Workload, device: Device, precision: str | None, seed: int) -> Trainable:
        return self.build(work, device, precision, seed)


def peers_of(named: Sequence[str]) -> list[Peer]:
    """The peers with these names. Raises `BenchError` if one is unknown or not installed."""
    found = []
    for name in named:
        if name not in PEERS:
            raise BenchError(f"no peer {name!r}{nearest(name, PEERS)}; known: {listed(PEERS)}")
        peer = PEERS[name]
        if peer.package is not None and importlib.util.find_spec(peer.package) is None:
            raise BenchError(
                f"peer {name}: {peer.package} is not installed; run "
                f"{install_command(peer.package)}, or leave it out of --peers"
            )
        found.append(peer)
    return found


class _BatchDataset(IterableDataset[Any]):
    """A dataset of whole batches, which a DataLoader passes on unchanged."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _loader(batches: Iterable[Any]) -> DataLoader[Any]:
    return DataLoader(_BatchDataset(batches), batch_size=None)


class _PeerTrainable(abc.ABC):
    """Base of the peers. `_train(batches, lead_in, steps)` trains on `lead_in` batches, then times
    `steps` more, and returns all losses as tensors on the device."""

    compiles = False
    lead_in = 0

    def __init__(self, work: Workload, device: Device, precision: str | None, seed: int) -> None:
        self._device, self._precision, self._seed = device, precision, seed
        made = work.make(device, seed=seed, pin=True)
        if not isinstance(made, ModelTraining):
            raise BenchError(
                f"{work.name} does not return (model, optimizer, loss, loader), which is all that "
                "peers can train: leave out --peers"
            )
        self._made: ModelTraining | None = made
        self._batches = EndlessBatches(self._made.loader, work.name)
        self.trained, self._seed_next = 0, False

    def run(self, steps: int) -> Timing:
        # The first batches are those that the loader's workers have prefetched.
        lead_in = max(_LEAD_IN, self._batches.ahead)
        with self._device.numerics(self._precision):
            timing, _ = self._train(self._batches.take(lead_in + steps), lead_in, steps)
        return timing

    def losses(self, batches: Sequence[Any]) -> tuple[float, ...]:
        self._seed_next = True
        with self._device.numerics(self._precision):
            _, losses = self._train(batches, 0, len(batches))
        return self._read(losses)

    def graphs(self) -> dict[str, Any] | None:
        return None

    def compiled(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        self._batches.close()
        self._made = None

    @abc.abstractmethod
    def _train(
        self, batches: Iterable[Any], lead_in: int, steps: int
    ) -> tuple[Timing, list[torch.Tensor]]: ...

    def _loss(self, model: Any, batch: Any) -> torch.Tensor:
        assert self._made is not None
        if self._seed_next:  # only now: a library's loader may draw from the same generator
            self._seed_next = False
            seed_all(self._seed)
        returned = self._made.loss(model, batch)
        loss = returned if isinstance(returned, torch.Tensor) else returned["loss"]
        assert isinstance(loss, torch.Tensor)
        return loss

    def _read(self, losses: list[torch.Tensor]) -> tuple[float, ...]:
        stacked = torch.stack([loss.float() for loss in losses])
        on_host = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu")
        with self._device.ledger.waiting("bench"):
            on_host.copy_(stacked)
        self._device.synchronize("bench")
        return tuple(self._device.read_host(on_host.unsqueeze(0))[0])


class ReduceOverhead(_PeerTrainable):
    """`torch.compile(model, mode="reduce-overhead")` in a plain loop that prefetches batches."""

    compiles = True

    def __init__(self, work: Workload, device: Device, precision: str | None, seed: int) -> None:
        if precision == "fp16":
            raise BenchError(
                "peer reduce-overhead: precision = 'fp16' needs loss scaling, which its plain loop "
                "does not do: expected bf16, tf32 or fp32"
            )
        super().__init__(work, device, precision, seed)
        assert self._made is not None
        self._compiled: Any = torch.compile(self._made.model, mode="reduce-overhead")

    def close(self) -> None:
        super().close()
        self._compiled = None

    def _train(
        self, batches: Iterable[Any], lead_in: int, steps: int
    ) -> tuple[Timing, list[torch.Tensor]]:
        losses: list[torch.Tensor] = []
        ahead = iter(prefetch(batches, self._device))

        def train(count: int) -> None:
            for _ in range(count):
                losses.append(self._step(next(ahead)))
                self.trained += 1

        train(lead_in)
        return timed(self._device, steps, lambda: train(steps)), losses

    def _step(self, batch: Any) -> torch.Tensor:
        made = self._made
        assert made is not None
        torch.compiler.cudagraph_mark_step_begin()
        with autocast(self._device, self._precision):
            loss = self._loss(self._compiled, batch)
        loss.backward()
        made.optimizer.step()
        made.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()  # the next replay overwrites it


class Lightning(_PeerTrainable):
    """The workload as a LightningModule, trained by `Trainer.fit`."""

    def _train(
        self, batches: Iterable[Any], lead_in: int, steps: int
    ) -> tuple[Timing, list[torch.Tensor]]:
        import lightning

        _quiet("lightning.pytorch", "lightning.fabric")
        assert self._made is not None
        made, peer, device = self._made, self, self._device
        losses: list[torch.Tensor] = []
        marks: list[int] = []

        def mark() -> None:
            device.synchronize("bench")
            marks.append(device.ledger.now_ns())

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = made.model

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                if index == lead_in:
                    mark()
                loss = peer._loss(self.inner, batch)
                losses.append(loss.detach())
                return loss

            def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
                peer.trained += 1
                if index == lead_in + steps - 1:
                    mark()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return made.optimizer

        with _interruptible(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_steps=lead_in + steps,
                max_epochs=1,
                accelerator="gpu" if device.asynchronous else "cpu",
                devices=[device.torch_device.index or 0] if device.asynchronous else 1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                precision=_LIGHTNING_PRECISION[self._precision],
            )
            trainer.fit(Module(), _loader(batches))
        return Timing(steps, marks[0], marks[1] - marks[0]), losses


class Accelerate(_PeerTrainable):
    """`Accelerator.prepare` and the loop from its documentation."""

    def __init__(self, work: Workload, device: Device, precision: str | None, seed: int) -> None:
        super().__init__(work, device, precision, seed)
        from accelerate import Accelerator

        assert self._made is not None
        self._accelerator: Any = Accelerator(
            mixed_precision=_ACCELERATE_PRECISION[precision], cpu=not device.asynchronous
        )
        self._model, self._optimizer = self._accelerator.prepare(
            self._made.model, self._made.optimizer
        )

    def close(self) -> None:
        super().close()
        self._accelerator.free_memory()
        self._model = self._optimizer = None

    def _train(
        self, batches: Iterable[Any], lead_in: int, steps: int
    ) -> tuple[Timing, list[torch.Tensor]]:
        accelerator, losses = self._accelerator, []
        loader = iter(accelerator.prepare_data_loader(_loader(batches)))

        def train(count: int) -> None:
            for _ in range(count):
                batch = next(loader)
                with accelerator.autocast():
                    loss = self._loss(self._model, batch)
                accelerator.backward(loss)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(loss.detach())
                self.trained += 1

        train(lead_in)
        return timed(self._device, steps, lambda: train(steps)), losses


_LIGHTNING_PRECISION: dict[str | None, Any] = {
    None: "32-true",
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}
_ACCELERATE_PRECISION = {None: "no", "fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}

PEERS: dict[str, Peer] = {
    "lightning": Peer("lightning", "lightning", Lightning),
    "accelerate": Peer("accelerate", "accelerate", Accelerate),
    "reduce-overhead": Peer("reduce-overhead", None, ReduceOverhead),
}


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Lightning's reaction to Ctrl-C, which ends the program and blocks further signals, into
    a `KeyboardInterrupt`."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        raise KeyboardInterrupt from end
    finally:
        if signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)


def _quiet(*loggers: str) -> None:
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
