"""A step function of the user's own, as a `CapturedFunction` sees it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from headrace.capture import (
    Capturable,
    CapturableOptimizer,
    CapturedFunction,
    CapturedWork,
    CaptureSettings,
    Guards,
    StepState,
    StepTracer,
    map_tensors,
    parts_of,
    state_obstacle,
    unique,
)
from headrace.device import Device
from headrace.engine.graphs.call_gradients import CallGradients, FoundGradients, Remains
from headrace.engine.graphs.observed_owners import ObservedOwners
from headrace.engine.loss.carried_state import CarriedState
from headrace.errors import CaptureError, StepError
from headrace.parallel import parallelism_of
from headrace.source_lines import describe_function

Returned = TypeVar("Returned")


class FunctionWork(Capturable[Any, Remains, Returned]):
    """What is captured of one step function, and its `graphs`."""

    def __init__(
        self,
        step: Callable[..., Returned],
        device: Device,
        *,
        modules: tuple[torch.nn.Module, ...] | None,
        optimizers: tuple[torch.optim.Optimizer, ...] | None,
        carry: CarriedState | None,
        max_graphs: int,
        watch_after: int,
        recheck: int,
        plan_name: str = "graph",
        cautious: bool = False,
    ) -> None:
        self._step, self._device = step, device
        self._given_modules, self._given_optimizers, self._carry = modules, optimizers, carry
        if carry is not None:
            carry.keep_in_place(device.captures)
        self._name = f"the step {describe_function(step)}"
        self.graphs: CapturedFunction[Any, Remains, Returned] = CapturedFunction(
            self,
            device,
            CaptureSettings(
                plan_name=plan_name,
                max_graphs=max_graphs,
                watch_first=max(watch_after - 1, 1),
                watch_last=watch_after,
                capture_after=0,
                recheck=recheck,
                cautious=cautious,
            ),
        )
        self._gradients = CallGradients()
        self._owners = ObservedOwners()
        self._capturable: Sequence[CapturableOptimizer] = ()
        if not device.captures:
            self.graphs.give_up(f"{device} captures no graphs")

    def find_state(self) -> StepState | None:
        """The step's modules, optimizers and scalers. None if a lazy module has no parameters yet:
        they are searched for again before the next call."""
        state = StepState.find(
            self._device,
            self._step,
            modules=self._given_modules,
            optimizers=self._given_optimizers,
            observed=self._owners.found,
        )
        for module in state.modules:
            if parallelism_of(module) != "plain":
                raise CaptureError(
                    f"{type(module).__name__} trains on several ranks: give the model to Engine, "
                    "or call the step without hr.graphed"
                )
        return None if any(map(is_lazy, state.tensors())) else state

    def found(self, guards: Guards) -> None:
        leaves = [one for one in guards.tensors() if one.requires_grad and one.is_leaf]
        self._gradients.use(unique((*guards.state.parameters(), *leaves)))

    # --- what is captured -------------------------------------------------------------------------

    def tree(self, call: Any) -> Any:
        return call

    def obstacle(self, state: StepState) -> str | None:
        return state_obstacle(state)

    def key(self, call: Any) -> tuple[Hashable, ...]:
        without = self._gradients.missing()
        if self._carry is None:
            return (without,)
        self._carry.before(_batch_of(call))  # now it is in the memory that a graph would read
        return (without, self._carry.key())

    def graph_key(self, key: Hashable) -> Hashable | None:
        return self._gradients.graph_key(key, self.graphs.graphs)

    def tensors(self) -> list[torch.Tensor]:
        rates = [optimizer.rates for optimizer in self._capturable if optimizer.rates is not None]
        own = [tensor for rate in rates for tensor in rate.tensors()]
        if self._carry is not None:
            own += self._carry.tensors()
        state = None if self.graphs.guards is None else self.graphs.guards.state
        return [*([] if state is None else state.tensors()), *own, *self._gradients.present()]

    def write_rates(self) -> None:
        for optimizer in self._capturable:
            if optimizer.rates is not None:
                optimizer.rates.write()

    def use_optimizers(self, capturable: Sequence[CapturableOptimizer]) -> None:
        self._capturable = capturable

    def run(self, call: Any) -> Returned:
        returned, carried = self._call_step(call)
        if self._carry is not None:
            self._carry.keep(carried)
        return returned

    def _call_step(self, call: Any) -> tuple[Returned, Any]:
        """Call the step. Returns what it returned, and the state for the next call."""
        args, kwargs = call
        if self._carry is None:
            return self._step(*args, **kwargs), None
        return self._carry.call(self._step, self._name, _batch_of(call), *args, **kwargs)

    def run_watched(self, call: Any, key: Hashable, tracer: StepTracer) -> tuple[Returned, bool]:
        guards, entry = self.graphs.guards, FoundGradients(self._gradients.parameters)
        assert guards is not None
        observed = len(self._owners.found)
        with self._owners.noting(guards.state, tracer, entry), tracer:
            result, carried = self._call_step(call)
        if self._carry is not None:
            self._carry.keep(carried)
            del carried
        numbers = {str(at): one for at, one in enumerate(parts_of(result)) if _is_number(one)}
        tracer.trace.note_returned(numbers)
        self._gradients.note(key, entry.fates(tracer.trace.touched))
        why = self._owners.why_not(key, observed)
        if why is not None:
            self.graphs.give_up(why)
        return result, len(self._owners.found) == observed

    def replay(
        self,
        captured: CapturedWork[Remains],
        key: Hashable,
        call: Any,
        leaves: list[torch.Tensor],
    ) -> Returned:
        self.write_rates()
        outcome = captured.replay(leaves)
        for parameter, gradient in outcome.gradients:
            parameter.grad = gradient
        if self._carry is not None:
            self._carry.hold(outcome.carried)
        returned: Returned = map_tensors(torch.clone, outcome.result)
        return returned

    def ready(self) -> bool:
        self._gradients.begin_capture()
        return True

    def record(self, tree: Any) -> Remains:
        entry = self._gradients.entry()
        with ExitStack() as stack:
            for optimizer in self._capturable:
                if optimizer.rates is not None:
                    stack.enter_context(optimizer.rates.in_param_groups())
            result, carried = self._call_step(tree)
        # Copies: a result may be a view of a weight, or of a gradient.
        try:
            result = map_tensors(lambda one: one.detach().clone(), result)
        except StepError as problem:
            raise CaptureError(str(problem)) from None
        if self._carry is not None:
            carried = self._carry.write(carried, capturing=True)
        gradients = self._gradients.left_since(entry)
        return Remains(result, gradients, carried)

    def keep(self, captured: CapturedWork[Remains], key: Hashable) -> None:
        captured.hold(self._gradients.captured())
        self._gradients.own(one for _, one in captured.result.gradients if one is not None)

    def dropped(self) -> None:
        self._gradients.disown()

    def given_up(self) -> None:
        self._owners.found.clear()


def _batch_of(call: Any) -> Any:
    """The batch of a call: its first argument."""
    args, kwargs = call
    return args[0] if args else next(iter(kwargs.values()), None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
