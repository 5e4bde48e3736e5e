"""Loops with `hr.speed_up` against the same loops without: equal to the bit, and how fast.

    python benchmarks/measurements/parts_first.py --out parts_first.json

Each case is a training loop. It runs plain, sped up, and plain again, with the same seeds. The line
says whether losses, the last gradients and all weights are those of the plain loop, bit for bit;
whether two plain runs are equal; ms a step, plain and sped up, measured in turns; and the report.
`--device fake` runs small versions on the fake device.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headrace as hr
from headrace.device import Device, open_device


@dataclass
class Loop:
    """One training: what it has computed, and its step."""

    device: Device
    small: bool
    step: Callable[[int], torch.Tensor] = lambda at: torch.empty(0)
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def where(self) -> torch.device:
        return self.device.torch_device

    def width(self, wide: int) -> int:
        return min(wide, 8) if self.small else wide

    def note_gradients(self) -> None:
        """Call before `zero_grad`: keeps copies of all gradients."""
        parameters = [p for model in self.models for p in model.parameters()]
        self.gradients = [None if p.grad is None else p.grad.clone() for p in parameters]

    def autocast(self, dtype: torch.dtype) -> Any:
        return torch.autocast(self.where.type, dtype)

    def random(self, *shape: int) -> list[torch.Tensor]:
        """Eight batches."""
        source = torch.Generator().manual_seed(1)
        return [torch.randn(*shape, generator=source).to(self.where) for _ in range(8)]


def mlp(*sizes: int, dropout: float = 0.1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.LayerNorm(other), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-3])


def keeps_loss_and_outputs(loop: Loop) -> None:
    """`loss` and `outputs` of the last step live on, as at the top level of a script."""
    width, batches = loop.width(512), loop.random(32, loop.width(512))
    model = mlp(*[width] * 12).to(loop.where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loop.models, loop.optimizers, kept = [model], [optimizer], {}

    def step(at: int) -> torch.Tensor:
        outputs = model(batches[at % 8])
        loss = (outputs - batches[at % 8]).square().mean()
        kept.update(outputs=outputs, loss=loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loop.note_gradients()
        optimizer.zero_grad()
        return loss

    loop.step = step


def two_calls_one_backward(loop: Loop) -> None:
    """A GAN: the discriminator sees real and generated batches, then one backward."""
    width, batches = loop.width(256), loop.random(64, loop.width(256))
    generator = mlp(*[width] * 6).to(loop.where)
    critic = mlp(*[width] * 6, 1).to(loop.where)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, fused=True)
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, fused=True)
    loop.models, loop.optimizers = [generator, critic], [g_optimizer, d_optimizer]
    softplus = nn.functional.softplus

    def step(at: int) -> torch.Tensor:
        real = batches[at % 8]
        fake = generator(torch.randn_like(real))
        d_loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = softplus(-critic(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        loop.note_gradients()
        return d_loss + g_loss

    loop.step = step


def two_shapes(loop: Loop) -> None:
    """Two batch shapes in turns, with SGD and momentum."""
    width = loop.width(512)
    batches = [batch for pair in zip(loop.random(32, width), loop.random(24, width), strict=True)
               for batch in pair]  # fmt: skip
    model = mlp(*[width] * 12).to(loop.where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
    loop.models, loop.optimizers = [model], [optimizer]

    def step(at: int) -> torch.Tensor:
        loss = model(batches[at % 16]).square().mean()
        loss.backward()
        optimizer.step()
        loop.note_gradients()
        optimizer.zero_grad()
        return loss

    loop.step = step


def validation_between(loop: Loop) -> None:
    """A validation between a forward and its backward, and another model's step."""
    width, batches = loop.width(512), loop.random(32, loop.width(512))
    model, other = mlp(*[width] * 8).to(loop.where), mlp(*[width] * 8).to(loop.where)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], 1e-3, fused=True)
    loop.models, loop.optimizers = [model, other], [optimizer]

    def step(at: int) -> torch.Tensor:
        batch = batches[at % 8]
        loss = model(batch).square().mean()
        with torch.no_grad():
            model.eval()
            checked = model(batches[(at + 1) % 8]).square().mean()
            model.train()
        second = other(batch).square().mean()
        second.backward()
        loss.backward()
        optimizer.step()
        loop.note_gradients()
        optimizer.zero_grad()
        return loss + second + checked

    loop.step = step


