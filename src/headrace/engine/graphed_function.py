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
from collections.abc import Callable, Hashable, Iterable, Iterator
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
    MEMORY_MOVES,
    CapturableOptimizer,
    CapturedWork,
    FrozenValues,
    GraphCache,
    GraphReport,
    StateBeforeCapture,
    StateMemory,
    StepState,
    StepTracer,
    StepWatch,
    Storage,
    describe_failure,
    join_reasons,
    log_rounding,
    map_tensors,
    parts_of,
    settings_of_pytorch,
    signature,
    state_obstacle,
    storages,
    unique,
    warn_not_captured,
)
from headrace.data import flatten_batch
from headrace.device import Device, open_device
from headrace.engine.carry import CarriedState, Carry
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


class _Gradients:
    """The gradients that a call finds, and what becomes of them, by the parameter's position."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._entry = {
            at: (p, p.grad, p.grad._version)
            for at, p in enumerate(parameters)
            if p.grad is not None
        }
        self.tensors = [gradient for _, gradient, _ in self._entry.values()]
        self._seen_by_optimizer: set[int] = set()

    def seen_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Call before an optimizer's step."""
        seen = {id(p.grad) for group in optimizer.param_groups for p in group["params"]}
        self._seen_by_optimizer |= {
            at for at, (_, gradient, _) in self._entry.items() if id(gradient) in seen
        }

    def fates(self, touched: set[Storage]) -> _Fates:
        """Call after the call. `touched` is all memory that its operations had as arguments."""
        used = {
            at
            for at, (_, gradient, version) in self._entry.items()
            if at in self._seen_by_optimizer
            or gradient._version != version
            or storages([gradient]) & touched
        }
        stays = {at for at, (p, gradient, _) in self._entry.items() if p.grad is gradient}
        return _Fates(frozenset(used), frozenset(stays - used))


