"""A small Transformer on random tokens with Accelerate, as its examples are written."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WORDS = 1000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.output = nn.Linear(128, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.output(self.encoder(self.embedding(words)))


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    words = torch.randint(0, WORDS, (2048, 32))
    loader = DataLoader(TensorDataset(words, words), batch_size=16, shuffle=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 1000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    total = 0.0
    for _ in range(2):
        for step, (source, target) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = cross_entropy(model(source).flatten(0, 1), target.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item()
            if step % 10 == 0:
                accelerator.print(f"step {step}: {total / (step + 1):.3f}")


if __name__ == "__main__":
    main()
