"""Training programs as people write them, by hand and on the engine: the same losses, and how fast.

    python benchmarks/measurements/other_programs.py --out result.json

lstm    the word_language_model of PyTorch's examples: two LSTM layers, truncated backpropagation
        through time, its state carried in three ways
dcgan   the DCGAN of PyTorch's examples: two models, two optimizers, through `Engine.from_step`

"by hand" is the loop of the example, with batches prefetched from pinned memory and the losses read
every tenth step. Losses are compared with deterministic kernels; times are measured with the usual
ones, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, interleaved_ms, save, table
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import headrace as hr
from headrace.device import Device, deterministic_kernels, open_device

ROOT = Path(__file__).resolve().parents[2]
READ_EVERY = 10
WORDS, WIDTH, LENGTH, ROWS = 10_000, 650, 35, 20


# --- a language model -----------------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        hidden, state = self.lstm(self.dropout(self.embedding(ids)), state)
        return self.out(self.dropout(hidden)), state


def text(count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (count, LENGTH + 1, ROWS), generator=draw)
    return [(one[:-1].contiguous().pin_memory(), one[1:].flatten().pin_memory()) for one in ids]


def zero_state(device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(2, ROWS, WIDTH, device=device) for _ in range(2)]


def fresh_each_batch(device: torch.device) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0])[0].flatten(0, 1), batch[1])

    return loss


def carried_in_a_closure(device: torch.device) -> Any:
    carried: dict[str, Any] = {"state": tuple(zero_state(device))}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, state = model(batch[0], carried["state"])
        carried["state"] = tuple(part.detach() for part in state)
        return cross_entropy(out.flatten(0, 1), batch[1])

    return loss


def carried_in_place(device: torch.device) -> Any:
    carried = zero_state(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, state = model(batch[0], tuple(part.clone() for part in carried))
        for kept, part in zip(carried, state, strict=True):
            kept.copy_(part.detach())
        return cross_entropy(out.flatten(0, 1), batch[1])

    return loss


STATES = {
    "fresh each batch": fresh_each_batch,
    "carried in a closure": carried_in_a_closure,
    "carried in place": carried_in_place,
}


def language_model(device: Device, make_loss: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = LanguageModel().to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    loss = make_loss(device.torch_device)
    torch.manual_seed(2)
    return model, optimizer, loss


def lstm_by_hand(device: Device, make_loss: Any) -> Callable[[list[Any]], list[float]]:
    model, optimizer, loss = language_model(device, make_loss)

    def train(batches: list[Any]) -> list[float]:
        kept = []
        for batch in batches:
            batch = tuple(part.to(device.torch_device, non_blocking=True) for part in batch)
            value = loss(model, batch)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
            kept.append(value.detach())
        return torch.stack(kept).tolist()

    return train


def lstm_on_the_engine(device: Device, make_loss: Any, plan: str) -> hr.Engine:
    model, optimizer, loss = language_model(device, make_loss)
    return hr.Engine(model, optimizer, loss, plan=plan, device=device, clip_norm=0.25)


def lstm(device: Device, make_loss: Any, steps: int, repeats: int) -> dict[str, Any]:
    batches = text(12)
    rows: dict[str, Any] = {}
    with deterministic_kernels(True):
        expected = lstm_by_hand(device, make_loss)(batches)
        for plan in ("pipeline", "graph"):
            engine = lstm_on_the_engine(device, make_loss, plan)
            rows[plan] = {"same losses": list(engine.epoch(batches).losses) == expected}
            report = engine.graphs
            if report is not None:
                why = (report.why or "").replace(f"{ROOT}/", "")
                rows[plan] |= {"replays": report.replays, "why": why}
            engine.close()
    ways = {"by hand": many(lstm_by_hand(device, make_loss), batches)}
    for plan in ("pipeline", "graph"):
        engine = lstm_on_the_engine(device, make_loss, plan)
        ways[plan] = many(engine.epoch, batches)
    times = interleaved_ms(ways, device, steps=steps, repeats=repeats)
    for way, time in times.items():
        rows.setdefault(way, {}).update(time)
    return rows


# --- two models -----------------------------------------------------------------------------------


def generator() -> nn.Module:
    sizes = [(100, 512, 1, 0), (512, 256, 2, 1), (256, 128, 2, 1), (128, 64, 2, 1)]
    parts: list[nn.Module] = []
    for into, out, stride, padding in sizes:
        parts += [nn.ConvTranspose2d(into, out, 4, stride, padding, bias=False)]
        parts += [nn.BatchNorm2d(out), nn.ReLU(True)]
    return nn.Sequential(*parts, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for into, out in [(64, 128), (128, 256), (256, 512)]:
        parts += [nn.Conv2d(into, out, 4, 2, 1, bias=False)]
        parts += [nn.BatchNorm2d(out), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*parts, nn.Conv2d(512, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def images(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(128, 3, 64, 64, generator=draw).pin_memory() for _ in range(count)]


def gan_step(device: Device) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    where = device.torch_device
    g, d = generator().to(where), discriminator().to(where)
    options: dict[str, Any] = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True}
    g_optimizer = torch.optim.Adam(g.parameters(), **options)
    d_optimizer = torch.optim.Adam(d.parameters(), **options)

    def step(real: torch.Tensor) -> dict[str, torch.Tensor]:
        ones = torch.ones(real.size(0), device=real.device)
        d_optimizer.zero_grad()
        on_real = binary_cross_entropy_with_logits(d(real), ones)
        on_real.backward()
        fake = g(torch.randn(real.size(0), 100, 1, 1, device=real.device))
        on_fake = binary_cross_entropy_with_logits(d(fake.detach()), torch.zeros_like(ones))
        on_fake.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = binary_cross_entropy_with_logits(d(fake), ones)
        g_loss.backward()
        g_optimizer.step()
        return {"loss": (on_real + on_fake).detach(), "g_loss": g_loss.detach()}

    torch.manual_seed(2)
    return step


def gan_by_hand(device: Device) -> Callable[[list[Any]], list[float]]:
    step = gan_step(device)

    def train(batches: list[Any]) -> list[float]:
        kept = []
        for index, batch in enumerate(batches):
            values = step(batch.to(device.torch_device, non_blocking=True))
            kept.append(values["loss"])
            if index % READ_EVERY == 0:
                values["loss"].item()
        return torch.stack(kept).tolist()

    return train


def dcgan(device: Device, steps: int, repeats: int) -> dict[str, Any]:
    batches = images(12)
    rows: dict[str, Any] = {}
    with deterministic_kernels(True):
        expected = gan_by_hand(device)(batches)
        for plan in ("baseline", "pipeline", "graph"):
            engine = hr.Engine.from_step(gan_step(device), plan=plan, device=device)
            rows[plan] = {"same losses": list(engine.epoch(batches).losses) == expected}
    ways = {"by hand": many(gan_by_hand(device), batches)}
    for plan in ("baseline", "pipeline", "graph"):
        engine = hr.Engine.from_step(gan_step(device), plan=plan, device=device)
        ways[plan] = many(engine.epoch, batches)
    ways["by hand, again"] = many(gan_by_hand(device), batches)
    with benchmarked_convolutions():
        times = interleaved_ms(ways, device, steps=steps, repeats=repeats)
    for way, time in times.items():
        rows.setdefault(way, {}).update(time)
    return rows


# --- both -----------------------------------------------------------------------------------------


def many(train: Callable[[list[Any]], object], batches: list[Any]) -> Callable[[int], object]:
    """Train on that many batches, in one epoch."""
    return lambda steps: train(list(itertools.islice(itertools.cycle(batches), steps)))


@contextmanager
def benchmarked_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def show(name: str, rows: dict[str, Any]) -> None:
    by_hand = rows["by hand"]["ms"]
    for row in rows.values():
        if "ms" in row:
            row["× by hand"] = round(row["ms"] / by_hand, 3)
    shown = {
        way: {k: v for k, v in row.items() if k not in ("all", "cpu")} for way, row in rows.items()
    }
    print(name, table(shown), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=["lstm", "dcgan"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = open_device("cuda")
    found: dict[str, Any] = {}
    for name, make_loss in STATES.items() if options.only != "dcgan" else ():
        rows = lstm(device, make_loss, options.steps, options.repeats)
        found[f"lstm, state {name}"] = rows
        show(f"lstm, state {name}", rows)
    if options.only != "lstm":
        found["dcgan"] = dcgan(device, options.steps, options.repeats)
        show("dcgan", found["dcgan"])
    save(options.out, header("other_programs.py") | {"programs": found})


if __name__ == "__main__":
    main()
