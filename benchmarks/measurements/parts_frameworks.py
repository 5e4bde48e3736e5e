"""Trainings of Hugging Face, Lightning and Accelerate, alone and with one line more, in turns.

    python benchmarks/measurements/parts_frameworks.py --out frameworks.json
    python benchmarks/measurements/parts_frameworks.py --fake # no GPU: tiny models, no true times

BERT base on batches of 32 × 128 tokens with a mask, in the Trainer, in Lightning and in Accelerate;
Transformer base on 30 × 60 tokens in Lightning. bf16, a fused AdamW and clipping to 1.0 in all.
Each training first warms up, is then timed, and ends with a few steps in which PyTorch reports
every wait of the host. `checks` compares small models in other settings bit for bit, with PyTorch's
deterministic kernels. The result is written after each training; what no longer fits into
`--seconds` is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the checks
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys

import psutil
import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save

sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))
from support.torchvision_ops import define_missing

define_missing()  # transformers imports torchvision

import headrace as hr
from headrace.text_table import text_table

#: What a step may take at most, in ms; for Transformer base, the gain at least.
WANTED = {"bert in trainer": 13.5, "bert in lightning": 12.7, "bert in accelerate": 12.7}
WANTED_GAIN = {"transformer in lightning": 4.5}


@dataclass(frozen=True)
class Sizes:
    warm_up: int = 36  # the checks again at replays 10 and 30 are over
    timed: int = 40
    watched: int = 8
    workers: int = 4
    bert: tuple[int, int] = (32, 128)
    transformer: tuple[int, int] = (30, 60)
    preset: str = "base"
    vocabulary: int = 32_000
    bert_layers: dict[str, int] = field(default_factory=dict)
    checked: int = 14

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed + self.watched


_TINY_BERT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TINY = Sizes(4, 4, 4, 0, (4, 8), (4, 6), "tiny", 100, _TINY_BERT, 8)


class Clock:
    """Counts steps: times those after the warm-up, then notes where the host waits."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._count, self._begun = sizes, 0, 0.0
        self._watching = contextlib.ExitStack()
        self._seen: list[Any] = []
        self.ms: float | None = None

    def tick(self) -> None:
        self._count += 1
        sizes = self._sizes
        if self._count == sizes.warm_up:
            torch.cuda.synchronize()
            self._begun = time.perf_counter()
        elif self._count == sizes.warm_up + sizes.timed:
            torch.cuda.synchronize()
            self.ms = (time.perf_counter() - self._begun) / sizes.timed * 1e3
            self._seen = self._watching.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self._count == sizes.steps - 1:  # a loop's end waits
            self.end()

    def end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._watching.close()

    def waits(self) -> dict[str, float]:
        """Waits of the host for each step, by line."""
        found = Counter(
            f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}"
            for one in self._seen
            if "synchroniz" in str(one.message)
        )
        steps = max(1, self._sizes.watched - 1)
        return {where: round(count / steps, 2) for where, count in found.most_common(12)}


# --- models and data ------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset[Any]):
    """Classified sentences for BERT, with a mask unless they are `plain`."""

    def __init__(self, count: int, length: int, vocabulary: int, *, plain: bool = False) -> None:
        draw = torch.Generator(device="cpu").manual_seed(1)
        self._ids = torch.randint(5, vocabulary, (count, length), generator=draw, device="cpu")
        self._plain = plain

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: int) -> dict[str, Any]:
        ids = self._ids[at]
        mask = {} if self._plain else {"attention_mask": torch.ones_like(ids)}
        return {"input_ids": ids, "labels": ids[0] % 2} | mask


