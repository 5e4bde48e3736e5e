"""`GraphedUpdate`: an optimizer's step that is replayed as a graph, in anybody's loop.

`optimizer.step` is replaced on the instance. The parameter groups stay the user's: learning rates
are read from them at each step and written to the device, and other settings are part of the key
that a graph belongs to. Only while the step is captured do the groups hold what a graph needs.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch

from headrace.capture.capturable_optimizer import CapturableOptimizer, takes_rates_as_tensors
from headrace.capture.gradients import captures_keep_buffers
from headrace.capture.memory import StateBeforeCapture
from headrace.capture.obstacles import state_obstacle
from headrace.capture.report import describe_failure
from headrace.capture.state import StepState
from headrace.device import Device, Graph
from headrace.errors import CaptureError

_GRADIENT = operator.attrgetter("grad")
_MAX_GRAPHS = 8
# After this many steps in a row with settings or gradients of their own, none is captured any more.
_MAX_UNSETTLED = 20
_SCALER = ("grad_scale", "found_inf")
_FIRST, _NEW = "the first steps", "its gradients or settings are new"


class GraphedUpdate:
    """Replays an optimizer's step. `after` steps run eagerly first."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: Device, *, name: str, after: int
    ) -> None:
        self.optimizer, self.name = optimizer, name
        self._device, self._after = device, after
        self._step: Callable[..., Any] = optimizer.step
        self._graphs: dict[Hashable, _CapturedUpdate] = {}
        self._pool: object | None = None
        self._capturable: CapturableOptimizer | None = None
        self._last: tuple[Hashable, list[Any]] | None = None
        self._steps = self._unsettled = 0
        self._memory: _UpdateMemory | None = None
        #: Why it is not captured (any more), and how its results differ from the plain loop's.
        self.why: str | None = None
        self.rounding: str | None = None
        self.replays = self.captures = 0
        #: Steps that ran eagerly, by reason.
        self.eager: Counter[str] = Counter()
        self.memory_bytes = 0

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.why is not None or torch.compiler.is_compiling() or self._device.is_capturing():
            return self._run(self.why or "called inside another captured part", closure)
        loss = None
        if closure is not None:
            if not _calls_closure_first(self.optimizer):
                self.give_up(
                    f"{type(self.optimizer).__name__} may call its closure more than once in a "
                    "step, or at another time than first"
                )
                return self._run(str(self.why), closure)
            with torch.enable_grad():
                loss = closure()
        why = self._try()
        if why is not None:
            self._run(why, None)
        return loss

    def _run(self, why: str, closure: Callable[[], Any] | None) -> Any:
        self.eager[why] += 1
        return self._step() if closure is None else self._step(closure)

    def _try(self) -> str | None:
        """Replay the step, or say why it must run eagerly."""
        optimizer = self.optimizer
        self._steps += 1
        if self._steps <= self._after:
            return _FIRST
        if self._memory is not None and self._memory.has_moved():
            self._drop_graphs()
            self._capturable = None  # state that was loaded may count on the host again
        parameters = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        gradients = list(map(_GRADIENT, parameters))
        try:
            key = self._key(gradients)
        except CaptureError as problem:
            self.give_up(str(problem))
            return self.why
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture_if_settled(key, gradients)
            if graph is None:
                return self.why or _NEW
        graph.replay(optimizer)
        self.replays += 1
        return None

    def _key(self, gradients: list[Any]) -> Hashable:
        """What a graph of the step depends on: all settings but the learning rates, and where the
        gradients are."""
        optimizer = self.optimizer
        by_tensor = takes_rates_as_tensors(optimizer)
        settings = [
            (name, _comparable(value))
            for group in optimizer.param_groups
            for name, value in group.items()
            if name not in _NOT_IN_KEY and (name != "lr" or not by_tensor)
        ]
        return (
            tuple(settings),
            tuple(getattr(optimizer, name, None) is not None for name in _SCALER),
            _addresses(gradients),
        )

    def _capture_if_settled(self, key: Hashable, gradients: list[Any]) -> _CapturedUpdate | None:
        """Capture the step, if the last one had the same settings and the same gradients."""
        last, self._last = self._last, (key, list(map(id, gradients)))
        if last != self._last:
            self._unsettled += 1
            if self._unsettled >= _MAX_UNSETTLED:
                self.give_up(
                    "each step finds other settings, or its gradients in other memory as an eager "
                    "backward leaves them, and a graph would use the old ones"
                )
            return None
        self._unsettled = 0
        if len(self._graphs) >= _MAX_GRAPHS:
            self._drop_graphs()
        try:
            graph = self._graphs[key] = self._capture()
        except CaptureError as problem:
            self.give_up(describe_failure(problem))
            return None
        return graph

    def _capture(self) -> _CapturedUpdate:
        device, optimizer = self._device, self.optimizer
        state = StepState(device, self._step, (), (optimizer,))
        if (obstacle := state_obstacle(state)) is not None:
            raise CaptureError(obstacle)
        if not all(map(device.holds, state.parameters())):
            raise CaptureError(f"some of its parameters are not on {device}")
        if self._pool is None:
            self._pool = device.graph_pool()
        first, before_bytes = self._capturable is None, device.memory().reserved
        capturable = self._capturable or CapturableOptimizer(device, optimizer)
        inputs = _ScalerInputs(optimizer)
        before = StateBeforeCapture(state)
        try:
            if capturable.rates is not None:
                capturable.rates.write()
            with ExitStack() as stack:
                stack.enter_context(captures_keep_buffers())
                stack.enter_context(_capturable_groups(optimizer))
                if capturable.rates is not None:
                    stack.enter_context(capturable.rates.in_param_groups())
                stack.enter_context(inputs.in_place())
                graph, _ = device.capture(self._step, self._pool)
            if before.optimizer_changed():
                graph.close()
                raise CaptureError("its step makes new state each time")
        except BaseException:
            if first:
                capturable.undo()
            raise
        finally:
            before.restore()
        if first:
            self.rounding = capturable.rounding
        capturable.plain_groups()
        self._capturable = capturable
        self._memory = _UpdateMemory(optimizer)
        self.captures += 1
        self.memory_bytes += max(0, device.memory().reserved - before_bytes)
        return _CapturedUpdate(graph, capturable, inputs, state.tensors())

    @property
    def unsettled(self) -> int:
        """How many steps ran eagerly, or were captured, on the way to a graph."""
        return self.captures + self.eager[_FIRST] + self.eager[_NEW]

    def give_up(self, why: str) -> None:
        """Run all later steps eagerly."""
        if self.why is None:
            self.why = why
            self._drop_graphs()
            self._device.warn_once(
                f"parts: {self.name}: {why}", "%s runs eagerly, because %s", self.name, why
            )

    def close(self) -> None:
        self.why = self.why or "speed_up was closed"
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        with captures_keep_buffers():
            for graph in self._graphs.values():
                graph.graph.close()
        self._graphs.clear()
        self._pool = self._memory = self._last = None
        self.memory_bytes = 0


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step begins with one call of its closure, as those of PyTorch's optimizers do."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def _addresses(gradients: list[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(torch.Tensor.data_ptr, gradients))
    except TypeError:  # some are None
        return tuple(0 if one is None else one.data_ptr() for one in gradients)