def fp16_scaler(loop: Loop) -> None:
    """fp16 with a gradient scaler, unscaling, clipping and fused Adam; some steps overflow."""
    width, batches = loop.width(512), loop.random(32, loop.width(512))
    model = mlp(*[width] * 12).to(loop.where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(loop.where.type, init_scale=2.0**18, growth_interval=5)
    loop.models, loop.optimizers = [model], [optimizer]

    def step(at: int) -> torch.Tensor:
        with loop.autocast(torch.float16):
            loss = (model(batches[at % 8]) - batches[at % 8]).square().mean()
        scaler.scale(loss).backward()
        if at % 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        loop.note_gradients()
        optimizer.zero_grad()
        return loss

    loop.step = step


def wgan_gp(loop: Loop) -> None:
    """A gradient penalty: the critic's gradients are differentiated again."""
    width, batches = loop.width(256), loop.random(64, loop.width(256))
    generator = mlp(*[width] * 6).to(loop.where)
    critic = mlp(*[width] * 6, 1, dropout=0.0).to(loop.where)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, fused=True)
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, fused=True)
    loop.models, loop.optimizers = [generator, critic], [g_optimizer, d_optimizer]

    def step(at: int) -> torch.Tensor:
        real = batches[at % 8]
        fake = generator(torch.randn_like(real))
        mixed = (real + fake.detach()).mul(0.5).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        d_loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = -critic(fake).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        loop.note_gradients()
        return d_loss + g_loss

    loop.step = step


