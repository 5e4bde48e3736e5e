"""`graphed(step)`: a training step of the user's own as graphs, for any loop.

    @hr.graphed
    def step(batch):
        fake = generator(batch.noise)
        d_optimizer.zero_grad()
        d_loss(discriminator(batch.real), discriminator(fake.detach())).backward()
        d_optimizer.step()
        ...
        return {"d_loss": d.detach(), "g_loss": g.detach()}

The first calls with a shape run as they are written. Two of them are watched; if they did the same,
the next call is captured, and later ones are replays. A step that no graph can repeat goes on
running as it is written, and the log says why, once.

Gradients may cross from call to call (an update every n-th batch). Python's `p.grad` is then an
input of the step like any other: a graph belongs to the gradients, None or tensors, that were there
when it was captured, and after a replay `p.grad` is what it was after the capture.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from headrace.data import flatten_batch, host_rng_states, set_host_rng_states
from headrace.device import Device, open_device
from headrace.engine.capturable_optimizer import CapturableOptimizer
from headrace.engine.graph_cache import CapturedWork, GraphCache, signature
from headrace.engine.graph_obstacles import state_obstacle
from headrace.engine.graph_state import StateBeforeCapture, addresses
from headrace.engine.graph_values import FrozenValues
from headrace.engine.graph_watch import StepWatch
from headrace.engine.python_state import PythonState
from headrace.engine.step_graphs import GraphReport, describe_failure, warn_not_captured
from headrace.engine.step_state import StepState
from headrace.engine.step_trace import StepTracer, Storage, storages
from headrace.errors import CaptureError, StepError
from headrace.parallel import parallelism_of

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Gradients = tuple[torch.Tensor | None, ...]


class _Gradients:
    """The gradients that a call finds, and whether it uses them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.tensors = [p.grad for p in parameters if p.grad is not None]
        self._versions = [gradient._version for gradient in self.tensors]
        self._seen_by_optimizer = False

    def seen_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Call before an optimizer's step."""
        own = {id(gradient) for gradient in self.tensors}
        groups = optimizer.param_groups
        self._seen_by_optimizer |= any(id(p.grad) in own for one in groups for p in one["params"])

    def are_unused(self, touched: set[Storage]) -> bool:
        """Whether the call has dropped all of them unread, as `zero_grad()` does."""
        written = any(
            gradient._version != version
            for gradient, version in zip(self.tensors, self._versions, strict=True)
        )
        return not (self._seen_by_optimizer or written or storages(self.tensors) & touched)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a captured call leaves: its result and, for each parameter, its gradient."""

    result: Any
    gradients: Gradients


class GraphedFunction(Generic[Arguments, Returned]):
    """A step function that replays graphs of itself."""

    def __init__(
        self,
        step: Callable[Arguments, Returned],
        device: Device,
        *,
        modules: tuple[torch.nn.Module, ...] | None,
        optimizers: tuple[torch.optim.Optimizer, ...] | None,
        max_graphs: int,
        watch_after: int,
        plan_name: str = "graph",
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._device, self._plan_name = step, device, plan_name
        self._given_modules, self._given_optimizers = modules, optimizers
        self._watch = StepWatch(max(watch_after - 1, 1), watch_after)
        self._watch_after = watch_after
        self._graphs: GraphCache[_Outcome] = GraphCache(
            device, max_graphs=max_graphs, capture_after=0
        )
        self._uses: Counter[int] = Counter()
        # Calls, by the hash of their key, that use no gradients of the calls before.
        self._starts_clean: set[int] = set()
        self._observed: list[torch.nn.Module | torch.optim.Optimizer] = []
        self._state: StepState | None = None
        self._values: FrozenValues | None = None
        self._parameters: list[torch.Tensor] = []
        self._capturable: list[CapturableOptimizer] = []
        # Of the captured graphs: the addresses they use, and tensors that must not be freed.
        self._addresses: tuple[Hashable, ...] | None = None
        self._kept_alive: list[torch.Tensor] = []
        #: Calls that were replays.
        self.replays = 0
        self._one_by_one = 0
        self._why_eager: str | None = None
        if not device.captures:
            self._give_up(f"{device} captures no graphs")

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        call = (args, kwargs)
        key = self._key_for(call) if self._why_eager is None else None
        captured = None if key is None else self._graph_for(key, call)
        if captured is not None:
            return self._replay(captured, call)
        self._one_by_one += 1
        if key is not None and self._why_eager is None:
            self._uses[hash(key)] += 1
            if self._watch.wants(hash(key), self._uses[hash(key)]):
                return self._run_watched(key, call)
        return self._step(*args, **kwargs)

    def report(self) -> GraphReport:
        """What was captured and replayed, and why not."""
        return GraphReport(
            shapes=len(self._graphs),
            captures=self._graphs.captures,
            evictions=self._graphs.evictions,
            replays=self.replays,
            one_by_one=self._one_by_one,
            memory_bytes=self._graphs.memory_bytes,
            why=self._why_eager,
            decision=None,
        )

    def close(self) -> None:
        """Drop all graphs and free their memory. Later calls capture again."""
        self._drop_graphs()

    # --- what the step uses -----------------------------------------------------------------------

    def _find_state(self) -> tuple[StepState, FrozenValues]:
        """Find the step's modules, optimizers and scalers, and the values that it can read."""
        found = PythonState(self._device, self._step, self._given_modules or ()).owners()
        observed = self._observed
        modules = self._given_modules or (
            *found.modules,
            *(one for one in observed if isinstance(one, torch.nn.Module)),
        )
        optimizers = self._given_optimizers or (
            *found.optimizers,
            *(one for one in observed if isinstance(one, torch.optim.Optimizer)),
        )
        state = StepState(
            self._device, self._step, _unique(modules), _unique(optimizers), tuple(found.scalers)
        )
        for module in state.modules:
            if parallelism_of(module) != "plain":
                raise CaptureError(
                    f"{type(module).__name__} trains on several ranks: give the model to Engine, "
                    "or call the step without hr.graphed"
                )
        if (obstacle := state_obstacle(state)) is not None:
            raise CaptureError(obstacle)
        values = FrozenValues(state)
        values.check()
        leaves = [one for one in values.tensors() if one.requires_grad and one.is_leaf]
        self._parameters = list(_unique((*state.parameters(), *leaves)))
        self._state, self._values = state, values
        return state, values

    @contextmanager
    def _observing(self, tracer: StepTracer, entry: _Gradients) -> Iterator[None]:
        """Note modules and optimizers that the step uses and the search has not found. Do not trace
        optimizers: a plain one counts its steps in Python, its capturable form on the device."""
        state = self._state
        assert state is not None
        known = {id(one) for one in (*state.all_modules(), *state.optimizers, *self._observed)}

        def note(used: Any, *_: object) -> None:
            if id(used) not in known:
                known.add(id(used))
                self._observed.append(used)

        def pause(optimizer: Any, *_: object) -> None:
            note(optimizer)
            entry.seen_by(optimizer)
            tracer.is_paused = True

        def resume(*_: object) -> None:
            tracer.is_paused = False

        with ExitStack() as hooks:
            handles = [
                register_optimizer_step_pre_hook(pause),
                register_optimizer_step_post_hook(resume),
            ]
            if not any(type(module).__name__ == "OptimizedModule" for module in state.modules):
                # Compiled modules would be compiled again for a hook.
                handles.append(register_module_forward_pre_hook(note))
            for handle in handles:
                hooks.callback(handle.remove)
            yield

    # --- one call ---------------------------------------------------------------------------------

    def _key_for(self, call: Any) -> Hashable | None:
        """The key of a call: what its graph depends on. None if the step cannot be captured. Drops
        graphs that were captured with other values or other memory."""
        try:
            if self._state is None or self._values is None:
                state, values = self._find_state()
            else:
                state, values = self._state, self._values
                was_reset = any(optimizer.was_reset for optimizer in self._capturable)
                if values.check() or was_reset or self._memory_moved(state):
                    self._drop_graphs()
                    self._watch.forget()
                    if was_reset:
                        self._make_capturable(state)
            kind = self._device.torch_device.type
            modes = (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
                torch.are_deterministic_algorithms_enabled(),
            )
            return (signature(call), modes, tuple(p.grad is None for p in self._parameters))
        except CaptureError as problem:
            self._give_up(describe_failure(problem))
            return None

    def _graph_for(self, key: Hashable, call: Any) -> CapturedWork[_Outcome] | None:
        """The graph for this call, captured now if it is due; None: run the step as written."""
        if not self._watch.has_agreed(hash(key)):
            return None
        graph_key = (key, self._gradient_key(key))
        captured = self._graphs.find(graph_key)
        # Gradients of an eager call have other memory each time: wait until an address comes again.
        settled = graph_key[1] is None or self._graphs.uses(graph_key) > 1
        if captured is not None or not settled or not self._graphs.is_due(graph_key):
            return captured
        try:
            return self._capture(key, graph_key, call)
        except CaptureError as problem:
            self._give_up(describe_failure(problem))
            return None

    def _gradient_key(self, key: Hashable) -> Hashable:
        """The gradients that a graph would read: their addresses, or nothing if it reads none."""
        if hash(key) in self._starts_clean:
            return None
        return tuple(0 if p.grad is None else p.grad.data_ptr() for p in self._parameters)

    def _run_watched(self, key: Hashable, call: Any) -> Returned:
        """Run the step as written, and look for what no graph could repeat."""
        device, (args, kwargs) = self._device, call
        tracer = StepTracer(device, caller=GraphedFunction._run_watched.__code__)
        entry = _Gradients(self._parameters)
        known = storages([*entry.tensors, *self._known_tensors(), *flatten_batch(call)])
        observed = len(self._observed)
        with device.watch() as obstacles, self._observing(tracer, entry), tracer:
            result = self._step(*args, **kwargs)
        numbers = {str(at): one for at, one in enumerate(tree_leaves(result)) if _is_number(one)}
        tracer.trace.returned = numbers
        if entry.are_unused(tracer.trace.touched):
            self._starts_clean.add(hash(key))
        else:
            self._starts_clean.discard(hash(key))
        if len(self._observed) > observed:  # watch again, with all that the step uses
            self._state = self._values = None
            self._uses[hash(key)] -= 1
            return result
        is_first = self._uses[hash(key)] == 1
        if obstacles:
            why = None if is_first else "; ".join(dict.fromkeys(map(str, obstacles[:3])))
        else:
            known |= storages(self._known_tensors())
            known |= storages(p.grad for p in self._parameters if p.grad is not None)
            why = self._watch.learn(hash(key), tracer.trace, known, first=is_first)
        if why is not None:
            self._give_up(why)
        return result

    def _known_tensors(self) -> list[torch.Tensor]:
        """Tensors that the step may read, since other checks notice if one is replaced."""
        if self._state is None or self._values is None:
            return []
        rates = [optimizer.rates for optimizer in self._capturable if optimizer.rates is not None]
        own = [tensor for rate in rates for tensor in rate.tensors()]
        return [*self._state.tensors(), *self._values.tensors(), *own]

    def _replay(self, captured: CapturedWork[_Outcome], call: Any) -> Returned:
        self._write_rates()
        outcome = captured.replay(flatten_batch(call))
        for parameter, gradient in zip(self._parameters, outcome.gradients, strict=True):
            parameter.grad = gradient
        self.replays += 1
        returned: Returned = tree_map_only(torch.Tensor, torch.clone, outcome.result)
        return returned

    # --- capture ----------------------------------------------------------------------------------

    def _capture(
        self, key: Hashable, graph_key: Hashable, call: Any
    ) -> CapturedWork[_Outcome] | None:
        """Capture the step on this call. Returns None if it must run as written once more, because
        it creates something that stays, such as the optimizer's state of a parameter."""
        state, values = self._state, self._values
        assert state is not None
        assert values is not None
        if (obstacle := state_obstacle(state)) is not None:
            raise CaptureError(obstacle)
        entry = [p.grad for p in self._parameters if p.grad is not None]
        with self._ready_for_capture(state, values) as succeeded:
            before = StateBeforeCapture(state)
            try:
                captured = self._graphs.capture(graph_key, call, self._work_to_capture)
                replaced = before.replaced_tensor()
                if replaced is not None:
                    raise CaptureError(
                        f"the step replaces {replaced}, and a graph would keep using the old "
                        "tensor: write to it in place, with copy_()"
                    )
                if before.optimizer_changed():
                    self._graphs.drop(graph_key)
                    return None
            finally:
                before.restore()
            values.require_unchanged()
            succeeded()
        self._addresses = addresses(state, state.tensors())
        values.note_capture()
        # A graph must not outlive the tensors it uses.
        self._kept_alive += [*self._known_tensors(), *entry, *self._watch.read_by(hash(key))]
        return captured

    def _work_to_capture(self, call: Any) -> _Outcome:
        args, kwargs = call
        with ExitStack() as stack:
            for optimizer in self._capturable:
                if optimizer.rates is not None:
                    stack.enter_context(optimizer.rates.in_param_groups())
            result = self._step(*args, **kwargs)
        # Copies: a result may be a view of a weight, or of a gradient.
        result = tree_map_only(torch.Tensor, lambda one: one.detach().clone(), result)
        return _Outcome(result, tuple(p.grad for p in self._parameters))

    @contextmanager
    def _ready_for_capture(
        self, state: StepState, values: FrozenValues
    ) -> Iterator[Callable[[], None]]:
        """Inside the block the step can be captured. Call the yielded function on success. Without
        that call, the end of the block restores the optimizers, the host's random generators and
        the step's Python values."""
        random_states, succeeded = host_rng_states(), []
        was_capturable = bool(self._capturable)
        if not was_capturable:
            self._make_capturable(state)
        self._write_rates()
        try:
            yield lambda: succeeded.append(True)
        finally:
            if not succeeded:
                set_host_rng_states(random_states)
                values.restore_python()
                if not was_capturable:
                    for optimizer in self._capturable:
                        optimizer.undo()
                    self._capturable = []

    def _make_capturable(self, state: StepState) -> None:
        self._capturable = [CapturableOptimizer(self._device, one) for one in state.optimizers]

    def _write_rates(self) -> None:
        for optimizer in self._capturable:
            if optimizer.rates is not None:
                optimizer.rates.write()

    # --- when graphs are dropped ------------------------------------------------------------------

    def _memory_moved(self, state: StepState) -> bool:
        """Whether a parameter, a buffer or a part of an optimizer's state has other memory now."""
        return self._addresses is not None and addresses(state, state.tensors()) != self._addresses

    def _give_up(self, why: str) -> None:
        """Stop capturing for good: later calls run as written. Log why."""
        self._why_eager = why
        self._drop_graphs()
        warn_not_captured(self._device, self._plan_name, why)

    def _drop_graphs(self) -> None:
        self._graphs.close()
        self._addresses = None
        self._kept_alive = []


