"""`graphed(step)`: a training step of the user's own as graphs, for any loop.

    @hr.graphed
    def step(batch):
        fake = generator(batch.noise)
        d_optimizer.zero_grad()
        d_loss(discriminator(batch.real), discriminator(fake.detach())).backward()
        d_optimizer.step()
        ...
        return {"d_loss": d.detach(), "g_loss": g.detach()}

The first calls with a shape run eagerly, and two of them are watched. If both did the same, the
next call is captured, and later ones are replays. A step that no graph can repeat always runs
eagerly; the log says why, once.

Gradients may stay from call to call (an update every n-th batch). `p.grad` is then an input of the
step, like the batch: each graph belongs to the gradients, None or tensors, that it was captured
with. After a replay, `p.grad` is what it was after the capture. Gradients that a step neither uses
nor drops, such as those of another step's model, stay as they are.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headrace.capture import (
    CapturableOptimizer,
    CapturedFunction,
    CapturedWork,
    CaptureSettings,
    GraphReport,
    Guards,
    StateBeforeCapture,
    StepState,
    StepTracer,
    map_tensors,
    parts_of,
    state_obstacle,
    unique,
)
from headrace.device import Device, open_device
from headrace.engine.graphs.found_gradients import FoundGradients, GradientFates
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.loss.carry import Carry
from headrace.errors import CaptureError, StepError
from headrace.parallel import parallelism_of
from headrace.source_lines import describe_function

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
# After this many calls in a row that find their gradients elsewhere, none is captured any more.
_MAX_UNSETTLED = 20
# After this many watched calls of a shape that each use a new module or optimizer, likewise.
_MAX_NEW_OWNERS = 6
_GRADIENT = operator.attrgetter("grad")
_GRADIENTS_MOVE = (
    "each call finds the gradients that it uses in other memory, and a graph would read the old: "
    "write to a gradient in place (p.grad.copy_(…)) instead of assigning a new tensor, or drop it "
    "in the step with zero_grad()"
)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a captured call leaves: its result, the parameters that it has given a gradient or None,
    each with that, and the state for the next call."""

    result: Any
    gradients: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    carried: Any


