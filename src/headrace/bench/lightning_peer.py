"""Lightning as a peer."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.bench.peer_trainable import PeerTrainable, batch_loader
from headrace.bench.trainable import Timing


class Lightning(PeerTrainable):
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
                peer.count_step()
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
            trainer.fit(Module(), batch_loader(batches))
        return Timing(steps, marks[0], marks[1] - marks[0]), losses


_LIGHTNING_PRECISION: dict[str | None, Any] = {
    None: "32-true",
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
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