class TiedWeights(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = mlp(*[width] * 6)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(self.embedding(words))
        return {"logits": self.out(hidden), "hidden": hidden}


def accumulation(loop: Loop) -> None:
    """Three batches an update, with tied weights and a step-wise changing weight decay."""
    source, words = torch.Generator().manual_seed(1), 64 if loop.small else 4096
    batches = [torch.randint(0, words, (16, 32), generator=source).to(loop.where) for _ in range(8)]
    model = TiedWeights(words, loop.width(256)).to(loop.where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loop.models, loop.optimizers = [model], [optimizer]

    def step(at: int) -> torch.Tensor:
        total = torch.zeros((), device=loop.where)
        for part in range(3):
            batch = batches[(at + part) % 8]
            logits = model(batch)["logits"]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()) / 3
            loss.backward()
            total += loss.detach()
        if at == 20:
            optimizer.param_groups[0]["weight_decay"] = 0.05
        optimizer.step()
        loop.note_gradients()
        optimizer.zero_grad()
        return total

    loop.step = step


class Encoder(nn.Module):
    def __init__(self, words: int, width: int, layers: int, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.embedding, self.checkpoint = nn.Embedding(words, width), checkpoint
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            if self.checkpoint:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return self.out(hidden)


def transformer(loop: Loop, *, checkpoint: bool = False) -> None:
    """bf16 autocast, dropout and clipping."""
    source, words = torch.Generator().manual_seed(1), 64 if loop.small else 8000
    layers = 2 if loop.small else 12
    batches = [torch.randint(0, words, (16, 64), generator=source).to(loop.where) for _ in range(8)]
    model = Encoder(words, loop.width(384), layers, checkpoint=checkpoint).to(loop.where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loop.models, loop.optimizers = [model], [optimizer]

    def step(at: int) -> torch.Tensor:
        with loop.autocast(torch.bfloat16):
            logits = model(batches[at % 8])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batches[at % 8].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loop.note_gradients()
        optimizer.zero_grad()
        return loss

    loop.step = step


def checkpointing(loop: Loop) -> None:
    """Activation checkpointing inside the model, with dropout."""
    transformer(loop, checkpoint=True)


def looks_at_the_graph(loop: Loop) -> None:
    """`autograd.grad` over the parameters, `backward(inputs=…)`, and two backwards of one graph."""
    width, batches = loop.width(256), loop.random(32, loop.width(256))
    model = mlp(*[width] * 6).to(loop.where)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    loop.models, loop.optimizers = [model], [optimizer]

    def step(at: int) -> torch.Tensor:
        loss = model(batches[at % 8]).square().mean()
        if at % 3 == 0:
            for parameter, one in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = one
        elif at % 3 == 1:
            loss.backward(inputs=parameters[2:])
        else:
            loss.backward(retain_graph=True)
            loss.backward()
        optimizer.step()
        loop.note_gradients()
        optimizer.zero_grad()
        return loss

    loop.step = step


CASES = (
    keeps_loss_and_outputs,
    two_calls_one_backward,
    two_shapes,
    validation_between,
    fp16_scaler,
    wgan_gp,
    accumulation,
    transformer,
    checkpointing,
    looks_at_the_graph,
)


@dataclass
class Outcome:
    losses: list[float]
    tensors: list[torch.Tensor | None]
    ms: float
    report: str = ""
    failed: str | None = None


def train(case: Callable[[Loop], None], device: Device, *, sped_up: bool, steps: int,
          small: bool) -> Outcome:  # fmt: skip
    torch.manual_seed(0)
    loop = Loop(device, small)
    case(loop)
    scope: Any = contextlib.nullcontext()
    if sped_up:
        scope = hr.speed_up(*loop.models, *loop.optimizers, plan="graph", device=device)
    losses, times = [], []
    with scope as handle:
        for at in range(steps):
            if at == steps // 2 or (at > steps // 2 and at % 10 == 0):
                device.synchronize("benchmark")
                times.append((time.perf_counter(), at))
            losses.append(loop.step(at).detach().clone())
        device.synchronize("benchmark")
        times.append((time.perf_counter(), steps))
        report = str(handle.report()) if handle is not None else ""
    each = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(times)]
    weights = [one.detach().clone() for model in loop.models
               for one in (*model.parameters(), *model.buffers())]  # fmt: skip
    numbers = [float(one) for one in losses]
    return Outcome(numbers, [*loop.gradients, *weights], statistics.median(each) * 1e3, report)


def same(one: Outcome, other: Outcome) -> str:
    """How two trainings differ, in words; "equal" if not at all."""
    first = next(
        (at for at, pair in enumerate(zip(one.losses, other.losses, strict=True))
         if repr(pair[0]) != repr(pair[1])), None)  # fmt: skip
    if first is not None:
        return f"losses differ from step {first}: {one.losses[first]} and {other.losses[first]}"
    for a, b in zip(one.tensors, other.tensors, strict=True):
        if (a is None) != (b is None) or (a is not None and not _identical(a, b)):
            return "gradients or weights differ"
    return "equal"


def _identical(one: torch.Tensor, other: Any) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def measure(
    case: Callable[[Loop], None], device: Device, steps: int, small: bool
) -> dict[str, Any]:
    runs: dict[bool, list[Outcome]] = {False: [], True: []}
    problem = None
    for sped_up in (False, True, False, True):
        try:
            runs[sped_up].append(train(case, device, sped_up=sped_up, steps=steps, small=small))
        except Exception as error:
            problem = f"{'sped up' if sped_up else 'plain'}: {type(error).__name__}: {error}"
            break
    found: dict[str, Any] = {"case": case.__name__, "failed": problem}
    if problem is None:
        plain, sped = runs[False], runs[True]
        found |= {
            "equal": [same(one, plain[0]) for one in sped],
            "plain_equal": same(plain[1], plain[0]),
            "plain_ms": [one.ms for one in plain],
            "sped_up_ms": [one.ms for one in sped],
            "report": sped[-1].report,
        }
    return found


def line(found: dict[str, Any]) -> str:
    if found["failed"]:
        return f"{found['case']:24} FAILED {found['failed']}"
    plain, sped = (" ".join(f"{one:.2f}" for one in found[k]) for k in ("plain_ms", "sped_up_ms"))
    equal = "; ".join(dict.fromkeys(found["equal"]))
    head = f"{found['case']:24} plain {plain} ms, sped up {sped} ms; {equal}"
    if found["plain_equal"] != "equal":
        head += f" (two plain runs: {found['plain_equal']})"
    return head + "".join(f"\n    {one}" for one in found["report"].splitlines())


@contextlib.contextmanager
def opened(name: str) -> Iterator[Device]:
    if name == "fake":
        from headrace.fake import FakeDevice

        with FakeDevice(keep_timeline=False) as device:
            yield device
    else:
        yield open_device(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="which cases [default: all]")
    parser.add_argument("--device", default="auto", help="cuda, fake, … [default: auto]")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run [default: 60]")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    results = []
    for case in CASES:
        if options.cases and case.__name__ not in options.cases:
            continue
        with opened(options.device) as device:
            results.append(measure(case, device, options.steps, options.device == "fake"))
        print(line(results[-1]), flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"torch": torch.__version__, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
