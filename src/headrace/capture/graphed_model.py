"""`GraphedModel`: a model whose forward and backward are replayed as graphs, in anybody's loop.

`model.forward` is replaced on the instance, so its type, hooks, `state_dict` and wrappers stay. The
first calls with a key (shapes, values, modes, settings) run eagerly and are watched. Then forward
and backward are captured, over fresh aliases of the parameters: what the loop keeps of earlier
autograd graphs has no part in the capture. A replayed call returns copies of the captured outputs,
which hang on one small tensor, the anchor: autograd calls back once, not once a parameter.

Forward graphs keep what the backward needs in their pool. So a pool, here called a lane, has one
call at most that waits for its backward; a second such call gets a lane of its own. Backward graphs
have another pool: what they free is no memory of a forward.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from headrace.capture.backward_watch import accumulate, watch_backwards
from headrace.capture.cache import signature
from headrace.capture.gradients import GradientBuffers, captures_keep_buffers
from headrace.capture.host_draws import HostDraws
from headrace.capture.memory import StateBeforeCapture
from headrace.capture.module_guards import CodeGuards, ModuleGuards
from headrace.capture.obstacles import state_obstacle
from headrace.capture.outputs import Outputs, addresses, own_tensors, require_plain
from headrace.capture.recheck import Recheck
from headrace.capture.report import describe_failure, join_reasons
from headrace.capture.state import StepState, settings_of_pytorch
from headrace.capture.trace import StepTrace, StepTracer, Storage, storages
from headrace.capture.user_compiled import describe_own_graphs
from headrace.capture.watch import StepWatch
from headrace.data import flatten_batch, rebuild_batch
from headrace.device import Device, Graph, Obstacle, Stream, torch_draw
from headrace.errors import CaptureError, StepError
from headrace.parallel import parallelism_of

log = logging.getLogger("headrace")

# Calls of one key that may wait for their backward at once and still be replays.
_MAX_LANES = 3
# After this many calls of a key whose outputs got no gradient, all are taken to get one.
_MAX_WAIT_FOR_BACKWARD = 6
# A model whose graphs are dropped this often with hardly a replay between is not captured.
_MAX_DROPS = 8
_FEW_REPLAYS = 10
_MAX_POSTPONED = 8
_MAX_UNFINISHED_CALLS = 8
_MAX_COUNTED_KEYS = 4096
# After this many calls whose arguments no graph can take, the model is divided.
_MAX_ODD_CALLS = 3
_FIRST, _CHECKED = "the first calls of a shape", "checked again"
_BESIDE_CHECK = "a call that is checked waits for its backward"
_NO_GRADIENT = "its outputs have had no gradient yet"
_DDP: Any = torch.nn.parallel.DistributedDataParallel
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class _Running(threading.local):
    """Whether a model's forward runs in this thread, inside which others stay eager."""

    inside: bool = False


_running = _Running()


class _Ticket:
    """A call that waits for its backward, as long as autograd keeps it."""

    __slots__ = ("__weakref__", "is_done")

    def __init__(self) -> None:
        self.is_done = False


@dataclass(slots=True)
class _Lane:
    """A pool of forward graphs, and the call that waits for its backward, if one does."""

    pool: object
    ticket: Callable[[], _Ticket | None] = lambda: None
    graphs: dict[Hashable, CapturedModel] = field(default_factory=dict)
    stream: Stream | None = None

    def is_free(self) -> bool:
        ticket = self.ticket()
        return ticket is None or ticket.is_done


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedModel:
    """A forward and its backward as graphs. `gradients` are the model's, `inputs` copies of the
    arguments' leaves at `places`. `with_gradient` are the numbers of the outputs whose gradients
    the backward takes, `into` the memory that it takes them from. `numbers` are the parameters that
    get a gradient, `differentiated` the leaves of the arguments that get one. `draws` is whether
    the forward draws random numbers, `writes` a buffer that it writes and may read, `autocast`
    whether the backward runs under autocast. `uses` must not be freed."""

    forward: Graph
    gradients: GradientBuffers
    inputs: list[torch.Tensor]
    places: list[int]
    outputs: Outputs
    draws: bool
    writes: str | None = None
    #: What it draws on the host, where it decides something.
    host_draws: HostDraws | None = None
    backward: Graph | None = None
    autocast: bool = False
    with_gradient: list[int] = field(default_factory=list)
    into: list[torch.Tensor] = field(default_factory=list)
    numbers: tuple[int, ...] = ()
    differentiated: list[int] = field(default_factory=list)
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)
    uses: list[torch.Tensor] = field(default_factory=list)

    def close(self) -> None:
        self.forward.close()
        if self.backward is not None:
            self.backward.close()


