"""The trainer with packed and with padded batches, in turns: target tokens per second, and why.

    python benchmarks/measurements/packed.py --data FOLDER [--corpus multi30k|long] [--out FILE]

FOLDER holds `multi30k` (train and val, .en.gz and .de.gz). `multi30k` trains on four numbered
copies of it, `long` on paragraphs of five of its sentences. Both ways train Transformer base under
`max` in one process, with all that `headrace train` does but validation: clipping, schedule,
metrics, checkpoints. They take turns of some epochs each. Rates are of real target tokens, padding
not counted, as the epoch lines of `metrics.jsonl` have them. Then the profiler looks at some steps:
milliseconds per step by kind of kernel, and how long the GPU is busy.

With an empty compiler cache it takes some six minutes on an H200, of which padded batches take
four (`--beside` without a value leaves them out). A small model on a CPU, beside a plain loop:

    python benchmarks/measurements/packed.py --data FOLDER --device cpu --quick \\
        --beside padded plain "plain compiled"

A CPU has no flex_attention: there, packed batches compute attention over all pairs of tokens.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from ast import literal_eval
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.nn.attention.flex_attention as flex

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table
from torch.nn import functional

from headrace.checkpoint import CheckpointWriter
from headrace.device import Timeline
from headrace.lifecycle import MetricsLog, RunFolder, StopRequests, read_metrics
from headrace.machine import BusyWindow
from headrace.parallel import SINGLE
from headrace.translation import ModelSettings, Prepared, TrainSettings, attention, prepared_for
from headrace.translation.build import RunParts, build_run
from headrace.translation.model import sinusoids
from headrace.translation.observers import (
    EpochGauges,
    RunObservers,
    new_monitor,
    new_progress,
    new_watchdog,
)
from headrace.translation.run_checkpoints import Checkpoints, EpochLoss
from headrace.translation.training_loop import TrainingLoop
from headrace.translation.validation import Validation
from headrace.translation.weights import WeightFiles
from translation import first_pairs, four, paragraphs

#: The settings of both ways. Padded batches of 29,500 tokens have some 26,000 real ones.
BASE: dict[str, Any] = {
    "src": "en", "trg": "de", "preset": "base", "vocabulary": 32_000, "plan": "max",
    "monitor": False, "tensorboard": True, "valid_sentences": 0, "samples": 0, "hang_after": 0,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"packed": "on", "tokens": 27_136},
    "padded": {"packed": "off", "tokens": 29_500, "shapes": 12},
}
BLOCK = attention.BLOCK
QUICK = {"preset": "tiny", "layers": 1, "vocabulary": 400, "plan": "pipeline", "tokens": 600}
SHARES = {"data wait %": "data_wait_share", "blocked %": "host_blocked_share"}
#: The first that matches. The names of fused kernels have many words.
KINDS = {
    "attention": r"flex_attention|tem_fused|fmha|flash|attention",
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitKreduce",
    "layer norm backward": r"layer_norm_backward",
    "layer norm": r"layer_norm",
    "loss": r"softmax|logsumexp",
    "embedding": r"embedding|index_put|sort|Radix",
    "dropout and ReLU": r"dropout|relu|threshold|bernoulli|philox",
    "optimizer and clipping": r"multi_tensor|adam|foreach|norm",
    "copies": r"Memcpy|Memset|_to_copy|copy_kernel",
}


class _WithoutValidation(TrainingLoop):
    """The trainer's loop. Validation would be compiled too, and is not what is measured."""

    def _validate(self) -> Validation:
        return Validation({"valid_loss": 0.0, "valid_nll": 0.0, "bleu": 0.0}, (), 0.0)