class GraphedFunction(Generic[Arguments, Returned]):
    """A step function that replays graphs of itself."""

    def __init__(
        self,
        step: Callable[Arguments, Returned],
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
        functools.update_wrapper(self, step)
        self._step, self._device = step, device
        self._given_modules, self._given_optimizers, self._carry = modules, optimizers, carry
        if carry is not None:
            carry.keep_in_place(device.captures)
        self._name = f"the step {describe_function(step)}"
        self._graphs: CapturedFunction[Any, _Outcome, Returned] = CapturedFunction(
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
        # What calls, by their key, do with the gradients of the calls before.
        self._fates: dict[Hashable, GradientFates] = {}
        # Addresses of the gradients that graphs leave: memory of the graphs' pool.
        self._own_gradients: set[int] = set()
        # By their key: calls in a row whose gradients were in new memory.
        self._unsettled: Counter[Hashable] = Counter()
        self._observed: list[torch.nn.Module | torch.optim.Optimizer] = []
        # By their key: watched calls that have used something that was not known.
        self._new_owners: Counter[Hashable] = Counter()
        # All that has a gradient, and the gradients at the last capture.
        self._parameters: list[torch.Tensor] = []
        self._entry: list[torch.Tensor] = []
        self._capturable: Sequence[CapturableOptimizer] = ()
        self._captured_key: Hashable = None
        if not device.captures:
            self._graphs.give_up(f"{device} captures no graphs")

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        return self._graphs((args, kwargs))

    def call_eagerly(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        """Call the step without a graph, also if there is one."""
        return self._graphs.run((args, kwargs))

    def give_up(self, why: str) -> None:
        """Capture nothing any more."""
        self._graphs.give_up(why, quietly=True)

    @property
    def replays(self) -> int:
        """Calls that were replays."""
        return self._graphs.replays

    @property
    def carried(self) -> Any:
        """The state that the next call gets, as live tensors; None without a `carry`, or if it is
        the initial state. Set it to continue from another state, or to None to begin anew."""
        return None if self._carry is None else self._carry.state

    @carried.setter
    def carried(self, state: Any) -> None:
        if self._carry is None:
            raise StepError("this step carries no state: expected graphed(step, carry=…)")
        self._carry.set(state)

    def report(self) -> GraphReport:
        """What was captured and replayed, and why not."""
        return self._graphs.report()

    def close(self) -> None:
        """Drop all graphs and free their memory. Later calls capture again."""
        self._graphs.drop()

    # --- what the step uses -----------------------------------------------------------------------

    def find_state(self) -> StepState | None:
        """The step's modules, optimizers and scalers. None if a lazy module has no parameters yet:
        they are searched for again before the next call."""
        state = StepState.find(
            self._device,
            self._step,
            modules=self._given_modules,
            optimizers=self._given_optimizers,
            observed=self._observed,
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
        self._parameters = list(unique((*guards.state.parameters(), *leaves)))

    @contextmanager
    def _observing(
        self, state: StepState, tracer: StepTracer, entry: FoundGradients
    ) -> Iterator[None]:
        """Note modules and optimizers that the step uses and the search has not found. Modules that
        live no longer than the call, as `nn.MSELoss()(x, y)`, are none of its state. Do not trace
        optimizers: a plain one counts its steps in Python, its capturable form on the device. Do
        trace a closure that an optimizer's step calls: it is the user's."""
        known = {id(one) for one in (*state.all_modules(), *state.optimizers, *self._observed)}
        modules: list[weakref.ref[torch.nn.Module]] = []

        def note(module: torch.nn.Module, *_: object) -> None:
            if id(module) not in known:
                known.add(id(module))
                modules.append(weakref.ref(module))

        def pause(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if id(optimizer) not in known:
                known.add(id(optimizer))
                self._observed.append(optimizer)
            closures = [one for one in (*args[1:], *kwargs.values()) if callable(one)]
            tracer.pause()
            if not closures:
                entry.seen_by(optimizer)
                return None
            wrapped = {id(one): tracing(one, optimizer) for one in closures}
            return (
                tuple(wrapped.get(id(one), one) for one in args),
                {name: wrapped.get(id(one), one) for name, one in kwargs.items()},
            )

        def tracing(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
            @functools.wraps(closure)
            def traced() -> Any:
                tracer.resume()
                result = closure()
                # The closure may have dropped the gradients that the step found.
                entry.seen_by(optimizer)
                tracer.pause()
                return result

            return traced

        def resume(*_: object) -> None:
            tracer.resume()

        handles = [
            register_optimizer_step_pre_hook(pause),
            register_optimizer_step_post_hook(resume),
        ]
        if not any(type(module).__name__ == "OptimizedModule" for module in state.modules):
            # Compiled modules would be compiled again for a hook.
            handles.append(register_module_forward_pre_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._observed += filter(None, (module() for module in modules))

    # --- what is captured -------------------------------------------------------------------------

    def tree(self, call: Any) -> Any:
        return call

    def settings(self) -> tuple[tuple[str, Any], ...]:
        return ()

    def obstacle(self, state: StepState) -> str | None:
        return state_obstacle(state)

    def key(self, call: Any) -> tuple[Hashable, ...]:
        gradients = map(_GRADIENT, self._parameters)
        without = tuple(map(operator.is_, gradients, itertools.repeat(None)))
        if self._carry is None:
            return (without,)
        self._carry.before(_batch_of(call))  # now it is in the memory that a graph would read
        return (without, self._carry.key())

    def graph_key(self, key: Hashable) -> Hashable | None:
        """With the addresses of the gradients that a graph would use, and 0 for all others. None if
        they are in new memory: those of an eager call are elsewhere each time.

        A gradient that the step leaves alone counts if another graph of this function has made it:
        the graphs share memory, and one captured without it might use that memory for its own.
        """
        fates, found_at = self._fates[key], [0] * len(self._parameters)
        for at in fates.used | fates.kept:
            gradient = self._parameters[at].grad
            address = 0 if gradient is None else gradient.data_ptr()
            if at in fates.used or address in self._own_gradients:
                found_at[at] = address
        graph_key = (key, tuple(found_at))
        settled = not any(found_at) or self._graphs.graphs.uses(graph_key) > 0
        self._unsettled[key] = 0 if settled else self._unsettled[key] + 1
        if self._unsettled[key] == _MAX_UNSETTLED:
            raise CaptureError(_GRADIENTS_MOVE)
        if not settled:
            self._graphs.graphs.find(graph_key)  # counts it: this memory has been seen
            return None
        self._captured_key = key
        return graph_key

    def tensors(self) -> list[torch.Tensor]:
        rates = [optimizer.rates for optimizer in self._capturable if optimizer.rates is not None]
        own = [tensor for rate in rates for tensor in rate.tensors()]
        if self._carry is not None:
            own += self._carry.tensors()
        state = None if self._graphs.guards is None else self._graphs.guards.state
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [*([] if state is None else state.tensors()), *own, *gradients]

    def held(self) -> list[torch.Tensor]:
        return []

    def replaced(self) -> str | None:
        return None

    def memory_moves(self) -> None:
        pass

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
        guards, entry = self._graphs.guards, FoundGradients(self._parameters)
        assert guards is not None
        observed = len(self._observed)
        with self._observing(guards.state, tracer, entry), tracer:
            result, carried = self._call_step(call)
        if self._carry is not None:
            self._carry.keep(carried)
            del carried
        numbers = {str(at): one for at, one in enumerate(parts_of(result)) if _is_number(one)}
        tracer.trace.note_returned(numbers)
        self._fates[key] = entry.fates(tracer.trace.touched)
        new = self._observed[observed:]
        if new:
            self._new_owners[key] += 1
            if self._new_owners[key] == _MAX_NEW_OWNERS:
                self._graphs.give_up(
                    f"each call makes another {type(new[0]).__name__} and uses it, and a graph "
                    "would keep using the one that it was captured with: make it once, outside the "
                    "step"
                )
        return result, not new

    def run_compared(self, call: Any) -> None:
        return None

    def replay(
        self, captured: CapturedWork[_Outcome], key: Hashable, call: Any, leaves: list[torch.Tensor]
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
        self._entry = [p.grad for p in self._parameters if p.grad is not None]
        return True

    def record(self, tree: Any) -> _Outcome:
        entry = [p.grad for p in self._parameters]
        used = self._fates[self._captured_key].used
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
        gradients = tuple(
            (p, p.grad)
            for at, p in enumerate(self._parameters)
            if p.grad is None or p.grad is not entry[at] or at in used
        )
        return _Outcome(result, gradients, carried)

    def check(self, key: Hashable, before: StateBeforeCapture) -> None:
        pass

    def keep(self, captured: CapturedWork[_Outcome], key: Hashable) -> None:
        captured.hold(self._entry)
        self._entry = []
        self._own_gradients |= {
            gradient.data_ptr() for _, gradient in captured.result.gradients if gradient is not None
        }

    def dropped(self) -> None:
        self._own_gradients.clear()

    def given_up(self) -> None:
        self._observed.clear()


@overload
def graphed(
    step: Callable[Arguments, Returned],
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    carry: Any = None,
    shapes: int = 16,
    after: int = 2,
    recheck: int = 1000,
) -> GraphedFunction[Arguments, Returned]: ...


@overload
def graphed(
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    carry: Any = None,
    shapes: int = 16,
    after: int = 2,
    recheck: int = 1000,
) -> Callable[[Callable[Arguments, Returned]], GraphedFunction[Arguments, Returned]]: ...


def graphed(
    step: Callable[Arguments, Returned] | None = None,
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    carry: Any = None,
    shapes: int = 16,
    after: int = 2,
    recheck: int = 1000,
) -> Any:
    """Capture a training step of your own as graphs. Call what this returns instead of `step`.

    `hr.graphed(step, after=3)`, or as a decorator: `@hr.graphed` or `@hr.graphed(after=3)`.

    The step may do anything that runs on the device: several models and optimizers, several
    backward passes, `zero_grad`, random numbers, averages of weights. Its arguments are the batch
    (tensors, nested as you like) and values such as `update=True`; each combination of shapes and
    values has a graph of its own. Learning rates may change between calls.

    - `modules`, `optimizers`: what the step uses. Found by looking at the step's code, unless
      given.
    - `carry`: state that is carried from call to call: tensors on the device, nested as you like,
      or a `Carry`. The step gets it as its last positional argument, which you leave out, and
      returns `(result, carried)`; the call returns the result. `carried` of what this returns is
      the present state. For a `Carry`, the batch is the step's first argument.
    - `shapes`: how many graphs there are at most; the least used is dropped.
    - `after`: how many calls with a shape run eagerly before it is captured.
    - `recheck`: at its replays 10, 30, 100, 300 and then after each `recheck` of them, a graph is
      checked: the call runs eagerly and is compared. 0: never.

    You may keep what a call returns: a replay returns copies. `report()` of the result says what
    was captured, or why not; `close()` frees the graphs.
    """
    if after < 1 or shapes < 1:
        raise StepError(f"graphed: shapes = {shapes}, after = {after}; expected at least 1 each")
    if step is None:
        return functools.partial(
            graphed,
            device=device,
            modules=modules,
            optimizers=optimizers,
            carry=carry,
            shapes=shapes,
            after=after,
            recheck=recheck,
        )
    if not callable(step):
        raise StepError(f"graphed: step is a {type(step).__name__}; expected a function")
    device, spec = open_device(device), Carry.of(carry)
    return GraphedFunction(
        step,
        device,
        modules=None if modules is None else tuple(modules),
        optimizers=None if optimizers is None else tuple(optimizers),
        carry=None if spec is None else CarriedState(spec, device),
        max_graphs=shapes,
        watch_after=after,
        recheck=recheck,
    )


def _batch_of(call: Any) -> Any:
    """The batch of a call: its first argument."""
    args, kwargs = call
    return args[0] if args else next(iter(kwargs.values()), None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