@dataclass(frozen=True, slots=True)
class _Fates:
    """What a call does with the gradients that it finds: it has `used` some, and has left others as
    they were (`kept`). The rest it has dropped unread, as `zero_grad()` does."""

    used: frozenset[int]
    kept: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Found:
    """What a step uses: its state, the values that it can read, and all that has a gradient."""

    state: StepState
    values: FrozenValues
    parameters: list[torch.Tensor]


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
        plan_name: str = "graph",
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._device, self._plan_name = step, device, plan_name
        self._given_modules, self._given_optimizers, self._carry = modules, optimizers, carry
        if carry is not None:
            carry.in_place = device.captures
        self._name = f"the step {describe_function(step)}"
        self._pytorch = settings_of_pytorch(device)
        self._watch = StepWatch(max(watch_after - 1, 1), watch_after)
        self._graphs: GraphCache[_Outcome] = GraphCache(
            device, max_graphs=max_graphs, capture_after=0
        )
        # What calls, by their key, do with the gradients of the calls before.
        self._fates: dict[Hashable, _Fates] = {}
        # Addresses of the gradients that graphs leave: memory of the graphs' pool.
        self._own_gradients: set[int] = set()
        # By their key: calls in a row whose gradients were in new memory.
        self._unsettled: Counter[Hashable] = Counter()
        self._observed: list[torch.nn.Module | torch.optim.Optimizer] = []
        # By their key: watched calls that have used something that was not known.
        self._new_owners: Counter[Hashable] = Counter()
        #: None before the first call, and after a call has shown more than the search had found.
        self._found: _Found | None = None
        self._capturable: list[CapturableOptimizer] = []
        # Of the captured graphs: the memory they use, and tensors that must not be freed.
        self._memory: StateMemory | None = None
        #: Calls that were replays.
        self.replays = 0
        self._one_by_one = 0
        self._was_new_shape = False
        self._why_eager: str | None = None
        if not device.captures:
            self._give_up(f"{device} captures no graphs")

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        call = (args, kwargs)
        key = self._key_for(call) if self._why_eager is None else None
        if key is None or self._found is None:
            self._one_by_one += 1
            return self._run(call)
        found = self._found
        captured = self._graph_for(found, key, call)
        self._was_new_shape = False
        if captured is not None and captured.suits(leaves := flatten_batch(call)):
            return self._replay(captured, leaves)
        self._one_by_one += 1
        if self._why_eager is None:
            self._graphs.find(key)  # counts the call; graphs have keys with gradients
            self._was_new_shape = self._graphs.uses(key) == 1
            if self._watch.wants(key, self._graphs.uses(key)):
                return self._run_watched(found, key, call)
        return self._run(call)

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
        rounding = (optimizer.rounding for optimizer in self._capturable)
        return GraphReport(
            shapes=len(self._graphs),
            captures=self._graphs.captures,
            evictions=self._graphs.evictions,
            replays=self.replays,
            one_by_one=self._one_by_one,
            memory_bytes=self._graphs.memory_bytes,
            why=self._why_eager,
            decision=None,
            rounding=join_reasons(self._watch.rounding, *rounding),
            seconds=self._graphs.seconds,
        )

    def close(self) -> None:
        """Drop all graphs and free their memory. Later calls capture again."""
        self._drop_graphs()

    # --- what the step uses -----------------------------------------------------------------------

    def _search(self, values: FrozenValues | None = None) -> _Found | None:
        """Find the step's modules, optimizers and scalers, and the values that it can read: again,
        if there are `values` of an earlier search. None if a lazy module has no parameters yet:
        search again after the next call."""
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
        if any(map(is_lazy, state.tensors())):
            return None
        if values is None:
            values = FrozenValues(state)
            values.check()
        else:
            values.find_again(state)
            values.find()
        leaves = [one for one in values.tensors() if one.requires_grad and one.is_leaf]
        return _Found(state, values, list(unique((*state.parameters(), *leaves))))

    @contextmanager
    def _observing(self, state: StepState, tracer: StepTracer, entry: _Gradients) -> Iterator[None]:
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
            tracer.is_paused = True
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
                tracer.is_paused = False
                result = closure()
                # The closure may have dropped the gradients that the step found.
                entry.seen_by(optimizer)
                tracer.is_paused = True
                return result

            return traced

        def resume(*_: object) -> None:
            tracer.is_paused = False

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

    # --- one call ---------------------------------------------------------------------------------

    def _run(self, call: Any) -> Returned:
        """Run the step eagerly."""
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

    def _key_for(self, call: Any) -> Hashable | None:
        """The key of a call: what its graph depends on. None if the step cannot be captured. Drops
        graphs that were captured with other values or other memory."""
        try:
            if self._found is None:
                self._found = self._search()
                if self._found is None:
                    return None
            else:
                was_reset = any(optimizer.was_reset for optimizer in self._capturable)
                moved = self._has_moved(self._found)
                replaced = MEMORY_MOVES if moved else None
                if self._found.values.check(replaced, after_new_shape=self._was_new_shape):
                    self._drop_graphs()
                    self._watch.forget()
                if moved:  # the step may have other modules and parameters now
                    self._found = self._search(self._found.values)
                    if self._found is None:
                        return None
                if was_reset:
                    self._drop_graphs()
                    self._watch.forget()
                    self._make_capturable(self._found.state)
            settings = tuple(map(operator.call, self._pytorch))
            gradients = map(_GRADIENT, self._found.parameters)
            without = tuple(map(operator.is_, gradients, itertools.repeat(None)))
            if self._carry is None:
                return (signature(call, self._device), settings, without)
            self._carry.before(_batch_of(call))  # now it is in the memory that a graph would read
            return (signature(call, self._device), settings, without, self._carry.key())
        except CaptureError as problem:
            self._give_up(describe_failure(problem))
            return None

    def _has_moved(self, found: _Found) -> bool:
        """Whether the step uses other memory than graphs do, or has got other modules since it was
        searched."""
        return found.values.modules_changed() if self._memory is None else self._memory.has_moved()

    def _graph_for(self, found: _Found, key: Hashable, call: Any) -> CapturedWork[_Outcome] | None:
        """The graph for this call, captured now if it is due; None: run the step eagerly."""
        if not self._watch.has_agreed(key):
            return None
        graph_key = (key, self._gradient_key(found, key))
        captured = self._graphs.find(graph_key)
        # Gradients of an eager call have other memory each time: wait until an address comes again.
        settled = not any(graph_key[1]) or self._graphs.uses(graph_key) > 1
        self._unsettled[key] = 0 if settled else self._unsettled[key] + 1
        if self._unsettled[key] == _MAX_UNSETTLED:
            self._give_up(_GRADIENTS_MOVE)
        if captured is not None or not settled or not self._graphs.is_due(graph_key):
            return captured
        try:
            return self._capture(found, key, graph_key, call)
        except CaptureError as problem:
            self._give_up(describe_failure(problem))
            return None

    def _gradient_key(self, found: _Found, key: Hashable) -> tuple[int, ...]:
        """The gradients that a graph would use: their addresses, and 0 for all others.

        A gradient that the step leaves alone counts if another graph of this function has made it:
        the graphs share memory, and one captured without it might use that memory for its own.
        """
        fates, found_at = self._fates[key], [0] * len(found.parameters)
        for at in fates.used | fates.kept:
            gradient = found.parameters[at].grad
            address = 0 if gradient is None else gradient.data_ptr()
            if at in fates.used or address in self._own_gradients:
                found_at[at] = address
        return tuple(found_at)

    def _run_watched(self, found: _Found, key: Hashable, call: Any) -> Returned:
        """Run the step eagerly, and look for what no graph could repeat."""
        device = self._device
        tracer = StepTracer(
            device, GraphedFunction._run_watched.__code__, as_captured=self._watch.as_captured
        )
        entry = _Gradients(found.parameters)
        known = storages([*entry.tensors, *self._known_tensors(found), *flatten_batch(call)])
        observed = len(self._observed)
        with device.watch() as obstacles, self._observing(found.state, tracer, entry), tracer:
            result, carried = self._call_step(call)
        if self._carry is not None:
            self._carry.keep(carried)
            del carried
        numbers = {str(at): one for at, one in enumerate(parts_of(result)) if _is_number(one)}
        tracer.trace.returned = numbers
        self._fates[key] = entry.fates(tracer.trace.touched)
        if new := self._observed[observed:]:  # watch again, with all that the step uses
            self._found = None
            self._new_owners[key] += 1
            if self._new_owners[key] == _MAX_NEW_OWNERS:
                self._give_up(
                    f"each call makes another {type(new[0]).__name__} and uses it, and a graph "
                    "would keep using the one that it was captured with: make it once, outside the "
                    "step"
                )
            return result
        is_first = self._graphs.uses(key) == 1
        known |= storages(self._known_tensors(found))
        known |= storages(p.grad for p in found.parameters if p.grad is not None)
        why = self._watch.learn(key, tracer.trace, obstacles, known, first=is_first)
        if why is not None:
            self._give_up(why)
        return result

    def _known_tensors(self, found: _Found) -> list[torch.Tensor]:
        """Tensors that the step may read, since other checks notice if one is replaced."""
        rates = [optimizer.rates for optimizer in self._capturable if optimizer.rates is not None]
        own = [tensor for rate in rates for tensor in rate.tensors()]
        if self._carry is not None:
            own += self._carry.tensors()
        return [*found.state.tensors(), *found.values.tensors(), *own]

    def _replay(self, captured: CapturedWork[_Outcome], leaves: list[torch.Tensor]) -> Returned:
        self._write_rates()
        outcome = captured.replay(leaves)
        for parameter, gradient in outcome.gradients:
            parameter.grad = gradient
        if self._carry is not None:
            self._carry.hold(outcome.carried)
        self.replays += 1
        returned: Returned = map_tensors(torch.clone, outcome.result)
        return returned

    # --- capture ----------------------------------------------------------------------------------

    def _capture(
        self, found: _Found, key: Hashable, graph_key: Hashable, call: Any
    ) -> CapturedWork[_Outcome] | None:
        """Capture the step on this call. Returns None if it must run eagerly once more, because it
        creates something that stays, such as the optimizer's state of a parameter."""
        state, values = found.state, found.values
        if (obstacle := state_obstacle(state)) is not None:
            raise CaptureError(obstacle)
        entry = [p.grad for p in found.parameters if p.grad is not None]
        used = self._fates[key].used
        with self._ready_for_capture(state, values) as undo:
            before = StateBeforeCapture(state, values.tensors())
            try:
                captured = self._graphs.capture(
                    graph_key,
                    call,
                    lambda own: self._work_to_capture(found, used, own),
                    self._known_tensors(found),
                    state.updated(),
                )
                before.require_in_place()
                if before.optimizer_changed():
                    self._graphs.drop(graph_key)
                    return None
            finally:
                before.restore()
            values.require_unchanged()
            undo.pop_all()
        if self._graphs.captures == 1:
            log_rounding(self._plan_name, self.report().rounding)
        self._memory = StateMemory(state, values.tensors())
        values.note_capture()
        self._own_gradients |= {
            gradient.data_ptr() for _, gradient in captured.result.gradients if gradient is not None
        }
        captured.uses = [*self._known_tensors(found), *entry, *self._watch.read_by(key)]
        return captured

    def _work_to_capture(self, found: _Found, used: frozenset[int], call: Any) -> _Outcome:
        entry = [p.grad for p in found.parameters]
        with ExitStack() as stack:
            for optimizer in self._capturable:
                if optimizer.rates is not None:
                    stack.enter_context(optimizer.rates.in_param_groups())
            result, carried = self._call_step(call)
        # Copies: a result may be a view of a weight, or of a gradient.
        try:
            result = map_tensors(lambda one: one.detach().clone(), result)
        except StepError as problem:
            raise CaptureError(str(problem)) from None
        if self._carry is not None:
            carried = self._carry.write(carried, capturing=True)
        gradients = tuple(
            (p, p.grad)
            for at, p in enumerate(found.parameters)
            if p.grad is None or p.grad is not entry[at] or at in used
        )
        return _Outcome(result, gradients, carried)

    def _ready_for_capture(self, state: StepState, values: FrozenValues) -> ExitStack:
        """Make the optimizers capturable. The end of the returned context undoes this and what a
        capture has changed on the host; after a success, `pop_all()` keeps it."""
        undo = values.restoring_host_state()
        if not self._capturable:
            self._make_capturable(state)
            undo.callback(self._make_plain)
        self._write_rates()
        return undo

    def _make_capturable(self, state: StepState) -> None:
        self._capturable = [CapturableOptimizer(self._device, one) for one in state.optimizers]

    def _make_plain(self) -> None:
        for optimizer in self._capturable:
            optimizer.undo()
        self._capturable = []

    def _write_rates(self) -> None:
        for optimizer in self._capturable:
            if optimizer.rates is not None:
                optimizer.rates.write()

    # --- when graphs are dropped ------------------------------------------------------------------

    def _give_up(self, why: str) -> None:
        """Stop capturing for good: run all later calls eagerly. Log why."""
        self._why_eager = why
        self._drop_graphs()
        self._watch.forget()
        self._observed.clear()
        if self._found is not None:
            self._found.values.find_again()  # frees what it had found
        warn_not_captured(self._device, self._plan_name, why)

    def _drop_graphs(self) -> None:
        self._graphs.close()
        self._memory = None
        self._own_gradients.clear()


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
    )


def _batch_of(call: Any) -> Any:
    """The batch of a call: its first argument."""
    args, kwargs = call
    return args[0] if args else next(iter(kwargs.values()), None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
