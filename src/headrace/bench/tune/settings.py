"""The settings of a search: the same fields in `config.yaml` and the flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headrace.errors import HeadraceError, TuneError
from headrace.plan import PRESETS
from headrace.schema import Checked, choice, listed, nearest, number, quoted, require_whole, whole

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z%]*)\s*")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_LISTS = ("plans", "workers", "batch_sizes")


@dataclass(frozen=True, slots=True)
class TuneSettings(Checked):
    """Settings of a search. The search chooses a value for each field that is None.

    The text of a field is its help text in `headrace tune --help`.
    """

    error: ClassVar[type[HeadraceError]] = TuneError

    work: str = choice(
        "translation", "Workload to train: translation, resnet, mlp, or your_module:make_work."
    )
    options: tuple[tuple[str, Any], ...] = choice((), "Options of the workload.")
    plans: tuple[str, ...] | None = choice(
        None, "Presets to start from, separated by commas.", unset="all that run here"
    )
    workers: tuple[int, ...] | None = choice(
        None,
        "Numbers of loader processes to try, separated by commas.",
        unset="chosen by the number of cores",
    )
    batch_sizes: tuple[int, ...] = choice(
        (), "Batch sizes to try, separated by commas.", unset="the workload's own"
    )
    memory_cap: str | None = choice(
        None,
        "Discard plans that need more device memory: 40GB, 512MiB or 50%.",
        unset="no limit",
    )
    steps: int = whole(20, 1, 1 << 20, "Steps in the shortest runs.")
    repeats: int = whole(5, 1, 1000, "Runs of each plan that is close to the best.")
    warmup: int = whole(10, 1, 1 << 20, "Warmup steps before a plan's first run.")
    compare: int = whole(
        10, 0, 1 << 20, "Steps whose losses must match the baseline's; 0 skips the check."
    )
    tolerance: float = number(
        0.01, 0, 1, "Relative difference allowed between losses that cannot match bit for bit."
    )
    minutes: float | None = number(
        None, 0, 1e6, "Time limit for the whole search, in minutes.", unset="no limit"
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = choice(
        None, "fp32, tf32, bf16 or fp16.", unset="float32, TF32 as PyTorch is set"
    )
    device: str = choice("auto", "auto, cpu, cuda, cuda:1, …")
    seed: int = whole(0, 0, 1 << 62, "Random seed for weights, batches and dropout.")

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for name in self.plans or ():
            if name not in PRESETS:
                raise TuneError(
                    f"plans: no plan {quoted(name)}{nearest(name, PRESETS)}; known: "
                    f"{listed(PRESETS)}"
                )
        if self.plans is not None and not self.plans:
            raise TuneError("plans: none was named; expected one or more")
        for name, minimum in (("workers", 0), ("batch_sizes", 1)):
            for index, value in enumerate(getattr(self, name) or ()):
                require_whole(f"{name}[{index}]", value, minimum, TuneError)
        if self.memory_cap is not None:
            memory_of(self.memory_cap, 1 << 40)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "settings") -> TuneSettings:
        """Settings from plain values, as `to_dict` gives them."""
        given = dict(values)
        if isinstance(given.get("options"), Mapping):
            given["options"] = tuple(given["options"].items())
        return cls.from_values(given, where)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        found = {name: getattr(self, name) for name in self.field_names()}
        for name in _LISTS:
            found[name] = None if found[name] is None else list(found[name])
        return found | {"options": dict(self.options)}


def memory_of(text: str, total_bytes: int) -> int:
    """Bytes of a size such as 40GB, 512MiB or 50% (of `total_bytes`)."""
    found = _SIZE.fullmatch(text)
    value = float(found[1]) if found else 0.0
    unit = found[2].lower() if found else ""
    if unit == "%" and 0 < value <= 100:
        return int(total_bytes * value / 100)
    if value <= 0 or unit not in _UNITS:
        raise TuneError(f"memory_cap = {quoted(text)}: expected a size like 40GB, 512MiB or 50%")
    return int(value * _UNITS[unit])
