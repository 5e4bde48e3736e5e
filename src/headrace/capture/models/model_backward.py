"""The backward of replayed calls: one autograd node for each, and a small tensor that it hangs on.

Autograd calls back once, not once a parameter. What it would do besides is done here: gradients
for `p.grad`, or for a backward that names its inputs; and an eager backward where a graph's cannot
serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.models.backward_watch import accumulate, watch_backwards
from headrace.capture.models.captured_model import BackwardKey, CapturedBackward, CapturedModel
from headrace.capture.models.eager import DOUBLE_BACKWARD, running_inside
from headrace.capture.models.lanes import ReplayOrder
from headrace.capture.models.waiting_call import WaitingCall
from headrace.capture.state.state import StepState

Gradients = list[torch.Tensor | None]


class Owner(Protocol):
    """The graphed model, as its backward passes see it."""

    def is_pending(self) -> bool: ...

    def give_up(self, why: str) -> None: ...

    def backward_missed(self, graph: CapturedModel, key: BackwardKey) -> None:
        """A forward's graph has no such backward: this one runs eagerly."""


class ModelBackward:
    """A model's backward passes, watched for those that name its parameters."""

    def __init__(self, step: StepState, owner: Owner, name: str) -> None:
        self._step = step
        self._owner = owner
        self._name = name
        self._settings = KernelSettings(step.device)
        self.anchor = torch.zeros((), device=step.device.torch_device, requires_grad=True)
        self._anchor_node = get_gradient_edge(self.anchor).node
        self._request: _Request | None = None
        # All backward graphs of a model share their pool and the memory of its gradients.
        self._order = ReplayOrder()
        watch_backwards(self)

    def owned(self, tensors: Iterable[object]) -> list[torch.Tensor]:
        own = {id(one) for one in self._step.modules[0].parameters()}
        return [one for one in tensors if isinstance(one, torch.Tensor) and id(one) in own]

    def is_pending(self) -> bool:
        return self._owner.is_pending()

    @contextmanager
    def requested(self, parameters: Sequence[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        before = self._request
        self._request = _Request(list(parameters))
        try:
            yield self._request.found
        finally:
            self._request = before

    def outputs(
        self, waiting: WaitingCall, made: list[torch.Tensor], leaves: list[Any]
    ) -> list[torch.Tensor]:
        """The outputs of a replayed call, `made`, with their autograd history."""
        numbers = waiting.graph.outputs.differentiable
        inputs = [leaves[at] for at in waiting.graph.differentiated]
        fresh = _Replayed.apply(  # type: ignore[no-untyped-call]
            self, waiting, [made[number] for number in numbers], self.anchor, *inputs
        )
        for number, one in zip(numbers, fresh, strict=True):
            made[number] = one
        return made

    def run(self, waiting: WaitingCall, gradients: Sequence[torch.Tensor | None]) -> Gradients:
        """The backward of a call: gradients of its inputs, for those of its outputs."""
        graph = waiting.graph
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if torch.is_grad_enabled():
            self._owner.give_up(DOUBLE_BACKWARD)
            return self._run_eagerly(waiting, gradients, create_graph=True)
        pairs = list(zip(graph.outputs.differentiable, gradients, strict=True))
        given = {number: one for number, one in pairs if one is not None}
        key = BackwardKey(tuple(given), self._settings.now())
        backward = graph.backwards.get(key)
        if not given:
            found: Gradients = [None] * len(graph.differentiated)
        elif backward is not None:
            found = self._replay(waiting, backward, given)
        else:
            self._owner.backward_missed(graph, key)
            found = self._run_eagerly(waiting, gradients, create_graph=False)
        if not keep:
            waiting.finish()
        return found

    def _replay(
        self, waiting: WaitingCall, backward: CapturedBackward, given: dict[int, torch.Tensor]
    ) -> Gradients:
        buffers, request = waiting.graph.gradients, self._request
        self._order.move_to(self._step.device.current_stream())
        backward.take_gradients(list(given.values()))
        numbers, replay = backward.numbers, backward.graph.replay
        if (checked := waiting.take_checked()) is not None:
            names = [name for name, _ in self._step.modules[0].named_parameters()]
            replay = checked.backward(
                replay,
                given,
                {names[number]: number for number in numbers},
                lambda name: buffers.buffers().get(names.index(name)),
                waiting.graph.differentiated,
                backward.input_gradients,
            )
        if request is not None:
            found = buffers.replay_for(numbers, replay, request.parameters)
            for parameter, one in found.items():
                request.add(parameter, one)
        elif torch._C._will_engine_execute_node(self._anchor_node):
            buffers.replay(numbers, replay)
        else:  # `autograd.grad` of something else than the parameters
            buffers.replay_for(numbers, replay, ())
        return [None if one is None else one.clone() for one in backward.input_gradients]

    def _run_eagerly(
        self, waiting: WaitingCall, gradients: Sequence[torch.Tensor | None], *, create_graph: bool
    ) -> Gradients:
        """Compute the forward again, eagerly, and its backward."""
        graph = waiting.graph
        wanted = [one for one in graph.gradients.parameters if one.requires_grad]
        leaves = waiting.leaves
        waiting.require_repeatable(self._name)
        model, function = self._step.modules[0], self._step.function
        with (
            waiting.as_then(model, self._settings),
            running_inside(),
            torch.enable_grad(),
        ):
            outputs = graph.outputs.find(waiting.run(function))
        pairs = [
            (outputs[number], one)
            for number, one in zip(graph.outputs.differentiable, gradients, strict=True)
            if one is not None
        ]
        sources = [*wanted, *(leaves[at] for at in waiting.graph.differentiated)]
        found: Gradients = list(
            torch.autograd.grad(
                *([one for one, _ in pairs], sources, [one for _, one in pairs]),
                create_graph=create_graph,
                allow_unused=True,
            )
        )
        self._give(graph, dict(zip(wanted, found, strict=False)), create_graph=create_graph)
        return found[len(wanted) :]

    def _give(
        self,
        graph: CapturedModel,
        found: dict[torch.Tensor, torch.Tensor | None],
        *,
        create_graph: bool,
    ) -> None:
        """Hand out gradients of an eager backward. Beside those of graphs, they are a part of the
        sum of the backward that is running: else the last digits would differ."""
        request = self._request
        if request is not None:
            for parameter, one in found.items():
                if one is not None:
                    request.add(parameter, one)
        if request is not None or not torch._C._will_engine_execute_node(self._anchor_node):
            return
        if create_graph:
            for parameter, one in found.items():
                accumulate(parameter, one)
            return
        buffers = graph.gradients
        numbers = {id(one): number for number, one in enumerate(buffers.parameters)}
        mine = {numbers[id(weight)]: one for weight, one in found.items() if one is not None}
        buffers.make_buffers(list(mine))
        buffers.note_references()
        buffers.replay(list(mine), lambda: buffers.write(mine))


class _Request:
    """A backward that names parameters, and what was `found` for them, by `id`."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.found: dict[int, torch.Tensor] = {}

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if any(parameter is one for one in self.parameters):
            before = self.found.get(id(parameter))
            self.found[id(parameter)] = gradient if before is None else before + gradient


class _Context(Protocol):
    """What autograd keeps of a replayed call until its backward."""

    run: Callable[[Sequence[torch.Tensor | None]], Gradients]
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Replayed(torch.autograd.Function):
    """The outputs of a replayed call, with one node for all of its backward."""

    @staticmethod
    def forward(ctx: _Context, *args: Any) -> Any:
        backward, waiting, outputs, anchor, *_ = args
        ctx.run = lambda gradients: backward.run(waiting, gradients)
        # For PyTorch's own error on a second backward without retain_graph.
        ctx.save_for_backward(anchor)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  raises if it has been freed
        found = ctx.run(gradients)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            del ctx.run  # a loss that is kept does not keep the model
        return None, None, None, None, *found
