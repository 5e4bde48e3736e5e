"""A language model with an LSTM whose state runs from batch to batch, and one line more."""

import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import headrace as hr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Language(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens, state):
        hidden, state = self.lstm(self.tokens(tokens), state)
        return self.head(hidden), state


def main(steps=200, width=256, layers=2, length=35, batch=20):
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=DEVICE)
    rows = len(text) // batch
    text = text[: rows * batch].view(batch, rows)
    model = Language(width, layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    hr.speed_up(model, optimizer)  # <- the one line

    state = tuple(torch.zeros(layers, batch, width, device=DEVICE) for _ in range(2))
    for step in range(steps):
        if step == steps // 2:
            start = time.perf_counter()
        at = step * length % (rows - length)
        piece = text[:, at : at + length + 1]
        state = tuple(part.detach() for part in state)
        logits, state = model(piece[:, :-1], state)
        loss = functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}  loss {loss.item():.4f}")
    return loss.item(), 1000 * (time.perf_counter() - start) / (steps - steps // 2)


if __name__ == "__main__":
    print(f"{main()[1]:.2f} ms per step")