def graphed(
    step: Callable[Arguments, Returned],
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    shapes: int = 16,
    after: int = 2,
) -> GraphedFunction[Arguments, Returned]:
    """`step` as graphs: call the result in its place.

    The step may do anything that runs on the device: several models and optimizers, several
    backward passes, `zero_grad`, random numbers, averages of weights. Its arguments are the batch
    (tensors, nested as you like) and values such as `update=True`; each combination of shapes and
    values has a graph of its own. Learning rates may change between calls.

    - `modules`, `optimizers`: what the step uses. Found by looking at the step's code, unless
      given.
    - `shapes`: how many graphs there are at most; the least used is dropped.
    - `after`: how many calls with a shape run as written before it is captured.

    You may keep what a call returns: a replay returns copies. `report()` of the result says what
    was captured, or why not; `close()` frees the graphs.
    """
    if not callable(step):
        raise StepError(f"graphed: step is a {type(step).__name__}; expected a function")
    if after < 1 or shapes < 1:
        raise StepError(f"graphed: shapes = {shapes}, after = {after}; expected at least 1 each")
    return GraphedFunction(
        step,
        open_device(device),
        modules=None if modules is None else tuple(modules),
        optimizers=None if optimizers is None else tuple(optimizers),
        max_graphs=shapes,
        watch_after=after,
    )


def _unique(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple({id(value): value for value in values}.values())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
