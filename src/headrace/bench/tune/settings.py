"""The settings of a search: the same fields in `config.yaml` and the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headrace.errors import HeadraceError, TuneError
from headrace.plan import PRESETS
from headrace.schema import Checked, choice, listed, nearest, number, quoted, require_whole, whole

_LISTS = ("plans", "workers")


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
        for index, value in enumerate(self.workers or ()):
            require_whole(f"workers[{index}]", value, 0, TuneError)

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