@dataclass(slots=True)
class _Seen:
    """What watched calls of a key have shown. `gradients` are the outputs that got a gradient, each
    with its strides, `autocast` whether their backward ran under autocast."""

    gradients: dict[int, tuple[int, ...]] = field(default_factory=dict)
    autocast: bool = False
    kept_bytes: int = 0
    #: Whether it draws random numbers, and a buffer that it writes and may read.
    draws: bool = False
    writes: str | None = None


class GraphedModel:
    """Replays a model's forward and backward. `uses` before a capture run eagerly."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: Device,
        *,
        name: str,
        after: int,
        max_graphs: int,
        recheck: int,
    ) -> None:
        self.model, self.name = model, name
        self._device, self._max_graphs = device, max_graphs
        self._forward: Callable[..., Any] = model.forward
        self._pytorch = settings_of_pytorch(device)
        self._after = after
        self._recheck, self._recheck_every = Recheck(recheck), recheck
        # Checks that wait, and for how many more calls at most.
        self._due: weakref.WeakKeyDictionary[CapturedModel, int] = weakref.WeakKeyDictionary()
        # After a check: how many more calls may run eagerly, until its backward.
        self._unfinished_check = 0
        self._watch = StepWatch(max(after - 1, 1), after)
        self._uses: Counter[Hashable] = Counter()
        self._seen: dict[Hashable, _Seen] = {}
        self._lanes: list[_Lane] = []
        self._dropped: list[_Lane] = []
        self._backward_pool: object | None = None
        self.anchor = torch.zeros((), device=device.torch_device, requires_grad=True)
        self._anchor_node = get_gradient_edge(self.anchor).node
        self._request: _Request | None = None
        self._shares_casts = False
        #: None until the model's parameters are there.
        self._guards: ModuleGuards | None = None
        self._parameters: list[torch.Tensor] = []
        self._ids: frozenset[int] = frozenset()
        self._code: CodeGuards | None = None
        self._gradients = GradientBuffers(device, ())
        #: Why it is not captured (any more).
        self.why: str | None = None
        self._divide: Callable[[], None] | None = None
        self.replays = self.captures = self.drops = 0
        self._replays_before = 0
        #: Calls that ran eagerly, by reason.
        self.eager: Counter[str] = Counter()
        self.memory_bytes = 0
        watch_backwards(self)
        if getattr(model, "_compiled_call_impl", None) is not None:
            self.give_up(
                "model.compile() has compiled it in place, with what speed_up installs inside: "
                "pass compile=True to speed_up instead"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        why = self.why or self._why_eager_now()
        if why is None and self._guards is None:
            why = self._look()
        if why is not None:
            return self._run(why, args, kwargs)
        call = (args, kwargs)
        leaves = flatten_batch(call)
        try:
            key = self._key(call, leaves)
        except CaptureError as problem:
            why = str(problem)
            if self.eager[why] >= _MAX_ODD_CALLS and not self.captures:
                self.give_up(why, divides=True)
            return self._run(why, args, kwargs)
        if self._watch.has_agreed(key):
            captured = self._graph_for(key, call, leaves)
            if captured is not None:
                lane, graph = captured
                if self._unfinished_check:
                    self._unfinished_check -= 1
                    return self._run(_BESIDE_CHECK, args, kwargs)
                if self._is_check_due(graph):
                    return self._check_again(key, graph, call)
                return self._replay(lane, graph, call, leaves)
            return self._run(self.why or self._why_no_graph, args, kwargs)
        if len(self._uses) > _MAX_COUNTED_KEYS:  # a loader that never repeats a shape
            self._uses.clear()
            self._seen.clear()
        self._uses[key] += 1
        if self._watch.wants(key, self._uses[key]):
            return self._run_watched(key, call)
        return self._run(_FIRST, args, kwargs)

    # --- which calls ------------------------------------------------------------------------------

    def _why_eager_now(self) -> str | None:
        if not torch.is_grad_enabled():
            return "gradients are off"
        if not self.model.training:
            return "the model is in eval()"
        if _running.inside or self._device.is_capturing():
            return "called inside another captured part"
        if torch._C._current_graph_task_id() != -1:
            return "called inside a backward, as checkpointing does"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "hooks for saved tensors are on (checkpointing or offloading around the model)"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "called inside a functorch transform"
        if torch.is_anomaly_enabled():
            return "anomaly detection is on"
        if torch._C._get_tracing_state() is not None:
            return "torch.jit.trace is tracing it"
        if _DDP._active_ddp_module is not None:
            return "called inside DistributedDataParallel, which averages gradients by hooks"
        return None

    def _key(self, call: Any, leaves: list[Any]) -> Hashable:
        guards = self._known()
        if not guards.hold():
            self._drop(guards.difference())
            if (why := self.why or self._look()) is not None:
                raise CaptureError(why)
            guards = self._known()
        if self._code is not None and (changed := self._code.changed()) is not None:
            self._drop(str(changed))
            if self.why is not None:
                raise CaptureError(self.why)
        differentiated = tuple(
            at for at, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)
        )
        if differentiated:
            call = rebuild_batch(
                call, [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
            )
        return (
            signature(call, self._device),
            differentiated,
            tuple(map(_REQUIRES_GRAD, self._parameters)),
            guards.modes(),
            tuple(map(operator.call, self._pytorch)),
        )

    def _known(self) -> ModuleGuards:
        assert self._guards is not None
        return self._guards

    def _run(self, why: str, args: Any, kwargs: Any) -> Any:
        self.eager[why] += 1
        inside, _running.inside = _running.inside, _running.inside or self.why is None
        try:
            return self._forward(*args, **kwargs)
        finally:
            _running.inside = inside

    # --- the watch --------------------------------------------------------------------------------

    def _run_watched(self, key: Hashable, call: Any) -> Any:
        args, kwargs = call
        device, guards = self._device, self._known()
        if (why := self._obstacle()) is not None:
            self.give_up(why, divides=True)
            return self._run(why, args, kwargs)
        before, random_state = device.memory().allocated, device.random_state()
        versions = [one._version for one in guards.buffers]
        result, trace, obstacles, known = self._run_traced(_FIRST, call)
        seen = self._seen.setdefault(key, _Seen())
        seen.kept_bytes = max(seen.kept_bytes, device.memory().allocated - before)
        seen.draws = seen.draws or not torch.equal(random_state, device.random_state())
        seen.writes = guards.written_buffer(versions)
        first = self._uses[key] == 1
        changed = None if self._code is None else self._code.changed()
        if not first and (changed is not None or not guards.hold()):
            self.give_up(str(changed or guards.difference()), divides=True)
            return result
        why = self._watch.learn(key, trace, obstacles, known, first=first)
        if why is not None:
            self.give_up(why, divides=True)
        for number, tensor in enumerate(
            own_tensors(result, [*flatten_batch(call), *guards.tensors])
        ):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(self._see_gradient, seen, number))
        return result

    def _run_traced(
        self, why: str, call: Any
    ) -> tuple[Any, StepTrace, list[Obstacle], set[Storage]]:
        """Run eagerly under a trace. Returns also the memory that the forward may read."""
        args, kwargs = call
        tensors = self._known().tensors
        tracer = StepTracer(
            self._device, GraphedModel._run_traced.__code__, as_captured=self._watch.as_captured
        )
        known = storages([*tensors, *flatten_batch(call)])
        torch.clear_autocast_cache()  # what is cast here is not what earlier calls have cast
        with self._device.watch() as obstacles, tracer:
            result = self._run(why, args, kwargs)
        tracer.trace.host_draws.end()
        if tracer.trace.host_draws.are_all:
            obstacles = [one for one in obstacles if one.what != torch_draw().what]
        return result, tracer.trace, obstacles, known | storages(tensors)

    def _is_check_due(self, graph: CapturedModel) -> bool:
        """Whether to check a graph now. In one backward either all calls are graphs or none, else a
        gradient that others are added to would be rounded otherwise. So a check waits, but not for
        ever, until no other call waits for its backward."""
        if self._recheck.is_due(graph):
            self._due[graph] = _MAX_POSTPONED
        waits = self._due.get(graph)
        if waits is None:
            return False
        if waits and self.is_pending():
            self._due[graph] = waits - 1
            return False
        del self._due[graph]
        return True

    def _finish_check(self, gradient: torch.Tensor) -> None:
        self._unfinished_check = 0

    def _check_again(self, key: Hashable, graph: CapturedModel, call: Any) -> Any:
        """Run a call eagerly that a graph would repeat, and compare what it does."""
        result, trace, obstacles, known = self._run_traced(_CHECKED, call)
        for output in own_tensors(result, flatten_batch(call)):
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(self._finish_check)
                self._unfinished_check = _MAX_UNFINISHED_CALLS
        found = self._watch.difference(key, trace, obstacles, known)
        if self._recheck.learn(graph, found):
            log.warning("%s: %s", self.name, self._recheck.differed)
            self._drop(f"a call that was checked differs from its graph: {found}")
            if self._recheck.is_hopeless:
                self.give_up(f"it changes while its graphs are in use: {found}")
        return result

    def _see_gradient(self, seen: _Seen, number: int, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self.give_up(DOUBLE_BACKWARD)
        seen.gradients[number] = tuple(gradient.stride())
        seen.autocast = self.is_autocast()

    def _obstacle(self) -> str | None:
        state = StepState(self._device, self._forward, (self.model,), ())
        return state_obstacle(state)

    def compile(self) -> None:
        """Compile the model's forward: graphs are captured of what that launches."""
        self._forward = torch.compile(self._forward)

    def for_child(self, child: torch.nn.Module, name: str) -> GraphedModel:
        """The same for a child of the model."""
        return GraphedModel(
            child,
            self._device,
            name=name,
            after=self._after,
            max_graphs=self._max_graphs,
            recheck=self._recheck_every,
        )

    def when_divided(self, call: Callable[[], None]) -> None:
        """Call this if the model cannot be captured as a whole, but parts of it may be."""
        self._divide = call

    def give_up(self, why: str, *, divides: bool = False) -> None:
        """Run all later calls eagerly. Calls that wait for their backward still have their graphs.
        If it `divides`, parts of the model may do without what stands in the way."""
        if self.why is None:
            self.why = why
            self._drop_graphs()
            self._watch.forget()
            self._seen.clear()
            if divides and not self.captures and self._divide is not None:
                self._divide()
            self._device.warn_once(
                f"parts: {self.name}: {why}", "%s runs eagerly, because %s", self.name, why
            )

    # --- graphs -----------------------------------------------------------------------------------

    def _look(self) -> str | None:
        """Note the model's parameters, where they are, and all else that graphs depend on. Returns
        why this call must run eagerly, if it must."""
        if any(map(is_lazy, (*self.model.parameters(), *self.model.buffers()))):
            return "its lazy parameters are made by the first call"
        try:
            if (kind := parallelism_of(self.model)) != "plain":
                self.give_up(f"it is wrapped in {kind.upper()}, which averages gradients by hooks")
                return self.why
        except StepError as problem:  # it is sharded in some other way
            self.give_up(str(problem))
            return self.why
        odd = [one for one in self.model.parameters() if type(one.data) is not torch.Tensor]
        if odd:
            self.give_up(f"a parameter of it is a {type(odd[0]).__name__}")
            return self.why
        if not all(one.is_leaf for one in self.model.parameters()):
            self._guards = None
            return "its parameters are results of other operations, as functional_call passes them"
        guards = ModuleGuards(self.model)
        if not all(map(self._device.holds, guards.tensors)):
            self.give_up(f"some of its parameters or buffers are not on {self._device}")
            return self.why
        self._code = CodeGuards(StepState(self._device, self._forward, (self.model,), ()))
        if (compiled := self._code.reader.owners.own_graphs) is not None:
            self.give_up(describe_own_graphs(compiled))
            return self.why
        self._guards, self._parameters = guards, guards.parameters
        self._ids = frozenset(map(id, guards.parameters))
        self._gradients = GradientBuffers(self._device, self._parameters)
        return None

    def _drop(self, why: str) -> None:
        """Drop all graphs, since what they use has changed."""
        few = self.replays - self._replays_before < _FEW_REPLAYS
        self.drops = self.drops + 1 if few else 1
        self._replays_before = self.replays
        if self.drops >= _MAX_DROPS:
            self.give_up(f"{why} (again and again)")
        self._drop_graphs()
        self._watch.forget()

    def _drop_graphs(self) -> None:
        with captures_keep_buffers():
            for lane in self._lanes:
                if lane.is_free():
                    for graph in lane.graphs.values():
                        graph.close()
        # Backward passes still find calls that wait for theirs.
        self._dropped = [one for one in (*self._dropped, *self._lanes) if not one.is_free()]
        self._lanes.clear()
        self._backward_pool = None
        self.memory_bytes = 0

    def close(self) -> None:
        self.why = self.why or "speed_up was closed"
        self._drop_graphs()

    @property
    def unsettled(self) -> int:
        """How many calls ran eagerly, or were captured, on the way to a graph or to check one."""
        reasons = (_FIRST, _CHECKED, _BESIDE_CHECK, _NO_GRADIENT)
        return self.captures + sum(self.eager[reason] for reason in reasons)

    @property
    def rounding(self) -> str | None:
        """Why the last digits differ from the plain loop's; None if nothing is known to."""
        if not self.captures:
            return None
        casts = None
        if self._shares_casts:
            casts = (
                "it is called several times in one autocast block, and each call casts the weights "
                "anew, so the last digits differ from the plain loop's"
            )
        return join_reasons(self._watch.rounding, casts)

    def _graph_for(
        self, key: Hashable, call: Any, leaves: list[Any]
    ) -> tuple[_Lane, CapturedModel] | None:
        """A lane whose calls have all had their backward, and its graph for this key; captured now
        if there is none. None: run eagerly."""
        free = None
        for lane in self._lanes:
            if lane.is_free():
                graph = lane.graphs.get(key)
                if graph is not None:
                    return lane, graph
                free = free or lane
        self._uses[key] += 1
        seen = self._seen.setdefault(key, _Seen())
        if not seen.gradients and self._uses[key] <= self._after + _MAX_WAIT_FOR_BACKWARD:
            self._why_no_graph = _NO_GRADIENT
            return None
        if free is None and len(self._lanes) == _MAX_LANES:
            self._why_no_graph = f"{_MAX_LANES} calls wait for their backward already"
            return None
        if sum(len(lane.graphs) for lane in self._lanes) >= self._max_graphs:
            self._why_no_graph = f"{self._max_graphs} graphs are in use for other shapes"
            return None
        if self._lanes and free is None and self.is_autocast():
            self._shares_casts = True
        try:
            if free is None:
                free = _Lane(self._device.graph_pool())
                self._lanes.append(free)
            graph = self._capture(key, free, call, leaves, seen)
        except CaptureError as problem:
            self.give_up(describe_failure(problem), divides=True)
            return None
        free.graphs[key] = graph
        return free, graph

    _why_no_graph = ""

    def _capture(
        self, key: Hashable, lane: _Lane, call: Any, leaves: list[Any], seen: _Seen
    ) -> CapturedModel:
        device = self._device
        if (obstacle := self._obstacle()) is not None:
            raise CaptureError(obstacle)
        device.release_unused()
        # What the forward keeps, as much again while the backward runs, and the gradients.
        free, needed = device.memory().free, 2 * seen.kept_bytes
        if not self._gradients.buffers():
            needed += sum(one.nbytes for one in self._parameters if one.requires_grad)
        if needed > free:
            raise CaptureError(
                f"a graph would need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            )
        before_bytes = device.memory().reserved
        if self._backward_pool is None:
            self._backward_pool = device.graph_pool()
        before = StateBeforeCapture(StepState(device, self._forward, (self.model,), ()))
        host_draws, host_state = self._watch.host_draws(key), torch.get_rng_state()
        try:
            if host_draws is not None:
                host_draws.begin()  # so that the capture decides as the watched run did
            with captures_keep_buffers():
                graph = self._capture_both(lane.pool, call, leaves, seen)
            graph.host_draws = host_draws
            before.require_in_place()
        except torch.OutOfMemoryError as problem:
            raise CaptureError("the device has no memory for a graph's inputs") from problem
        finally:
            before.restore()
            torch.set_rng_state(host_state)
            torch.clear_autocast_cache()
        self._gradients.note_references()
        graph.uses += self._watch.read_by(key)
        self.captures += 1
        self.memory_bytes += max(0, device.memory().reserved - before_bytes)
        return graph

    def _capture_both(
        self, pool: object, call: Any, leaves: list[Any], seen: _Seen
    ) -> CapturedModel:
        device, guards = self._device, self._known()
        own = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        versions = [one._version for one in own]
        args, kwargs = rebuild_batch(call, own)
        torch.clear_autocast_cache()  # a cast that is cached now would be a stale weight
        with guards.aliases() as aliases, _inside():
            forward, result = device.capture(lambda: self._forward(*args, **kwargs), pool)
        if any(one._version != version for one, version in zip(own, versions, strict=True)):
            raise CaptureError("it writes to its arguments, of which a graph gets copies")
        given: dict[int, Callable[[Sequence[Any]], Any]] = {
            id(one): operator.itemgetter(at) for at, one in enumerate(own)
        }
        for real, alias in zip(self._parameters, aliases, strict=True):
            given[id(alias)] = functools.partial(_same, real)
        given |= {id(one): functools.partial(_same, one) for one in guards.buffers}
        require_plain(result)
        outputs = Outputs(result, given, addresses([*own, *guards.tensors]))
        del result
        places = [at for at, leaf in enumerate(leaves) if device.holds(leaf)]
        graph = CapturedModel(
            forward,
            self._gradients,
            [own[at].detach() for at in places],
            places,
            outputs,
            seen.draws,
            seen.writes,
        )
        self._capture_backward(graph, own, aliases, outputs.with_history(), seen)
        # Other memory may be given to a parameter while a call waits for its backward.
        graph.uses += [*own, *(one.detach() for one in guards.tensors)]
        return graph

    def _capture_backward(
        self,
        graph: CapturedModel,
        own: list[torch.Tensor],
        aliases: list[torch.Tensor],
        outputs: list[torch.Tensor],
        seen: _Seen,
    ) -> None:
        numbers = [number for number, one in enumerate(outputs) if one.requires_grad]
        graph.with_gradient = [n for n in numbers if n in seen.gradients] or numbers
        if not numbers:
            return
        graph.differentiated = [at for at, one in enumerate(own) if one.requires_grad]
        wanted = [at for at, one in enumerate(aliases) if one.requires_grad]
        sources = [*map(aliases.__getitem__, wanted), *map(own.__getitem__, graph.differentiated)]
        roots = [outputs[number] for number in graph.with_gradient]
        _require_own_leaves([outputs[number] for number in numbers], {id(one) for one in sources})
        graph.into = [
            _gradient_like(one, seen.gradients.get(number))
            for number, one in zip(graph.with_gradient, roots, strict=True)
        ]
        # The first graph's own gradients are the buffers. Later graphs copy theirs into them. What
        # they add is memory outside of the pool: in it, replays of earlier graphs may use it.
        takes = not self._gradients.buffers()
        if not takes:
            self._gradients.make_buffers(wanted)

        def work() -> tuple[list[int], list[torch.Tensor | None]]:
            found: list[torch.Tensor | None] = list(
                torch.autograd.grad(roots, sources, graph.into, allow_unused=True)
            )
            ours, others = found[: len(wanted)], found[len(wanted) :]
            by_number = {n: one for n, one in zip(wanted, ours, strict=True) if one is not None}
            found.clear()
            ours.clear()
            if takes:
                self._gradients.take(by_number, besides=[*graph.into, *others])
            else:
                self._gradients.write(by_number)
            return list(by_number), others

        # The loop's backward usually runs after its autocast block, and this call inside of it.
        kind, graph.autocast = self._device.torch_device.type, seen.autocast
        with torch.autocast(kind, torch.get_autocast_dtype(kind), graph.autocast):
            graph.backward, (found_for, graph.input_gradients) = self._device.capture(
                work, self._backward_pool
            )
        graph.numbers = tuple(found_for)

    # --- replays ----------------------------------------------------------------------------------

    def _replay(self, lane: _Lane, graph: CapturedModel, call: Any, leaves: list[Any]) -> Any:
        device, here = self._device, self._device.current_stream()
        host_state = None
        if graph.host_draws is not None:
            host_state = torch.get_rng_state()
            if not graph.host_draws.repeat():
                return self._run("numbers that it draws on the host ask for other work", *call)
        graph.gradients.forget_backward()
        if lane.stream is not here:
            if lane.stream is not None:
                here.wait_stream(lane.stream)
            lane.stream = here
        random_state = device.random_state() if graph.draws else None
        if graph.inputs:
            with torch.no_grad():
                torch._foreach_copy_(graph.inputs, [leaves[at] for at in graph.places])
        graph.forward.replay()
        self.replays += 1
        made = graph.outputs.copies()
        if graph.backward is not None:
            ticket = _Ticket()
            lane.ticket = weakref.ref(ticket)
            waiting = _Waiting(self, graph, call, leaves, ticket, random_state, host_state)
            numbers = graph.outputs.differentiable
            inputs = (leaves[at] for at in graph.differentiated)
            fresh = _Replayed.apply(  # type: ignore[no-untyped-call]
                waiting, [made[number] for number in numbers], self.anchor, *inputs
            )
            for number, one in zip(numbers, fresh, strict=True):
                made[number] = one
        return graph.outputs.result(made, leaves)

    def is_autocast(self) -> bool:
        return torch.is_autocast_enabled(self._device.torch_device.type)

    def gradient_missed(self, graph: CapturedModel, numbers: list[int]) -> None:
        """A graph's backward does not take the gradients of these outputs: capture it anew."""
        for lane in self._lanes:
            for key, one in list(lane.graphs.items()):
                if one is graph:
                    seen = self._seen.setdefault(key, _Seen())
                    seen.gradients |= {n: seen.gradients.get(n, ()) for n in numbers}
                    del lane.graphs[key]

    # --- for backward passes ----------------------------------------------------------------------

    def owns(self, tensor: object) -> bool:
        return id(tensor) in self._ids

    def is_pending(self) -> bool:
        return any(not lane.is_free() for lane in (*self._lanes, *self._dropped))

    @contextmanager
    def requested(self, parameters: Sequence[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        before = self._request
        self._request = _Request(list(parameters), {})
        try:
            yield self._request.found
        finally:
            self._request = before

    def run_backward(
        self, graph: CapturedModel, gradients: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Replay a backward. `gradients` are those of the outputs that it takes."""
        assert graph.backward is not None
        for mine, theirs in zip(graph.into, gradients, strict=True):
            if theirs is None:
                mine.zero_()
            else:
                mine.copy_(theirs)
        request, numbers, replay = self._request, graph.numbers, graph.backward.replay
        if request is not None:
            for parameter, one in graph.gradients.replay_for(
                numbers, replay, request.parameters
            ).items():
                request.add(parameter, one)
        elif torch._C._will_engine_execute_node(self._anchor_node):
            graph.gradients.replay(numbers, replay)
        else:  # `autograd.grad` of something else than the parameters
            graph.gradients.replay_for(numbers, replay, ())
        return [None if one is None else one.clone() for one in graph.input_gradients]

    def run_eager_backward(
        self,
        waiting: _Waiting,
        gradients: list[torch.Tensor | None],
        *,
        create_graph: bool,
    ) -> list[torch.Tensor | None]:
        """Compute the forward again, eagerly, and its backward."""
        graph, wanted = waiting.graph, [one for one in self._parameters if one.requires_grad]
        leaves = waiting.leaves
        waiting.require_unchanged()
        with (
            waiting.as_then(self._device, list(self.model.buffers())),
            _inside(),
            torch.enable_grad(),
        ):
            args, kwargs = waiting.call
            outputs = graph.outputs.find(self._forward(*args, **kwargs))
        pairs = [
            (outputs[number], one)
            for number, one in zip(graph.outputs.differentiable, gradients, strict=True)
            if one is not None
        ]
        sources = [*wanted, *(leaves[at] for at in graph.differentiated)]
        found: list[torch.Tensor | None] = list(
            torch.autograd.grad(
                *([one for one, _ in pairs], sources, [one for _, one in pairs]),
                create_graph=create_graph,
                allow_unused=True,
            )
        )
        request = self._request
        if request is not None:
            for parameter, one in zip(wanted, found, strict=False):
                if one is not None and any(parameter is wish for wish in request.parameters):
                    request.add(parameter, one)
        elif torch._C._will_engine_execute_node(self._anchor_node):
            for parameter, one in zip(wanted, found, strict=False):
                accumulate(parameter, one)
        return found[len(wanted) :]


@dataclass(slots=True)
class _Request:
    """A backward that names parameters, and what was found for them, by `id`."""

    parameters: list[torch.Tensor]
    found: dict[int, torch.Tensor]

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        before = self.found.get(id(parameter))
        self.found[id(parameter)] = gradient if before is None else before + gradient


class _Waiting:
    """A replayed call that waits for its backward: all that an eager one would need."""

    def __init__(
        self,
        owner: GraphedModel,
        graph: CapturedModel,
        call: Any,
        leaves: list[Any],
        ticket: _Ticket,
        random_state: torch.Tensor | None,
        host_state: torch.Tensor | None,
    ) -> None:
        self.owner, self.graph, self.ticket = owner, graph, ticket
        # Dropped when the backward is done: the loop may keep its loss.
        self.call: Any = call
        self.leaves: Any = leaves
        self.random_state = random_state
        self._host_state = host_state
        self._versions = [one._version if not one.is_inference() else 0 for one in leaves]
        kind = owner._device.torch_device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        owner, graph = self.owner, self.graph
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if torch.is_grad_enabled():
            owner.give_up(DOUBLE_BACKWARD)
            return owner.run_eager_backward(self, list(gradients), create_graph=True)
        by_number = dict(zip(graph.outputs.differentiable, gradients, strict=True))
        mine = [by_number.pop(number) for number in graph.with_gradient]
        if any(one is not None for one in by_number.values()):
            owner.gradient_missed(graph, [n for n, one in by_number.items() if one is not None])
            found = owner.run_eager_backward(self, list(gradients), create_graph=False)
        elif owner.is_autocast() != graph.autocast:
            found = owner.run_eager_backward(self, list(gradients), create_graph=False)
        else:
            found = owner.run_backward(graph, mine)
        if not keep:
            self.ticket.is_done = True
            self.call = self.leaves = self.random_state = None
        return found

    def require_unchanged(self) -> None:
        """Raise if the call could not be computed again."""
        versions = [one._version if not one.is_inference() else 0 for one in self.leaves]
        what = None
        if versions != self._versions:
            what = "an argument of it was written to in place after the call"
        elif self.graph.writes is not None:
            what = f"its forward writes to {self.graph.writes}"
        if what is not None:
            raise StepError(
                f"{self.owner.name}: this backward needs the forward once more (create_graph=True, "
                f"or a gradient of an output that had none before), and {what}: leave this model "
                "out of speed_up()"
            )

    @contextmanager
    def as_then(self, device: Device, buffers: list[torch.Tensor]) -> Iterator[None]:
        """In the block, random numbers and autocast are those of the call. Buffers are written as
        in any forward, and get their content back."""
        now = None if self.random_state is None else device.random_state()
        contents = [one.clone() for one in buffers]
        kind, dtype, enabled = self._autocast
        if self.random_state is not None:
            device.set_random_state(self.random_state)
        host_now = torch.get_rng_state()
        if self._host_state is not None:
            torch.set_rng_state(self._host_state)
        try:
            with torch.autocast(kind, dtype, enabled):
                yield
        finally:
            with torch.no_grad():
                for one, content in zip(buffers, contents, strict=True):
                    one.copy_(content)
            if self._host_state is not None:
                torch.set_rng_state(host_now)
            if now is not None:
                device.set_random_state(now)


class _Context(Protocol):
    """What autograd keeps of a replayed call until its backward."""

    waiting: _Waiting
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Replayed(torch.autograd.Function):
    """The outputs of a replayed call, with one node for all of its backward."""

    @staticmethod
    def forward(ctx: _Context, *args: Any) -> Any:
        waiting, outputs, anchor, *_ = args
        ctx.waiting = waiting
        # For PyTorch's own error on a second backward without retain_graph.
        ctx.save_for_backward(anchor)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  raises if it has been freed
        return None, None, None, *ctx.waiting.backward(gradients)


DOUBLE_BACKWARD = (
    "its gradients are differentiated again (create_graph=True), and a graph's cannot be"
)


@contextmanager
def _inside() -> Iterator[None]:
    before, _running.inside = _running.inside, True
    try:
        yield
    finally:
        _running.inside = before


def _same(tensor: torch.Tensor, leaves: Sequence[Any]) -> torch.Tensor:
    return tensor


def _gradient_like(output: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Memory for an output's gradient, laid out as those that were seen."""
    dense = torch.empty_like(output, device="meta").contiguous().stride()
    if strides is not None and sorted(strides) == sorted(dense):
        return torch.zeros_like(output).as_strided(output.size(), strides).detach()
    return torch.zeros(output.shape, dtype=output.dtype, device=output.device)


def _require_own_leaves(outputs: list[torch.Tensor], own: set[int]) -> None:
    """Raise if gradients would flow to a tensor that is neither a parameter nor an argument."""
    todo: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise CaptureError(
                f"it uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is "
                "none of its parameters: register it as one"
            )
        todo += [one for one, _ in node.next_functions]
