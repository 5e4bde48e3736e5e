"""Checks what a workload's function has returned, and names its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from headrace.bench.works.parameters import takes
from headrace.bench.works.training import Made, ModelTraining, StepTraining
from headrace.engine import GraphedFunction
from headrace.errors import BenchError
from headrace.schema import listed
from headrace.source_lines import describe_function

MODEL_PARTS, STEP_PARTS = ("model", "optimizer", "loss", "loader"), ("step", "loader")
FORMS = "(model, optimizer, loss, loader) or (step, loader), with carry as one more if any"


class Returned:
    """What a workload has returned. `here` names the workload in messages."""

    def __init__(self, here: str) -> None:
        self._here = here

    def checked(self, returned: object) -> Made:
        parts = self._parts(returned)
        made = self._checked_step(parts) if "step" in parts else self._checked_model(parts)
        if isinstance(parts["loader"], Iterator):
            raise BenchError(
                f"{self._here} returned a {type(parts['loader']).__name__} as loader, which can "
                "be iterated over only once: expected a DataLoader, or a list of batches"
            )
        if isinstance(made, ModelTraining):
            self._check_optimizer(made)
        return made

    def _checked_model(self, parts: Mapping[str, Any]) -> ModelTraining:
        takes_state = "carry" in parts
        self._refuse_parts_of_a_step(parts["optimizer"], parts["loss"])
        self._require(parts, "model", torch.nn.Module, "a torch.nn.Module")
        self._require(parts, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer")
        arguments = "(model, batch, carried)" if takes_state else "(model, batch)"
        self._require(parts, "loss", Callable, f"a function of {arguments}")
        self._require(parts, "loader", Iterable, "a DataLoader, or a list of batches")
        if takes_state:
            if not takes(parts["loss"], 3):
                raise BenchError(
                    f"{self._here} returned a carry, but its loss does not take three arguments: "
                    "expected loss(model, batch, carried), which returns (loss, carried)"
                )
            return ModelTraining(**parts)
        if takes(parts["loss"], 3) and not takes(parts["loss"], 2):
            raise BenchError(
                f"{self._here} returned a loss of three arguments and no carry: expected "
                "loss(model, batch), or (model, optimizer, loss, loader, carry), where carry is "
                "the state that loss(model, batch, carried) gets with the first batch"
            )
        return ModelTraining(**parts)

    def _checked_step(self, parts: Mapping[str, Any]) -> StepTraining:
        step = parts["step"]
        if isinstance(step, GraphedFunction):
            raise BenchError(
                f"{self._here} returned a step that hr.graphed has wrapped: expected the "
                "function itself, since each plan decides whether it runs as a graph"
            )
        self._require(parts, "step", Callable, "a function of the batch")
        if isinstance(step, torch.nn.Module | torch.optim.Optimizer):
            raise BenchError(
                f"{self._here} returned a {type(step).__name__} as step: expected a function "
                "step(batch) that does forward, backward and update"
            )
        arguments = ("batch", "carried") if "carry" in parts else ("batch",)
        if not takes(step, len(arguments)):
            raise BenchError(
                f"{self._here} returned a step, {describe_function(step)}, that does not take "
                f"({', '.join(arguments)}): expected a function of them that does forward, "
                "backward and update"
            )
        self._require(parts, "loader", Iterable, "a DataLoader, or a list of batches")
        return StepTraining(**parts)

    def _require(self, parts: Mapping[str, Any], name: str, kind: Any, expected: str) -> None:
        if not isinstance(parts[name], kind):
            found = type(parts[name]).__name__
            raise BenchError(f"{self._here} returned a {found} as {name}: expected {expected}")

    def _refuse_parts_of_a_step(self, optimizer: object, loss: object) -> None:
        """Raise if these belong to a step of the user's own: several optimizers, or a function of
        the batch alone."""
        optimizers = list(optimizer.values()) if isinstance(optimizer, Mapping) else optimizer
        found = None
        if isinstance(optimizers, list | tuple) and optimizers:
            if all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
                count = f"{len(optimizers)} optimizer{'s' if len(optimizers) > 1 else ''}"
                found = f"a {type(optimizer).__name__} of {count} as optimizer"
        elif callable(loss) and takes(loss, 1) and not (takes(loss, 2) or takes(loss, 3)):
            found = "a function of the batch alone as loss"
        if found is not None:
            raise BenchError(
                f"{self._here} returned {found}: expected one torch.optim.Optimizer and "
                "loss(model, batch). If a step of your own does forward, backward and update, "
                "return (step, loader)"
            )

    def _parts(self, returned: object) -> Mapping[str, Any]:
        """What was returned, by name: the parts of a model's training, or of a step's."""
        forms = (MODEL_PARTS, STEP_PARTS)
        known = {len(form): form for names in forms for form in (names, (*names, "carry"))}
        if not isinstance(returned, tuple | list) or len(returned) not in known:
            found = "None" if returned is None else f"a {type(returned).__name__}"
            if isinstance(returned, tuple | list):
                kinds = listed(type(part).__name__ for part in returned)
                found = f"{found} of {len(returned)} ({kinds})"
            raise BenchError(f"{self._here} returned {found}: expected {FORMS}")
        parts = dict(zip(known[len(returned)], returned, strict=True))
        return {name: part for name, part in parts.items() if name != "carry" or part is not None}

    def _check_optimizer(self, training: ModelTraining) -> None:
        owned = {id(parameter) for parameter in training.model.parameters()}
        groups = training.optimizer.param_groups
        if owned.isdisjoint(id(parameter) for group in groups for parameter in group["params"]):
            raise BenchError(
                f"{self._here} returned an optimizer without any of the model's parameters: "
                "expected one that is made from this model's parameters()"
            )
