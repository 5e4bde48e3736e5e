"""The settings of a training run: the same fields in `config.yaml`, `--config` and the flags."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headrace.errors import HeadraceError, TranslationError
from headrace.schema import Checked, choice, number, quoted, read_yaml, refuse_unknown, whole

if TYPE_CHECKING:
    from headrace.device import Device
    from headrace.translation.model_settings import ModelSettings

_MAX_COUNT = 1 << 40
_BY_PRESET = "set by --preset"
_TIME = re.compile(r"(?:(\d+\.?\d*)h)?(?:(\d+\.?\d*)m)?(?:(\d+\.?\d*)s?)?")
#: The settings that `--resume` may change.
CHANGED_BY_RESUME = ("epochs", "time_limit", "patience", "samples")
#: A run folder's copy of its plan file.
PLAN_FILE = "plan.yaml"


@dataclass(frozen=True, slots=True)
class TrainSettings(Checked):
    """A run's settings. The trainer chooses a value for each field that is None.

    The text of a field is its help text in `headrace train --help`.
    """

    error: ClassVar[type[HeadraceError]] = TranslationError

    # --- data
    data: tuple[str, ...] = choice(
        (), "Files or a folder of sentence pairs.", unset="the built-in Chinese–English corpus"
    )
    src: str = choice("zh", "Language to translate from.")
    trg: str = choice("en", "Language to translate into.")
    vocabulary: int = whole(8000, 300, 1 << 20, "Maximum size of each subword vocabulary.")
    joint: bool = choice(False, "Share one vocabulary between the two languages.")
    max_length: int = whole(
        60, 4, 1 << 16, "Drop pairs with more tokens than this on one side, markers included."
    )
    skip_bad: bool = choice(
        False, "Skip and count malformed lines instead of stopping at the first one."
    )
    # --- batches
    sentences: int = whole(30, 1, 1 << 20, "Sentence pairs per batch.")
    tokens: int | None = whole(
        None, 1, 1 << 30, "Target tokens per batch, in place of --sentences."
    )
    shapes: int | None = whole(
        None,
        0,
        4096,
        "Maximum number of different batch shapes; 0 sets no limit.",
        unset="16 with CUDA graphs, otherwise no limit",
    )
    packed: Literal["auto", "on", "off"] = choice(
        "auto",
        "Put sentences end to end in batches of one shape, instead of padding them: on, off, or "
        "auto: on where it pays, which is under a plan that compiles, on a CUDA GPU, with 8,192 "
        "target tokens per batch or more.",
    )
    workers: int | None = whole(
        None,
        0,
        1024,
        "Number of loader processes.",
        unset="the plan file's, else 2 with a GPU, 0 without",
    )
    prefetch_factor: int | None = whole(
        None,
        1,
        1024,
        "Batches that each loader process loads ahead.",
        unset="the plan file's, else PyTorch's",
    )
    loader_timeout: float = number(
        0.0, 0, 1e9, "Fail if the loader produces no batch for this many seconds; 0 waits forever."
    )
    seed: int = whole(0, 0, 1 << 62, "Random seed for weights, batch order and dropout.")
    # --- model
    preset: Literal["tiny", "small", "base", "big", "auto"] = choice(
        "auto",
        "Model size: tiny, small, base, big, or auto: chosen by device and corpus size.",
    )
    width: int | None = whole(None, 2, 1 << 16, "Model width (d_model).", unset=_BY_PRESET)
    heads: int | None = whole(None, 1, 1024, "Attention heads.", unset=_BY_PRESET)
    layers: int | None = whole(
        None, 1, 1024, "Layers in the encoder, and as many in the decoder.", unset=_BY_PRESET
    )
    inner: int | None = whole(
        None, 1, 1 << 20, "Width of the feed-forward layers.", unset=_BY_PRESET
    )
    dropout: float | None = number(None, 0, 0.999, "Dropout probability.", unset=_BY_PRESET)
    attention_dropout: float | None = number(
        None,
        0,
        0.999,
        "Dropout probability of attention weights.",
        unset="as --dropout; 0 if batches are packed",
    )
    norm: Literal["pre", "post"] = choice(
        "pre", "Layer norm before (pre) or after (post) each sublayer."
    )
    tied: bool = choice(True, "Share one matrix between target embedding and output layer.")
    weights: str | None = choice(
        None,
        "Start from these weights: a .safetensors file or a run folder. The vocabularies are then "
        "those of that run.",
        unset="random weights",
    )
    # --- training
    epochs: int = whole(10, 1, _MAX_COUNT, "Number of epochs.")
    max_steps: int | None = whole(
        None, 1, _MAX_COUNT, "Stop after this many optimizer steps.", unset="no limit"
    )
    time_limit: float = dataclasses.field(
        default=0.0,
        metadata={
            "low": 0,
            "high": 1e9,
            "meaning": "Stop training after this time, such as 90s, 30m or 2h, and score the "
            "model. Counts from the start of this command; 0: no limit.",
            "unset": "no limit",
            "as_text": True,
        },
    )
    patience: int = whole(
        0,
        0,
        _MAX_COUNT,
        "Stop after this many epochs without a better validation score; 0: never.",
    )
    lr: float = number(7e-4, 0, 1e3, "Peak learning rate.")
    schedule: Literal["inverse_sqrt", "noam", "constant"] = choice(
        "inverse_sqrt",
        "Learning rate schedule: inverse_sqrt, noam (which ignores --lr) or constant.",
    )
    warmup: int = whole(2000, 1, _MAX_COUNT, "Length of the warmup, in optimizer steps.")
    weight_decay: float = number(0.0, 0, 1e3, "Weight decay of AdamW.")
    smoothing: float = number(0.1, 0, 0.999, "Label smoothing.")
    clip_norm: float = number(1.0, 0, 1e9, "Clip the gradient norm to this; 0 disables clipping.")
    accumulate: int = whole(
        1, 1, 1 << 20, "Accumulate gradients over this many batches per optimizer step."
    )
    ema: float | None = number(
        None, 0, 0.999999, "Decay of an exponential moving average of the weights.", unset="no EMA"
    )
    average_last: int = whole(
        0, 0, 1000, "Average the weights of this many last epochs; 0 disables averaging."
    )
    # --- execution
    plan: str = choice(
        "auto",
        "Execution plan: a preset (see `headrace plan`), a plan.yaml, or auto: chosen by device "
        "and length of the run, and by measuring its first steps.",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = choice(
        "auto", "fp32, tf32, bf16, fp16, or auto: bf16 on a GPU that is fast at it, else fp32."
    )
    device: str = choice("auto", "auto, cpu, cuda, cuda:1, …")
    deterministic: bool = choice(False, "Use deterministic kernels: slower, but reproducible.")
    parallel: Literal["ddp", "fsdp"] = choice(
        "ddp", "Under torchrun, replicate the model on each rank (ddp) or shard it (fsdp)."
    )
    rank_timeout: float = number(1800.0, 1, 1e9, "Seconds to wait for another rank.")
    # --- fault tolerance
    on_nonfinite: str = choice(
        "stop",
        "If a loss is NaN or infinite: stop, skip the update, tolerate:N (skip N, then stop) "
        "or report.",
    )
    on_oom: Literal["raise", "halve"] = choice(
        "raise", "If a batch runs out of memory: raise an error, or halve the batch."
    )
    hang_after: float = number(
        600.0,
        0,
        1e9,
        "Report where the run hangs after this many seconds without a step; 0: never.",
    )
    hang_abort: bool = choice(False, "End a hung run with exit code 75.")
    grace: float = number(
        0.0, 0, 1e9, "Exit at the latest this many seconds after SIGTERM; 0 sets no limit."
    )
    stop_code: Literal["signal", "zero"] = choice(
        "signal", "Exit code after SIGTERM: 143 (signal) or 0 (zero)."
    )
    save_every: float = number(30.0, 0, 1e9, "Seconds between checkpoints.")
    keep: int = whole(2, 1, 10_000, "Number of recent checkpoints to keep.")
    # --- evaluation
    valid_sentences: int = whole(
        200, 0, _MAX_COUNT, "Validation sentences to translate after each epoch, for BLEU; 0: none."
    )
    samples: int = whole(
        3, 0, 100, "Held-out sentences whose translations are shown after each epoch; 0: none."
    )
    beam: int = whole(3, 1, 1000, "Beam size for the final translation of the test set.")
    # --- logging
    tensorboard: bool = choice(True, "Write TensorBoard events beside metrics.jsonl.")
    monitor: bool = choice(True, "Record GPU and host utilization, and profile 10 steps.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "settings") -> TrainSettings:
        """Settings from plain values; fields that are not given keep their defaults."""
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
        if isinstance(packed := given.get("packed"), bool):
            given["packed"] = "on" if packed else "off"  # YAML reads a bare `on` as true
        if isinstance(limit := given.get("time_limit"), str):
            given["time_limit"] = _seconds(limit, where)
        return cls.from_values(given, where)

    @classmethod
    def read(cls, path: str | Path) -> TrainSettings:
        """Read a run's settings from its `config.yaml`."""
        return cls.from_dict(stored_values(path), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` restores the settings from them."""
        return {name: _plain(getattr(self, name)) for name in self.field_names()}

    def replace(self, **changes: Any) -> TrainSettings:
        """A copy with these fields changed."""
        refuse_unknown(changes, self.field_names(), "settings", TranslationError)
        return dataclasses.replace(self, **changes)

    def model(self) -> ModelSettings:
        """The settings of the model: the preset, with what was changed.

        Raises if the preset is "auto": the trainer chooses one when it has read the corpus.
        """
        # Late, because --help must not import PyTorch.
        from headrace.translation.model_settings import ModelSettings

        if self.preset == "auto":
            raise TranslationError(
                "preset = auto: is chosen when a run starts, and this one has not; expected tiny, "
                "small, base or big"
            )
        preset = ModelSettings.preset(self.preset)
        changes: dict[str, Any] = {"norm": self.norm, "tied": self.tied}
        for name in ("width", "heads", "inner", "dropout", "attention_dropout"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        if self.packed == "on":
            changes.setdefault("attention_dropout", 0.0)
        if self.layers is not None:
            changes |= {"encoder_layers": self.layers, "decoder_layers": self.layers}
        # A translation may be longer than the training sentences.
        return preset.replace(**changes, max_length=max(256, 2 * self.max_length))


def stored_values(path: str | Path) -> dict[str, Any]:
    """The values in a settings file. If it is a run's `config.yaml`, `plan` is the path of the
    run's copy of its plan file."""
    found = dict(read_yaml(path, TranslationError))
    beside = Path(path).absolute().parent / PLAN_FILE
    return found | {"plan": str(beside)} if found.get("plan") == PLAN_FILE else found


def is_plan_file(plan: str) -> bool:
    """Whether `plan` is the path of a file, and not the name of a preset."""
    return plan.endswith((".yaml", ".yml"))


def resolve_precision(wanted: str, device: Device) -> str:
    """The precision to use: for "auto", bf16 if the device is fast at it, else fp32."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.has_fast_bf16() else "fp32"


def _seconds(text: str, where: str) -> float:
    """The seconds of a time such as "90", "90s", "30m", "1.5h" or "1h30m"."""
    if not text.strip() or (found := _TIME.fullmatch(text.strip())) is None:
        raise TranslationError(
            f"{where}: time_limit = {quoted(text)}: expected seconds, or a time such as 90s, 30m, "
            "2h or 1h30m"
        )
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds


def time_text(seconds: float) -> str:
    """Seconds as `time_limit` takes them, such as "1h30m"."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{count:g}{unit}" for count, unit in parts if count) or "0s"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


#: The panels of `headrace train --help`, with their settings.
SECTIONS = {
    "Data": ("src", "trg", "vocabulary", "joint", "max_length", "skip_bad"),
    "Batches": (
        *("sentences", "tokens", "shapes", "packed", "workers", "prefetch_factor"),
        *("loader_timeout", "seed"),
    ),
    "Model": (
        *("preset", "width", "heads", "layers", "inner", "dropout", "attention_dropout", "norm"),
        *("tied", "weights"),
    ),
    "Training": (
        *("epochs", "max_steps", "time_limit", "patience", "lr", "schedule", "warmup"),
        *("weight_decay", "smoothing", "clip_norm", "accumulate", "ema", "average_last"),
    ),
    "Execution": ("plan", "precision", "device", "deterministic", "parallel", "rank_timeout"),
    "Fault tolerance": (
        *("on_nonfinite", "on_oom", "hang_after", "hang_abort", "grace", "stop_code"),
        *("save_every", "keep"),
    ),
    "Evaluation": ("valid_sentences", "samples", "beam"),
    "Logging": ("tensorboard", "monitor"),
}
