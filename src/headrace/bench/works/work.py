"""A workload: what bench and tune train. It is a function that returns the parts of a training
loop, in one of the forms of `training.py`.

    def make_work(batch_size=64):
        model = MyModel()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        loader = DataLoader(MyData(), batch_size, shuffle=True, num_workers=4, pin_memory=True)
        return model, optimizer, loss, loader       # loss(model, batch) -> a 0-dim tensor

It is called once for each plan, with the same random seed, and must return the same weights and
batches each time. Headrace passes `device`, `seed`, `pin`, `workers`, `prefetch_factor` and
`batch_size` if the function has such parameters; any other parameter is an option of the workload.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from headrace.bench.works.parameters import (
    _FROM_ELSEWHERE,
    check_option,
    defaults_of,
    parameters_of,
    place_of,
)
from headrace.bench.works.returned import Returned
from headrace.bench.works.training import Made
from headrace.device import Device
from headrace.errors import BenchError, HeadraceError, WorkOptionError
from headrace.plan import LoaderPlan
from headrace.schema import quoted
from headrace.source_lines import is_user_code, line_of_error

Unit = Literal["samples", "tokens"]
_GIVEN = (*_FROM_ELSEWHERE, "workers", "prefetch_factor")
_BATCH_SIZE = ("batch_size", "batch")


@dataclass(frozen=True)
class Workload:
    """A workload with its options. `make` builds it, the same each time.

    Throughput counts `unit`: samples (the first dimension of a batch) or tokens (the `weight` that
    the loss function returns). `where` is the file and line of `build`.
    """

    name: str
    description: str
    unit: Unit
    build: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def loader_fields(self) -> frozenset[str]:
        """The fields of a `LoaderPlan` that this workload has parameters for."""
        taken = set(parameters_of(self.build))
        named = {"workers", "prefetch_factor"} & taken
        return frozenset(named | ({"batch_size"} if taken & set(_BATCH_SIZE) else set()))

    def make(
        self,
        device: Device,
        *,
        seed: int = 0,
        loader: LoaderPlan | None = None,
        pin: bool = False,
    ) -> Made:
        """Build the workload on `device`: the same seed gives the same weights and batches.
        Afterwards the random generators are seeded again.

        `loader` applies as far as the workload has parameters for it (`loader_fields`); `pin` asks
        for batches in pinned memory.
        """
        seed_all(seed)
        given = self._given(device, seed, loader or LoaderPlan(), pin)
        names = parameters_of(self.build)
        defaults = defaults_of(self.build, names)
        missing = [name for name in names if name not in given and name not in defaults]
        if missing:
            raise WorkOptionError(
                f"{self._here()} needs a value for {missing[0]}: expected --set {missing[0]}=…, or "
                "a default"
            )
        try:
            returned = self.build(**given)
        except (Exception, SystemExit) as problem:
            site = line_of_error(problem.__traceback__)
            if isinstance(problem, HeadraceError) and not (site and is_user_code(site.file)):
                # A built-in workload refused one of its options.
                raise WorkOptionError(f"{self.name}: {problem}") from problem
            raise BenchError(self._failed(problem)) from problem
        made = Returned(self._here()).checked(returned).on(device)
        seed_all(seed)
        return made

    def _given(self, device: Device, seed: int, loader: LoaderPlan, pin: bool) -> Mapping[str, Any]:
        offered = {
            "device": device.torch_device,
            "seed": seed,
            "pin": pin and device.torch_device.type != "cpu",
            "workers": loader.workers,
            "prefetch_factor": loader.prefetch_factor,
        } | dict.fromkeys(_BATCH_SIZE, loader.batch_size)
        taken = parameters_of(self.build)
        accepted = {name: value for name, value in offered.items() if name in taken}
        # The loader's plan overrides options; None leaves an option or default in place.
        passed = {name: value for name, value in accepted.items() if value is not None}
        return {**self.options, **passed}

    def _failed(self, problem: BaseException) -> str:
        site = line_of_error(problem.__traceback__)
        text = " ".join(str(problem).split()) or "no message"
        return f"{site}: {self.name} raised {type(problem).__name__}: {text}"

    def _here(self) -> str:
        return f"{self.where}: {self.name}" if self.where else self.name


def work_of(
    function: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> Workload:
    """Make a workload of a function. The function's attribute `unit`, if it has one, is the unit of
    the workload; the first line of its docstring is the description."""
    title = name or f"{function.__module__}:{getattr(function, '__name__', 'work')}"
    own = [known for known in parameters_of(function) if known not in _GIVEN]
    for option, value in (options or {}).items():
        check_option(title, function, option, value)
    unit: Any = getattr(function, "unit", "samples")
    if unit not in ("samples", "tokens"):
        raise BenchError(f"{title}: unit = {quoted(unit)}: expected samples or tokens")
    summary = (inspect.getdoc(function) or title).splitlines()[0].rstrip(".")
    return Workload(
        name=title,
        description=description or summary,
        unit=unit,
        build=function,
        options=defaults_of(function, own) | dict(options or {}),
        where=place_of(function),
    )


def seed_all(seed: int) -> None:
    """Seed every random generator that a workload may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
