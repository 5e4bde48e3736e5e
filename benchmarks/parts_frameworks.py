"""`hr.speed_up` inside the Hugging Face Trainer, Lightning and Accelerate: their loops unchanged.

    python benchmarks/parts_frameworks.py
    python benchmarks/parts_frameworks.py trainer accelerate

BERT base, batches of 32 × 128 tokens, bf16. Each runs alone and sped up, twice, in turns.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import Any

import torch

import headrace as hr

warnings.filterwarnings("ignore")
STEPS, WARM = 90, 30


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32 * STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index % 4096)
        ids = torch.randint(5, 30000, (128,), generator=draw)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 2}


def model_of() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_labels=2)).cuda()


class Clock:
    """Times the steps from `WARM` on."""

    def __init__(self) -> None:
        self.count, self.begun, self.ms = 0, 0.0, 0.0

    def tick(self) -> None:
        self.count += 1
        if self.count in (WARM, STEPS - 2):
            torch.cuda.synchronize()
            if self.count == WARM:
                self.begun = time.perf_counter()
            else:
                self.ms = (time.perf_counter() - self.begun) / (STEPS - 2 - WARM) * 1e3


def trainer(speed: bool) -> tuple[float, float, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock, model = Clock(), model_of()

    class Tick(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    options = TrainingArguments(
        "/tmp/trainer",
        per_device_train_batch_size=32,
        max_steps=STEPS,
        bf16=True,
        logging_steps=50,
        save_strategy="no",
        dataloader_num_workers=4,
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
    )
    training = Trainer(model, options, train_dataset=Data(), callbacks=[Tick()])
    training.create_optimizer_and_scheduler(STEPS)
    handle = hr.speed_up(model, training.optimizer) if speed else None
    result = training.train()
    return clock.ms, result.training_loss, handle


def lightning(speed: bool) -> tuple[float, float, Any]:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock, handles = Clock(), []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: Any, at: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, fused=True)
            if speed:
                handles.append(hr.speed_up(self.model, optimizer))
            return optimizer

        def on_train_batch_end(self, *args: Any) -> None:
            clock.tick()

    loader = torch.utils.data.DataLoader(Data(), 32, num_workers=4, pin_memory=True)
    training = lightning.Trainer(
        max_steps=STEPS,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training.fit(Module(), loader)
    return clock.ms, float(training.callback_metrics["loss"]), handles[0] if handles else None


def accelerate(speed: bool) -> tuple[float, float, Any]:
    from accelerate import Accelerator

    clock, accelerator, model = Clock(), Accelerator(mixed_precision="bf16"), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    handle = hr.speed_up(model, optimizer) if speed else None
    loader: Any = torch.utils.data.DataLoader(Data(), 32, num_workers=4, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    total = torch.zeros((), device="cuda")
    for batch in loader:
        loss = model(**batch).loss
        total += loss.detach().float()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return clock.ms, float(total) / STEPS, handle


def main() -> None:
    for name in sys.argv[1:] or ("trainer", "lightning", "accelerate"):
        for speed in (False, True, False, True):
            try:
                ms, loss, handle = globals()[name](speed)
            except Exception as problem:
                print(
                    f"{name:11} failed: {type(problem).__name__}: {str(problem)[:250]}", flush=True
                )
                continue
            way = "sped up" if speed else "alone"
            print(f"{name:11} {way:8} {ms:7.2f} ms a step, loss {loss:.6f}", flush=True)
            if handle is not None:
                print("    " + str(handle.report()).replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    main()