class PlainWay:
    """A loop as tutorials have it, with `nn.Transformer` and the batches of the padded way: copy,
    forward, backward, clip, step, and read the loss."""

    def __init__(self, name: str, padded: RunParts) -> None:
        self.name, self.parts, self.device = name, padded, padded.device
        self._on, self._epochs = padded.device.torch_device, 0
        self._bf16 = padded.plan.precision == "bf16"
        torch.manual_seed(0)
        settings = padded.model.settings
        self._model = _NnTransformer(settings, *map(len, padded.data.vocabularies))
        self._model.to(self._on)
        self._call = torch.compile(self._model) if name == "plain compiled" else self._model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=7e-4, betas=(0.9, 0.98))
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / 2000, (2000 / (step + 1)) ** 0.5)
        )

    def train(self, epochs: int) -> list[dict[str, Any]]:
        loader, lines = self.parts.loader, []
        for _ in range(epochs):
            loader.sampler.set_epoch(self._epochs)
            loader.sampler.start_at(0)
            self.device.synchronize("bench")
            begun, tokens = time.perf_counter(), 0
            for src, trg in loader:
                tokens += int(trg[:, 1:].ne(0).sum())
                self._step(src.to(self._on), trg.to(self._on))
            self.device.synchronize("bench")
            self._epochs += 1
            lines.append({"tokens_per_s": tokens / (time.perf_counter() - begun)})
        return lines

    def _step(self, src: torch.Tensor, trg: torch.Tensor) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._on.type, torch.bfloat16, enabled=self._bf16):
            logits = self._call(src, trg[:, :-1])
            loss = functional.cross_entropy(
                logits.flatten(0, 1), trg[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._scheduler.step()
        return loss.item()


class _NnTransformer(torch.nn.Module):
    """The trainer's model, made of PyTorch's modules."""

    def __init__(self, size: ModelSettings, src_vocabulary: int, trg_vocabulary: int) -> None:
        super().__init__()
        self.scale = size.width**0.5
        self.src = torch.nn.Embedding(src_vocabulary, size.width, padding_idx=0)
        self.trg = torch.nn.Embedding(trg_vocabulary, size.width, padding_idx=0)
        self.register_buffer("positions", sinusoids(size.max_length, size.width))
        self.transformer = torch.nn.Transformer(
            size.width, size.heads, size.encoder_layers, size.decoder_layers, size.inner,
            size.dropout, batch_first=True, norm_first=True,
        )  # fmt: skip
        self.output = torch.nn.Linear(size.width, trg_vocabulary, bias=False)
        self.output.weight = self.trg.weight
        torch.nn.init.normal_(self.src.weight, std=size.width**-0.5)
        torch.nn.init.normal_(self.trg.weight, std=size.width**-0.5)

    def forward(self, src: torch.Tensor, trg: torch.Tensor) -> torch.Tensor:
        x = self.src(src) * self.scale + self.positions[: src.size(1)]
        y = self.trg(trg) * self.scale + self.positions[: trg.size(1)]
        future = torch.nn.Transformer.generate_square_subsequent_mask(
            trg.size(1), device=trg.device, dtype=torch.float32
        )
        padding = torch.zeros(src.shape, device=src.device).masked_fill(src.eq(0), -torch.inf)
        states = self.transformer(
            x, y, tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        return self.output(states)


class Way:
    """A training run that can train one epoch at a time."""

    def __init__(
        self, name: str, settings: TrainSettings, data: Prepared, runs: Path, stack: ExitStack
    ) -> None:
        self.name, folder = name, RunFolder.create(runs, name)
        self.parts = parts = build_run(settings, data)
        self.device = device = parts.device
        self._metrics_file, gauges, losses = folder.metrics, EpochGauges(), EpochLoss()
        progress = stack.enter_context(new_progress(settings, SINGLE, True, gauges, None))
        metrics = stack.enter_context(MetricsLog(folder.metrics, folder.events))
        writer = stack.enter_context(CheckpointWriter(device, folder.state, 2))
        watchdog = stack.enter_context(new_watchdog(settings, SINGLE, folder, device))
        monitor = stack.enter_context(new_monitor(settings, SINGLE, folder, metrics, parts.engine))
        weight_files = WeightFiles(folder.weights, parts.model, device, SINGLE, 0)
        self._loop = _WithoutValidation(
            parts,
            Checkpoints(parts, folder, writer, weight_files, losses),
            weight_files,
            losses,
            RunObservers(device, progress, gauges, metrics, watchdog, monitor),
            stack.enter_context(StopRequests()),
        )

    def train(self, epochs: int) -> list[dict[str, Any]]:
        """Train some epochs. Returns their lines in `metrics.jsonl`."""
        for _ in range(epochs):
            if self._loop._epoch(0) is not None:
                raise SystemExit("stopped by a signal")
        self.device.synchronize("bench")
        lines = [line for line in read_metrics(self._metrics_file) if line["kind"] == "epoch"]
        return lines[-epochs:]

    def trace(self, steps: int) -> tuple[Timeline | None, BusyWindow | None]:
        engine, loader = self.parts.engine, self.parts.loader
        loader.sampler.set_epoch(engine.epochs)
        with self.device.trace() as trace:
            for _ in engine.steps(loader, max_steps=steps):
                pass
        return trace.timeline, BusyWindow.of(trace, steps)


def gaps(timeline: Timeline, steps: int) -> dict[str, Any]:
    """How long the GPU does nothing between the first kernel and the last, and in which pauses."""
    spans = [span for span in timeline.spans if span.kind in ("kernel", "copy")]
    until, found = spans[0].end_ns, []
    for span in spans:
        if span.start_ns > until:
            found.append((span.start_ns - until) / 1e6)
        until = max(until, span.end_ns)
    longest = sorted(found, reverse=True)
    return {
        "idle ms per step": round(sum(found) / steps, 3),
        "of it in pauses over 0.1 ms": round(sum(ms for ms in found if ms > 0.1) / steps, 3),
        "longest pauses, ms": [round(ms, 2) for ms in longest[:8]],
    }


def by_kind(timeline: Timeline, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per step by kind of kernel, and of the slowest kernels by name."""
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for lane in timeline.lanes():
        for span in timeline.on(lane):
            found = (kind for kind, names_of in KINDS.items() if re.search(names_of, span.name))
            kinds[next(found, "other")] += span.duration_ms / steps
            names[span.name[:120]] += span.duration_ms / steps
    slowest = sorted(names, key=lambda name: -names[name])[:16]
    return dict(kinds), {name: round(names[name], 3) for name in slowest}


def rate(lines: list[dict[str, Any]], way: Way | PlainWay) -> dict[str, Any]:
    rates = [line["tokens_per_s"] for line in lines]
    batches = way.parts.loader.sampler.batches
    train = way.parts.data.splits["train"]
    tokens = (train.tokens[1] - len(train)) / len(batches)
    median = statistics.median(rates)
    return {
        "target tokens/s": round(median),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
        "ms per step": round(1e3 * tokens / median, 2),
        "tokens per step": round(tokens),
        **{
            name: round(100 * statistics.median(line[share] for line in lines), 2)
            for name, share in SHARES.items()
            if share in lines[0]
        },
    }


def measure(corpus: Path, cache: Path, runs: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    common, quick = _settings(corpus, arguments), QUICK if arguments.quick else {}
    rows: dict[str, dict[str, Any]] = {}
    details: dict[str, Any] = {}
    with ExitStack() as stack:
        ways, lines = [], defaultdict(list)
        for name, choice in WAYS.items():
            if name not in ("packed", *arguments.beside):
                continue
            settings = TrainSettings.from_dict(common | choice | quick)
            data = prepared_for(settings, cache)
            before, begun = _allocated(ways), time.perf_counter()
            way = Way(name, settings, data, runs, stack)
            first = way.train(arguments.warm_up)
            ways.append(way)
            report, graphs = way.parts.engine.compiled, way.parts.engine.graphs
            details[name] = {
                "batches": str(way.parts.loader.sampler.batches),
                "warm-up s": round(time.perf_counter() - begun, 1),
                "peak MB": round((max(x["peak_memory_bytes"] for x in first) - before) / 1e6),
                "compiled": None if report is None else asdict(report),
                "graphs": None if graphs is None else asdict(graphs),
            }
            print(name, details[name], flush=True)
        if "padded" in arguments.beside:
            padded = ways[-1].parts
        else:
            padded = build_run(TrainSettings.from_dict(common | WAYS["padded"] | quick), data)
            stack.callback(padded.engine.close)
        plain = [PlainWay(name, padded) for name in arguments.beside if name != "padded"]
        for way in plain:
            way.train(arguments.warm_up)
        print("all ways are warmed up", flush=True)
        if arguments.pause:
            signal.raise_signal(signal.SIGSTOP)
        for _ in range(arguments.turns):
            for way in (*ways, *plain):
                lines[way.name] += way.train(arguments.epochs)
        for way in plain:
            details[way.name] = {}
        for way in ways:
            rows[way.name] = rate(lines[way.name], way)
            rows[way.name]["peak MB"] = details[way.name]["peak MB"]
            timeline, window = way.trace(arguments.steps)
            if timeline is not None and window is not None:
                busy = window.busy_ms_per_step
                rows[way.name]["busy ms"] = round(busy, 2)
                rows[way.name]["busy %"] = round(100 * busy / rows[way.name]["ms per step"], 1)
                kinds, details[way.name]["slowest kernels"] = by_kind(timeline, arguments.steps)
                details[way.name]["kinds"] = {k: round(ms, 3) for k, ms in kinds.items()}
                details[way.name]["gaps"] = gaps(timeline, arguments.steps)
                print(way.name, details[way.name]["gaps"], flush=True)
            way.parts.engine.close()
        rows |= {way.name: rate(lines[way.name], way) for way in plain}
    packed_rate = rows["packed"]["target tokens/s"]
    for row in rows.values():
        row["packed is × faster"] = round(packed_rate / row["target tokens/s"], 2)
    for name, found in lines.items():
        details[name]["epochs"] = [round(line["tokens_per_s"]) for line in found]
    return {"rows": rows, "details": details}


def measure_settings(
    corpus: Path, cache: Path, runs: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Packed batches with other settings of the compiler, one after the other: of each, how long
    the GPU is busy."""
    rows: dict[str, dict[str, Any]] = {}
    details: dict[str, Any] = {}
    common = _settings(corpus, arguments) | WAYS["packed"] | (QUICK if arguments.quick else {})
    settings = TrainSettings.from_dict(common)
    data = prepared_for(settings, cache)
    for number, text in enumerate(["", *arguments.tries]):
        name, begun = text or "as usual", time.perf_counter()
        torch.compiler.reset()
        words = [one.split("=") for one in text.split(",") if one]
        choice = {key: literal_eval(value) for key, value in words}
        if missing := [key for key in choice if not _is_setting(key)]:
            print(f"{', '.join(missing)}: not in this PyTorch", flush=True)
            continue
        # The engine turns it off, unless this variable is set.
        os.environ.pop("TORCHINDUCTOR_MIX_ORDER_REDUCTION", None)
        if "triton.mix_order_reduction" in choice:
            os.environ["TORCHINDUCTOR_MIX_ORDER_REDUCTION"] = "1"
        with inductor.patch(choice), ExitStack() as stack:
            way = Way(f"try-{number}", settings, data, runs, stack)
            way.train(arguments.warm_up)
            lines = way.train(arguments.epochs)
            timeline, window = way.trace(arguments.steps)
            way.parts.engine.close()
        rows[name], details[name] = rate(lines, way), {}
        if timeline is not None and window is not None:
            rows[name]["busy ms"] = round(window.busy_ms_per_step, 2)
            kinds, details[name]["slowest kernels"] = by_kind(timeline, arguments.steps)
            details[name]["kinds"] = {kind: round(ms, 3) for kind, ms in kinds.items()}
            details[name]["gaps"] = gaps(timeline, arguments.steps)
        rows[name]["seconds"] = round(time.perf_counter() - begun, 1)
        print(name, rows[name], details[name], flush=True)
        del way
    return {"rows": rows, "details": details}


def _is_setting(key: str) -> bool:
    try:
        attrgetter(key)(inductor)
    except AttributeError:
        return False
    return True


def _settings(corpus: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    longest = 320 if arguments.corpus == "long" else 60
    size = {"layers": arguments.layers, "device": arguments.device}
    return BASE | size | {"data": str(corpus), "max_length": longest}


def _allocated(ways: list[Way]) -> int:
    """Bytes that the ways before this one hold."""
    return ways[0].device.memory().allocated if ways else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", choices=("multi30k", "long"), default="multi30k")
    parser.add_argument("--cache", type=Path, default=Path("build/cache"))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2, help="epochs per turn")
    parser.add_argument("--warm-up", type=int, default=3, help="epochs before the first turn")
    parser.add_argument(
        "--pause",
        action="store_true",
        help="after the warm-up, stop until SIGCONT comes: others may use the GPU until then",
    )
    parser.add_argument("--steps", type=int, default=16, help="steps under the profiler")
    parser.add_argument("--block", type=int, default=BLOCK, help="tokens per side of a flex block")
    parser.add_argument("--layers", type=int, help="of encoder and decoder; else those of base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--flex-options", nargs="+", default=[], help="flex_attention's kernel_options to set"
    )
    parser.add_argument(
        "--beside",
        nargs="*",
        default=["padded"],
        choices=("padded", "plain", "plain compiled"),
        help="what trains in turns with packed: padded, and nn.Transformer in a plain loop on its "
        "batches, eager or compiled",
    )
    parser.add_argument(
        "--try",
        dest="tries",
        nargs="*",
        metavar="NAME=VALUE,…",
        help="instead: packed batches alone, once without and once with each of these settings of "
        "torch._inductor.config",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, not compiled")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    options: dict[str, Any] = dict.fromkeys(arguments.flex_options, True)
    if (block := arguments.block) != BLOCK:  # the kernels' own tiles must fit into a block
        options |= dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_N1", "BLOCK_M2"), block)
        options |= dict.fromkeys(("BLOCK_M1", "BLOCK_N2"), min(32, block))
        attention.BLOCK = block
    if options:
        flex.flex_attention = partial(flex.flex_attention, kernel_options=options)
    corpus = {"multi30k": four, "long": paragraphs}[arguments.corpus](arguments.data)
    if arguments.quick:
        corpus = first_pairs(corpus)
    with tempfile.TemporaryDirectory() as runs:
        measured = measure if arguments.tries is None else measure_settings
        found = measured(corpus, arguments.cache, Path(runs), arguments)
    save(arguments.out, {**header("packed.py"), "corpus": arguments.corpus, **found})
    kinds = {name: one.get("kinds", {}) for name, one in found["details"].items()}
    print(table(kinds))
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
