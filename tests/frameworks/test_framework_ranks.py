"""Two gloo ranks that train with Accelerate, then with the Hugging Face Trainer, alone and sped up.

DistributedDataParallel averages gradients by hooks, so the model stays eager, and says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameworks.training import needs
from support.processes.forked import Forked

needs("accelerate")
needs("transformers")

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
import headrace as hr
from support.torchvision_ops import define_missing
define_missing()
from accelerate import Accelerator
from headrace.fake import fake_cuda
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

def shown(net, handle):
    whys = [] if handle is None else [str(one.why) for one in handle.report().parts]
    return [float(p.detach().double().sum()) for p in net.parameters()], whys

def with_accelerate(is_sped_up):
    accelerator, net = Accelerator(), Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, 2))
    handle = hr.speed_up(model, optimizer, loader=loader) if is_sped_up else None
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return shown(net, handle)

def with_trainer(is_sped_up):
    net = Net()
    settings = TrainingArguments(
        sys.argv[2], per_device_train_batch_size=2, max_steps=12, logging_steps=4,
        save_strategy="no", report_to="none", disable_tqdm=True, optim="adamw_torch_fused",
    )
    trainer = Trainer(net, settings, train_dataset=data)
    handle = hr.transformers.speed_up(trainer) if is_sped_up else None
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return *shown(net, handle), losses

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], world_size=2,
                        rank=int(os.environ["RANK"]))
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(1)
data = [{"x": torch.randn(4, generator=draw), "labels": at % 3} for at in range(48)]
with fake_cuda():
    found = [[train(False), train(True)] for train in (with_accelerate, with_trainer)]
print("found", json.dumps(found))
dist.destroy_process_group()
"""


def test_ranks_train_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(Forked(SCRIPT, tmp_path / "store", tmp_path / "out"))
    try:
        assert [one.wait(100) for one in ranks] == [0, 0], ranks[0].stderr.read_text("utf-8")
    finally:
        for one in ranks:
            one.kill()
    for one in ranks:
        (line,) = (line for line in one.stdout.read_text("utf-8").splitlines() if "found" in line)
        accelerate, trainer = json.loads(line.removeprefix("found"))
        for alone, sped_up in (accelerate, trainer):
            assert sped_up[0] == alone[0]
            assert sped_up[2:] == alone[2:]
            assert "DDP" in sped_up[1][0]
