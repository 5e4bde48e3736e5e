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
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from headrace.bench.works.training import CarryTraining, Made, ModelTraining, StepTraining
from headrace.device import Device
from headrace.engine import GraphedFunction
from headrace.errors import BenchError, HeadraceError, WorkOptionError
from headrace.plan import LoaderPlan
from headrace.schema import is_union, listed, nearest, quoted
from headrace.source_lines import describe_function, is_user_code, line_of_error

Unit = Literal["samples", "tokens"]
MODEL_PARTS, STEP_PARTS = ("model", "optimizer", "loss", "loader"), ("step", "loader")
FORMS = "(model, optimizer, loss, loader) or (step, loader), with carry as one more if any"
# Parameters that Headrace passes. `--set` cannot set those of the first kind. The built-in
# workloads call their batch size `batch`.
_FROM_ELSEWHERE = {
    "device": "--device sets it",
    "seed": "--seed sets it",
    "pin": "each plan sets it",
}
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
        taken = set(_parameters(self.build))
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
        names = _parameters(self.build)
        defaults = _defaults(self.build, names)
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
        made = self._checked(returned).on(device)
        if not isinstance(made, StepTraining):
            self._check_optimizer(made)
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
        taken = _parameters(self.build)
        accepted = {name: value for name, value in offered.items() if name in taken}
        # The loader's plan overrides options; None leaves an option or default in place.
        passed = {name: value for name, value in accepted.items() if value is not None}
        return {**self.options, **passed}

    def _failed(self, problem: BaseException) -> str:
        site = line_of_error(problem.__traceback__)
        text = " ".join(str(problem).split()) or "no message"
        return f"{site}: {self.name} raised {type(problem).__name__}: {text}"

    def _checked(self, returned: object) -> Made:
        parts = self._parts(returned)
        made = self._checked_step(parts) if "step" in parts else self._checked_model(parts)
        if isinstance(parts["loader"], Iterator):
            raise BenchError(
                f"{self._here()} returned a {type(parts['loader']).__name__} as loader, which can "
                "be iterated over only once: expected a DataLoader, or a list of batches"
            )
        return made

    def _checked_model(self, parts: Mapping[str, Any]) -> ModelTraining | CarryTraining:
        takes_state = "carry" in parts
        self._refuse_parts_of_a_step(parts["optimizer"], parts["loss"])
        self._require(parts, "model", torch.nn.Module, "a torch.nn.Module")
        self._require(parts, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer")
        arguments = "(model, batch, carried)" if takes_state else "(model, batch)"
        self._require(parts, "loss", Callable, f"a function of {arguments}")
        self._require(parts, "loader", Iterable, "a DataLoader, or a list of batches")
        if takes_state:
            if not _takes(parts["loss"], 3):
                raise BenchError(
                    f"{self._here()} returned a carry, but its loss does not take three arguments: "
                    "expected loss(model, batch, carried), which returns (loss, carried)"
                )
            return CarryTraining(**parts)
        if _takes(parts["loss"], 3) and not _takes(parts["loss"], 2):
            raise BenchError(
                f"{self._here()} returned a loss of three arguments and no carry: expected "
                "loss(model, batch), or (model, optimizer, loss, loader, carry), where carry is "
                "the state that loss(model, batch, carried) gets with the first batch"
            )
        return ModelTraining(**parts)

    def _checked_step(self, parts: Mapping[str, Any]) -> StepTraining:
        step = parts["step"]
        if isinstance(step, GraphedFunction):
            raise BenchError(
                f"{self._here()} returned a step that hr.graphed has wrapped: expected the "
                "function itself, since each plan decides whether it runs as a graph"
            )
        self._require(parts, "step", Callable, "a function of the batch")
        if isinstance(step, torch.nn.Module | torch.optim.Optimizer):
            raise BenchError(
                f"{self._here()} returned a {type(step).__name__} as step: expected a function "
                "step(batch) that does forward, backward and update"
            )
        arguments = ("batch", "carried") if "carry" in parts else ("batch",)
        if not _takes(step, len(arguments)):
            raise BenchError(
                f"{self._here()} returned a step, {describe_function(step)}, that does not take "
                f"({', '.join(arguments)}): expected a function of them that does forward, "
                "backward and update"
            )
        self._require(parts, "loader", Iterable, "a DataLoader, or a list of batches")
        return StepTraining(**parts)

    def _require(self, parts: Mapping[str, Any], name: str, kind: Any, expected: str) -> None:
        if not isinstance(parts[name], kind):
            found = type(parts[name]).__name__
            raise BenchError(f"{self._here()} returned a {found} as {name}: expected {expected}")

    def _refuse_parts_of_a_step(self, optimizer: object, loss: object) -> None:
        """Raise if these belong to a step of the user's own: several optimizers, or a function of
        the batch alone."""
        optimizers = list(optimizer.values()) if isinstance(optimizer, Mapping) else optimizer
        found = None
        if isinstance(optimizers, list | tuple) and optimizers:
            if all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
                count = f"{len(optimizers)} optimizer{'s' if len(optimizers) > 1 else ''}"
                found = f"a {type(optimizer).__name__} of {count} as optimizer"
        elif callable(loss) and _takes(loss, 1) and not (_takes(loss, 2) or _takes(loss, 3)):
            found = "a function of the batch alone as loss"
        if found is not None:
            raise BenchError(
                f"{self._here()} returned {found}: expected one torch.optim.Optimizer and "
                "loss(model, batch). If a step of your own does forward, backward and update, "
                "return (step, loader)"
            )

    def _parts(self, returned: object) -> Mapping[str, Any]:
        """What was returned, by name: the parts of a model's training, or of a step's."""
        if isinstance(returned, tuple | list) and not hasattr(returned, "_fields"):
            forms = (MODEL_PARTS, STEP_PARTS)
            known = {len(form): form for names in forms for form in (names, (*names, "carry"))}
            names = known.get(len(returned))
            if names is None:
                kinds = listed(type(part).__name__ for part in returned)
                raise BenchError(
                    f"{self._here()} returned a {type(returned).__name__} of {len(returned)} "
                    f"({kinds}): expected {FORMS}"
                )
            return _without_none(dict(zip(names, returned, strict=True)))
        named = returned if isinstance(returned, Mapping) else _Attributes(returned)
        has_step = "step" in named and not (
            "loss" in named or isinstance(returned, torch.nn.Module)
        )
        expected = STEP_PARTS if has_step else MODEL_PARTS
        missing = next((name for name in expected if name not in named), None)
        if missing is not None:
            kind = "None" if returned is None else f"a {type(returned).__name__}"
            raise BenchError(
                f"{self._here()} returned {kind} without {missing!r}: expected {FORMS}, as a "
                "tuple, a dict or attributes"
            )
        return _without_none(
            {name: named[name] for name in expected} | {"carry": named.get("carry")}
        )

    def _check_optimizer(self, training: ModelTraining | CarryTraining) -> None:
        owned = {id(parameter) for parameter in training.model.parameters()}
        groups = training.optimizer.param_groups
        if owned.isdisjoint(id(parameter) for group in groups for parameter in group["params"]):
            raise BenchError(
                f"{self._here()} returned an optimizer without any of the model's parameters: "
                "expected one that is made from this model's parameters()"
            )

    def _here(self) -> str:
        return f"{self.where}: {self.name}" if self.where else self.name


def _without_none(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts without a `carry` that is None."""
    return {name: part for name, part in parts.items() if name != "carry" or part is not None}


class _Attributes(Mapping[str, Any]):
    """An object's attributes as a mapping."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self._owner))

    def __len__(self) -> int:
        return len(dir(self._owner))


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
    own = [known for known in _parameters(function) if known not in _GIVEN]
    for option, value in (options or {}).items():
        _check_option(title, function, option, value)
    unit: Any = getattr(function, "unit", "samples")
    if unit not in ("samples", "tokens"):
        raise BenchError(f"{title}: unit = {quoted(unit)}: expected samples or tokens")
    summary = (inspect.getdoc(function) or title).splitlines()[0].rstrip(".")
    return Workload(
        name=title,
        description=description or summary,
        unit=unit,
        build=function,
        options=_defaults(function, own) | dict(options or {}),
        where=_where(function),
    )


def settable(function: Callable[..., Any]) -> list[str]:
    """The parameters of a workload that `--set` can set."""
    return [name for name in _parameters(function) if name not in _FROM_ELSEWHERE]


def _check_option(title: str, function: Callable[..., Any], name: str, value: object) -> None:
    """Raise unless the function has the parameter `name`, and `value` has its type."""
    parameters = inspect.signature(function).parameters
    own = settable(function)
    if name in _FROM_ELSEWHERE and name in parameters:
        raise WorkOptionError(f"{title}: {name} cannot be set: {_FROM_ELSEWHERE[name]}")
    if name not in own:
        if any(known.kind is known.VAR_KEYWORD for known in parameters.values()):
            return
        others = f"known: {listed(own)}" if own else "it has none"
        raise WorkOptionError(f"{title}: no option {quoted(name)}{nearest(name, own)}; {others}")
    kinds = _kinds(function, name)
    fitting = kinds | ({int} if float in kinds else set())
    if kinds and type(value) not in fitting:
        expected = " or ".join(_KINDS[kind] for kind in _KINDS if kind in kinds)
        quote = f"""; in quotes, --set {name}='"{value}"', it is text""" if str in kinds else ""
        where = _where(function)
        raise WorkOptionError(
            f"{title}: {name} = {quoted(value)}: expected {expected}, as in the signature"
            f"{f' at {where}' if where else ''}{quote}"
        )


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def _kinds(function: Callable[..., Any], name: str) -> set[type]:
    """The plain types that a parameter accepts, from its annotation or else its default; empty if
    neither says."""
    try:
        hint = typing.get_type_hints(function).get(name)
    except (NameError, TypeError, AttributeError):  # names that only a type checker knows
        hint = None
    default = inspect.signature(function).parameters[name].default
    if hint is None:
        plain = type(default) in _KINDS and default is not None
        return {type(default)} if plain else set()
    found = set(typing.get_args(hint)) if is_union(hint) else {hint}
    if typing.get_origin(hint) is Literal:
        found = {type(choice) for choice in typing.get_args(hint)}
    return found if found <= _KINDS.keys() else set()


def seed_all(seed: int) -> None:
    """Seed every random generator that a workload may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _defaults(function: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {
        name: parameters[name].default
        for name in names
        if parameters[name].default is not inspect.Parameter.empty
    }


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function accepts `count` arguments; yes if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _where(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