class Pairs(torch.utils.data.Dataset[Any]):
    """Source and target for the translator."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        draw = torch.Generator(device="cpu").manual_seed(1)
        self._ids = torch.randint(4, vocabulary, (count, 2, length + 1), generator=draw)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: int) -> Any:
        return self._ids[at, 0, :-1], self._ids[at, 1]


@lru_cache
def _bert_once(layers: tuple[tuple[str, int], ...]) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_labels=2, **dict(layers)))


def bert(sizes: Sizes) -> Any:
    return copy.deepcopy(_bert_once(tuple(sizes.bert_layers.items()))).cuda().train()


def sentences(sizes: Sizes, steps: int, *, plain: bool = False) -> Sentences:
    batch, length = sizes.bert
    words = sizes.bert_layers.get("vocab_size", 30_000)
    return Sentences(batch * steps, length, words, plain=plain)


@lru_cache
def _translator_once(preset: str, vocabulary: int) -> Any:
    from headrace.translation import ModelSettings, Translator

    torch.manual_seed(0)
    return Translator(ModelSettings.preset(preset), vocabulary, vocabulary)


def translator(sizes: Sizes) -> Any:
    return copy.deepcopy(_translator_once(sizes.preset, sizes.vocabulary)).cuda().train()


def loader_of(data: Any, batch: int, sizes: Sizes) -> Any:
    return torch.utils.data.DataLoader(
        data, batch, num_workers=sizes.workers, pin_memory=True, drop_last=True
    )


# --- the three frameworks -------------------------------------------------------------------------


@dataclass
class Trained:
    losses: list[float]
    report: str


def in_trainer(
    model: Any,
    data: Any,
    batch: int,
    steps: int,
    clock: Clock | None,
    sped_up: bool,
    **options: Any,
) -> Trained:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if clock is not None:
                clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        usual: dict[str, Any] = {
            "per_device_train_batch_size": batch,
            "max_steps": steps,
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "optim": "adamw_torch_fused",
            "max_grad_norm": 1.0,
        }
        training = Trainer(
            model,
            TrainingArguments(folder, **usual | options),
            train_dataset=data,
            callbacks=[Tick()],
        )
        for callback in [*training.callback_handler.callbacks]:
            if type(callback).__name__ == "PrinterCallback":
                training.remove_callback(callback)
        handle = hr.transformers.speed_up(training, plan="graph") if sped_up else None
        training.train()
        losses = [one["loss"] for one in training.state.log_history if "loss" in one]
    return Trained(losses, "" if handle is None else str(handle.report()))


def in_lightning(
    model: Any,
    loss_of: Callable[[Any, Any], Any],
    loader: Any,
    steps: int,
    clock: Clock | None,
    sped_up: bool,
    **options: Any,
) -> Trained:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: list[torch.Tensor] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, at: int) -> Any:
            loss = loss_of(self.model, batch)
            losses.append(loss.detach())
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=5e-5, fused=True)

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            # Lightning's own setting refuses a fused optimizer in mixed precision.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

        def on_train_batch_end(self, *args: Any) -> None:
            if clock is not None:
                clock.tick()

    graphs = [hr.lightning.SpeedUp(plan="graph")] if sped_up else []
    usual: dict[str, Any] = {
        "max_steps": steps,
        "accelerator": "gpu",
        "devices": 1,
        "precision": "bf16-mixed",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(callbacks=graphs, **usual | options).fit(Module(), loader)
    return Trained([float(one) for one in losses], str(graphs[0].report()) if graphs else "")


def in_accelerate(
    model: Any, loader: Any, clock: Clock | None, sped_up: bool, **options: Any
) -> Trained:
    from accelerate import Accelerator

    accelerator = Accelerator(**{"mixed_precision": "bf16"} | options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = hr.speed_up(model, optimizer, plan="graph", loader=loader) if sped_up else None
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if clock is not None:
            clock.tick()
    found = Trained([float(one) for one in losses], str(handle.report()) if handle else "")
    if handle is not None:
        handle.close()
    return found


def bert_loss(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def translator_loss(model: Any, batch: Any) -> Any:
    from headrace.translation import translation_loss

    return translation_loss()(model, batch)["loss"]


# --- what is measured -----------------------------------------------------------------------------


def case(name: str, sizes: Sizes, clock: Clock, sped_up: bool) -> Trained:
    steps, (batch, _) = sizes.steps, sizes.bert
    if name == "bert in trainer":
        data = sentences(sizes, steps)
        options = {"bf16": True, "dataloader_num_workers": sizes.workers}
        return in_trainer(bert(sizes), data, batch, steps, clock, sped_up, **options)
    if name == "bert in lightning":
        loader = loader_of(sentences(sizes, steps), batch, sizes)
        return in_lightning(bert(sizes), bert_loss, loader, steps, clock, sped_up)
    if name == "bert in accelerate":
        return in_accelerate(
            bert(sizes), loader_of(sentences(sizes, steps), batch, sizes), clock, sped_up
        )
    batch, length = sizes.transformer
    loader = loader_of(Pairs(batch * steps, length, sizes.vocabulary), batch, sizes)
    return in_lightning(translator(sizes), translator_loss, loader, steps, clock, sped_up)


CASES = ("bert in trainer", "bert in lightning", "bert in accelerate", "transformer in lightning")
CHECKPOINTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
CHECKS: dict[str, dict[str, Any]] = {
    "trainer bf16": {"bf16": True},
    "trainer bf16, mask": {"bf16": True, "mask": True},
    "trainer fp16": {"fp16": True},
    "trainer accumulation": {"bf16": True, "gradient_accumulation_steps": 2},
    "trainer checkpointing": {"bf16": True, **CHECKPOINTED},
    "lightning bf16-mixed": {"precision": "bf16-mixed"},
    "lightning 16-mixed": {"precision": "16-mixed"},
    "accelerate bf16": {"mixed_precision": "bf16"},
    "accelerate fp16": {"mixed_precision": "fp16"},
    "accelerate accumulation": {"gradient_accumulation_steps": 2},
}


def check(name: str, sizes: Sizes, sped_up: bool) -> Trained:
    """A small model, with deterministic kernels; every loss is compared."""
    small = sizes if sizes is TINY else Sizes(bert=(8, 32), bert_layers=_TINY_BERT)
    options, steps, batch = dict(CHECKS[name]), sizes.checked, small.bert[0]
    each = steps * options.get("gradient_accumulation_steps", 1)
    data = sentences(small, each, plain=not options.pop("mask", False))
    if name.startswith("trainer"):
        options["logging_steps"] = 1
        return in_trainer(bert(small), data, batch, steps, None, sped_up, **options)
    loader = torch.utils.data.DataLoader(data, batch)
    if name.startswith("accelerate"):
        return in_accelerate(bert(small), loader, None, sped_up, **options)
    return in_lightning(bert(small), bert_loss, loader, steps, None, sped_up, **options)


def checked(name: str, sizes: Sizes, sped_up: bool) -> Trained:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return check(name, sizes, sped_up)
    finally:
        torch.use_deterministic_algorithms(False)


def _age() -> float:
    """Seconds since this process began, importing included."""
    return time.time() - psutil.Process().create_time()


@contextlib.contextmanager
def on_device(fake: bool) -> Iterator[None]:
    if not fake:
        yield
        return
    from headrace.fake import fake_cuda

    with fake_cuda():
        yield


def forget_accelerators() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def measured(run: Callable[[Clock], Trained], sizes: Sizes, fake: bool) -> dict[str, Any]:
    """One training, as plain values. An error is a value, too."""
    started, clock = time.perf_counter(), Clock(sizes)
    found: dict[str, Any] = {}
    try:
        with on_device(fake):
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(0)
            try:
                trained = run(clock)
            finally:
                clock.end()
            found = {"ms": clock.ms, "losses": trained.losses, "report": trained.report}
            found |= {"waits": clock.waits(), "memory_gb": torch.cuda.max_memory_allocated() / 1e9}
    except Exception as problem:
        found["error"] = f"{type(problem).__name__}: {str(problem)[:300]}"
        found["traceback"] = traceback.format_exc()[-3000:]
        print(found["traceback"], flush=True)
    finally:
        forget_accelerators()
        gc.collect()
        if not fake:
            torch.cuda.empty_cache()
    return found | {"seconds": round(time.perf_counter() - started, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fake", action="store_true", help="on the fake device, tiny")
    parser.add_argument("--seconds", type=float, default=135, help="begin nothing after this")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", help="cases and checks whose name has this; `checks`: all checks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sizes = TINY if options.fake else Sizes()
    packages = ("transformers", "lightning", "accelerate")
    versions = {name: metadata.version(name) for name in packages}
    result: dict[str, Any] = header("parts_frameworks.py") | {"libraries": versions}
    result |= {"cases": {}, "checks": {}, "left out": []}
    todo: list[tuple[str, str, Callable[[Clock, bool], Trained]]] = []
    for turn in range(options.turns):
        for name in CASES:
            todo.append(
                ("cases", name, lambda clock, sped_up, name=name: case(name, sizes, clock, sped_up))
            )
        if turn == 0:
            for name in CHECKS:
                todo.append(
                    ("checks", name, lambda _, sped_up, name=name: checked(name, sizes, sped_up))
                )
    longest = {"cases": 12.0, "checks": 6.0}
    for kind, name, run in todo:
        if options.only and options.only not in f"{kind} {name}":
            continue
        left: float = options.seconds - _age()
        if left < longest[kind] and not options.fake:
            result["left out"].append(name)
            continue
        for sped_up in (False, True):
            found = measured(
                lambda clock, run=run, way=sped_up: run(clock, way), sizes, options.fake
            )
            way = "sped up" if sped_up else "alone"
            result[kind].setdefault(name, {}).setdefault(way, []).append(found)
            result["seconds"] = round(_age(), 1)
            save(options.out, result)
            ms = found.get("ms")
            text = found.get("error") or (f"{ms:.2f} ms a step" if ms else "done")
            print(f"{result['seconds']:6.1f} s  {name}, {way}: {text}", flush=True)
    for name, ways in result["cases"].items():
        reports = [one["report"] for one in ways.get("sped up", []) if one.get("report")]
        print(f"\n== {name}", *reports[:1], sep="\n")
    print("\n" + text_table(COLUMNS, map(row, result["cases"].items())))
    columns = ("check", "losses", "greatest difference", "")
    print("\n" + text_table(columns, map(check_row, result["checks"].items())))
    if result["left out"]:
        print("no time was left for:", ", ".join(result["left out"]))


COLUMNS = (
    *("", "alone ms", "sped up ms", "gain", "wanted", "losses"),
    *("waits alone", "waits", "GB"),
)


def row(item: tuple[str, Any]) -> tuple[str, ...]:
    name, ways = item
    alone, sped_up = (_times(ways.get(way, [])) for way in ("alone", "sped up"))
    gain = "–"
    if alone and sped_up:
        gain = _span([min(alone) / max(sped_up), max(alone) / min(sped_up)])
    wanted = f"≤ {WANTED[name]} ms" if name in WANTED else f"≥ {WANTED_GAIN[name]} ×"
    last = [[{}, *ways.get(way, [])][-1] for way in ("alone", "sped up")]
    waits = [f"{sum(one.get('waits', {}).values()):.1f}" for one in last]
    memory = " / ".join(f"{one.get('memory_gb', 0):.1f}" for one in last)
    return name, _span(alone), _span(sped_up), gain, wanted, _difference(ways), *waits, memory


def _times(runs: list[Any]) -> list[float]:
    return [one["ms"] for one in runs if one.get("ms") and "error" not in one]


def _span(times: list[float]) -> str:
    return (
        "–".join(sorted({f"{one:.2f}" for one in (min(times), max(times))}, key=float))
        if times
        else "failed"
    )


def _difference(ways: dict[str, Any]) -> str:
    """How the losses sped up differ from those alone, and those alone from each other."""
    runs = [
        [one["losses"] for one in ways.get(way, []) if one.get("losses")]
        for way in ("alone", "sped up")
    ]
    if not all(runs):
        return "failed"
    parts = [_greatest(runs[0][0], runs[1][0])]
    if len(runs[0]) > 1:
        parts.append(f"(alone {_greatest(runs[0][0], runs[0][1])})")
    return " ".join(parts)


def _greatest(one: list[float], other: list[float]) -> str:
    if repr(one) == repr(other):
        return "equal"
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} of them"
    return f"{max(abs(a - b) for a, b in zip(one, other, strict=True)):.1e}"


def check_row(item: tuple[str, Any]) -> tuple[str, ...]:
    name, ways = item
    runs = [one for way in ways.values() for one in way]
    errors = [one["error"] for one in runs if "error" in one]
    lines = [one for one in runs if one.get("report")]
    eager = [
        line.strip()[:90]
        for one in lines
        for line in one["report"].splitlines()
        if "runs eagerly" in line
    ]
    count = str(len(runs[0].get("losses", [])))
    return name, count, _difference(ways), (errors or eager or [""])[0]


if __name__ == "__main__":
    main()
