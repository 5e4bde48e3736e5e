"""Peers: Lightning, Accelerate and a plain loop with `torch.compile` train the same workload.

All have the same model, optimizer and batches in pinned memory. Only steps are timed, not what a
library does before the first and after the last.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.bench.lightning_peer import Lightning
from headrace.bench.peer_trainable import PeerTrainable, batch_loader
from headrace.bench.trainable import Timing, Trainable, timed
from headrace.bench.works.work import Workload
from headrace.data import prefetch
from headrace.device import Device
from headrace.engine import autocast
from headrace.errors import BenchError
from headrace.extras import install_command
from headrace.schema import listed, nearest


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


class ReduceOverhead(PeerTrainable):
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
                self.count_step()

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


class Accelerate(PeerTrainable):
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
        loader = iter(accelerator.prepare_data_loader(batch_loader(batches)))

        def train(count: int) -> None:
            for _ in range(count):
                batch = next(loader)
                with accelerator.autocast():
                    loss = self._loss(self._model, batch)
                accelerator.backward(loss)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(loss.detach())
                self.count_step()

        train(lead_in)
        return timed(self._device, steps, lambda: train(steps)), losses


_ACCELERATE_PRECISION = {None: "no", "fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}

PEERS: dict[str, Peer] = {
    "lightning": Peer("lightning", "lightning", Lightning),
    "accelerate": Peer("accelerate", "accelerate", Accelerate),
    "reduce-overhead": Peer("reduce-overhead", None, ReduceOverhead),
}
