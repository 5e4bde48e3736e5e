"""What a training run is told: one record, the same in `config.yaml`, `--config` and the flags."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headrace.errors import HeadraceError, TranslationError
from headrace.schema import Checked, choice, number, quoted, read_yaml, refuse_unknown, whole

if TYPE_CHECKING:
    from headrace.device import Device
    from headrace.translation.model import ModelSettings

_MANY = 1 << 40
#: A plan that a run was given as a file, in the run's folder.
PLAN_FILE = "plan.yaml"


@dataclass(frozen=True, slots=True)
class TrainSettings(Checked):
    """A run's settings. Whatever is None follows from the others, the corpus or the machine."""

    error: ClassVar[type[HeadraceError]] = TranslationError

    # --- data
    data: tuple[str, ...] = choice((), "files or a folder of sentence pairs; none: the built-in")
    src: str = choice("zh", "the side that is translated")
    trg: str = choice("en", "the side it is translated into")
    vocabulary: int = whole(8000, 300, 1 << 20, "pieces of each vocabulary, at most")
    joint: bool = choice(False, "one vocabulary for both sides")
    max_length: int = whole(
        60, 4, 1 << 16, "tokens of a side, markers included; longer is left out"
    )
    skip_bad: bool = choice(False, "count malformed lines instead of stopping at the first")
    # --- batches
    sentences: int = whole(30, 1, 1 << 20, "sentence pairs a batch")
    tokens: int | None = whole(None, 1, 1 << 30, "target tokens a batch, instead of sentences")
    shapes: int | None = whole(None, 0, 4096, "batch shapes at most; 0: any; none: 16 for graphs")
    workers: int | None = whole(None, 0, 1024, "loading processes; none: 2 beside a GPU, else 0")
    prefetch_factor: int | None = whole(None, 1, 1024, "batches each worker loads ahead")
    loader_timeout: float = number(0.0, 0, 1e9, "seconds to wait for a worker; 0: for ever")
    seed: int = whole(0, 0, 1 << 62, "of weights, batches and dropout")
    # --- model
    preset: Literal["tiny", "small", "base", "big"] = choice("base", "the model's size")
    width: int | None = whole(None, 2, 1 << 16, "instead of the preset's")
    heads: int | None = whole(None, 1, 1024, "instead of the preset's")
    layers: int | None = whole(None, 1, 1024, "of encoder and decoder each, instead")
    inner: int | None = whole(None, 1, 1 << 20, "instead of the preset's")
    dropout: float | None = number(None, 0, 1, "instead of the preset's")
    norm: Literal["pre", "post"] = choice("pre", "norm before each part, or after")
    tied: bool = choice(True, "one matrix for target words and output")
    weights: str | None = choice(None, "start from these weights (a .safetensors, or a run)")
    # --- training
    epochs: int = whole(10, 1, _MANY, "passes over the corpus")
    max_steps: int | None = whole(None, 1, _MANY, "stop after so many updates")
    lr: float = number(7e-4, 0, 1e3, "learning rate at its peak")
    schedule: Literal["inverse_sqrt", "noam", "constant"] = choice(
        "inverse_sqrt", "how it goes up and down; noam sets the peak itself"
    )
    warmup: int = whole(2000, 1, _MANY, "updates on the way up")
    weight_decay: float = number(0.0, 0, 1e3, "AdamW's")
    smoothing: float = number(0.1, 0, 0.999, "label smoothing")
    clip_norm: float = number(1.0, 0, 1e9, "gradient norm at most; 0: any")
    accumulate: int = whole(1, 1, 1 << 20, "batches an update")
    ema: float | None = number(None, 0, 0.999999, "decay of averaged weights; none: no averages")
    average_last: int = whole(0, 0, 1000, "epochs whose last weights are averaged at the end")
    # --- how it runs
    plan: str = choice("pipeline", "a preset's name, or a plan.yaml")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = choice(
        "auto", "auto: bf16 on a GPU that has it"
    )
    device: str = choice("auto", "auto, cpu, cuda, cuda:1, …")
    deterministic: bool = choice(False, "the same bits in every run, at a price")
    parallel: Literal["ddp", "fsdp"] = choice(
        "ddp", "under torchrun: weights whole on each rank, or sharded"
    )
    rank_timeout: float = number(1800.0, 1, 1e9, "seconds to wait for another rank")
    # --- what happens to runs
    on_nonfinite: str = choice(
        "stop", "a loss that is not finite: stop, skip its update, tolerate:N, report"
    )
    on_oom: Literal["raise", "halve"] = choice(
        "raise", "no memory for a batch: end, or train on it in halves"
    )
    hang_after: float = number(600.0, 0, 1e9, "seconds without a step: say where it hangs; 0: no")
    hang_abort: bool = choice(False, "and end, with exit code 75")
    grace: float = number(0.0, 0, 1e9, "seconds that SIGTERM leaves it to save; 0: any number")
    stop_code: Literal["signal", "zero"] = choice("signal", "exit code after SIGTERM: 143, or 0")
    # --- looking at it
    save_every: float = number(30.0, 0, 1e9, "seconds between checkpoints")
    keep: int = whole(2, 1, 10_000, "checkpoints that are kept, the newest")
    valid_sentences: int = whole(200, 0, _MANY, "of valid, translated after each epoch; 0: none")
    beam: int = whole(3, 1, 1000, "hypotheses of the last translation, of test")
    tensorboard: bool = choice(True, "write TensorBoard events beside metrics.jsonl")
    monitor: bool = choice(True, "note the use of GPU and host, and what the GPU does in 10 steps")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "settings") -> TrainSettings:
        """Settings from plain values; what is not given is as usual."""
        refuse_unknown(values, cls.field_names(), where, TranslationError)
        given = dict(values)
        data = given.get("data", ())
        given["data"] = (data,) if isinstance(data, str) else data
        if data is None or isinstance(data, list | tuple):
            given["data"] = tuple(data or ())
        if not isinstance(given["data"], tuple) or not all(
            isinstance(path, str) and path for path in given["data"]
        ):
            raise TranslationError(
                f"{where}: data = {quoted(data)}: expected a path, or a list of them"
            )
        for name, hint in typing.get_type_hints(cls).items():
            if "float" in str(hint) and isinstance(given.get(name), str):
                with contextlib.suppress(ValueError):  # YAML takes 1e-3 for text, people do not
                    given[name] = float(given[name])
        try:
            return cls(**given)
        except TranslationError as problem:
            raise TranslationError(f"{where}: {problem}") from None

    @classmethod
    def read(cls, path: str | Path) -> TrainSettings:
        """A run's settings from its `config.yaml`."""
        if (Path(path).parent / "journal.jsonl").exists():
            raise TranslationError(
                f"{Path(path).parent}: is a search by `headrace tune`; expected a training run"
            )
        return cls.from_dict(stored_values(path), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` takes them."""
        return {name: _plain(getattr(self, name)) for name in self.field_names()}

    def but(self, **changes: Any) -> TrainSettings:
        refuse_unknown(changes, self.field_names(), "settings", TranslationError)
        return dataclasses.replace(self, **changes)

    def model(self) -> ModelSettings:
        """The model's own settings."""
        from headrace.translation.model import ModelSettings  # not to load PyTorch for --help

        preset = ModelSettings.preset(self.preset)
        changes: dict[str, Any] = {"norm": self.norm, "tied": self.tied}
        for name in ("width", "heads", "inner", "dropout"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        if self.layers is not None:
            changes |= {"encoder_layers": self.layers, "decoder_layers": self.layers}
        # Translations may be longer than what was trained on.
        return preset.but(**changes, max_length=max(256, 2 * self.max_length))


def stored_values(path: str | Path) -> dict[str, Any]:
    """What a file of settings says; of a run's own, the plan is the one that lies beside it."""
    found = dict(read_yaml(path, TranslationError))
    beside = Path(path).absolute().parent / PLAN_FILE
    return found | {"plan": str(beside)} if found.get("plan") == PLAN_FILE else found


def is_plan_file(plan: str) -> bool:
    """Whether a plan is a file, not a preset's name."""
    return plan.endswith((".yaml", ".yml"))


def chosen_precision(wanted: str, device: Device) -> str:
    """What "auto" means here: bf16 where the device is fast at it."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.has_fast_bf16() else "fp32"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


#: The settings by what they are about, as `--help` shows them.
SECTIONS = {
    "Data": ("src", "trg", "vocabulary", "joint", "max_length", "skip_bad"),
    "Batches": (
        *("sentences", "tokens", "shapes", "workers", "prefetch_factor", "loader_timeout"),
        "seed",
    ),
    "Model": (
        *("preset", "width", "heads", "layers", "inner", "dropout", "norm", "tied", "weights"),
    ),
    "Training": (
        *("epochs", "max_steps", "lr", "schedule", "warmup", "weight_decay", "smoothing"),
        *("clip_norm", "accumulate", "ema", "average_last"),
    ),
    "How it runs": ("plan", "precision", "device", "deterministic", "parallel", "rank_timeout"),
    "What happens to runs": (
        *("on_nonfinite", "on_oom", "hang_after", "hang_abort", "grace", "stop_code"),
    ),
    "Looking at it": ("save_every", "keep", "valid_sentences", "beam", "tensorboard", "monitor"),
}