def _comparable(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return id(value)
    return value if isinstance(value, int | float | str | bool | tuple | None) else repr(value)


# What a graph does not depend on, or what is checked apart.
_NOT_IN_KEY = frozenset({"params", "initial_lr", "capturable", "foreach", "param_names"})


class _CapturedUpdate:
    """A step as a graph, with the memory that it reads besides parameters and state."""

    def __init__(
        self,
        graph: Graph,
        capturable: CapturableOptimizer,
        inputs: _ScalerInputs,
        uses: list[torch.Tensor],
    ) -> None:
        self.graph, self._inputs, self._uses = graph, inputs, uses
        self._rates = capturable.rates

    def replay(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rates is not None:
            self._rates.write()
        self._inputs.write(optimizer)
        self.graph.replay()


class _ScalerInputs:
    """What a gradient scaler gives a fused optimizer before each step: new tensors every time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._own = {
            name: getattr(optimizer, name).clone()
            for name in _SCALER
            if getattr(optimizer, name, None) is not None
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In the block the optimizer has these tensors."""
        theirs = {name: getattr(self._optimizer, name) for name in self._own}
        try:
            for name, one in self._own.items():
                setattr(self._optimizer, name, one)
            yield
        finally:
            for name, one in theirs.items():
                setattr(self._optimizer, name, one)

    def write(self, optimizer: Any) -> None:
        for name, one in self._own.items():
            one.copy_(getattr(optimizer, name))


class _UpdateMemory:
    """Where parameters were at a capture, and which tensors the optimizer had for them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._held = [*self._holders()]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._addresses = list(map(torch.Tensor.data_ptr, self._parameters))

    def has_moved(self) -> bool:
        return (
            not all(map(operator.is_, self._holders(), self._held))
            or list(map(torch.Tensor.data_ptr, self._parameters)) != self._addresses
        )

    def _holders(self) -> Iterator[Any]:
        """All that must be the same object, and an end: more or fewer objects differ from it."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        parameters = chain.from_iterable(map(operator.itemgetter("params"), groups))
        own = chain.from_iterable(map(_VALUES, state.values()))
        return chain((state,), parameters, own, _END)


_END = (object(),)
# Each parameter has a dict of its own.
_VALUES = operator.methodcaller("values")


@contextmanager
def _capturable_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the block, all groups that know the setting are capturable."""
    before = [(group, group["capturable"]) for group in optimizer.param_groups
              if "capturable" in group]  # fmt: skip
    try:
        for group, _ in before:
            group["capturable"] = True
        yield
    finally:
        for group, value in before:
            group["capturable"] = value
