"""A ResNet of timm's on random images, with the loop of timm's own training script, shortened."""

from __future__ import annotations

import time

import torch
from timm import create_model
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, NativeScaler
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = create_model("resnet18", num_classes=10).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=90, t_in_epochs=False)
    scaler = NativeScaler()
    mixup = Mixup(mixup_alpha=0.2, num_classes=10)
    loss_function = SoftTargetCrossEntropy()
    images = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(0, 10, (1024,)))
    loader = DataLoader(images, batch_size=32, shuffle=True, num_workers=2, pin_memory=True)
    losses, times, updates = AverageMeter(), AverageMeter(), 0
    model.train()
    for epoch in range(3):
        end = time.time()
        for x, target in loader:
            x, target = x.to(device), target.to(device)
            x, target = mixup(x, target)
            with torch.autocast(device.type, enabled=device.type == "cuda"):
                loss = loss_function(model(x), target)
            optimizer.zero_grad()
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            updates += 1
            losses.update(loss.item(), x.size(0))
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.update(time.time() - end)
            if updates % 50 == 0:
                print(f"epoch {epoch} update {updates} loss {losses.avg:.3f} {times.avg:.3f} s")
            scheduler.step_update(updates)
            end = time.time()


if __name__ == "__main__":
    main()
