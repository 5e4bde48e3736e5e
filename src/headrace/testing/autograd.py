"""Backward on the fake device: each node on its forward's stream, as PyTorch's engine does it.

On an accelerator the engine runs a backward operation on the stream its forward operation ran on,
whatever stream `backward()` was called under; makes each node's stream wait for the streams of
the nodes that feed it; and makes the caller's stream wait for all of them at the end. Here the CPU
engine does the arithmetic, and hooks on each node say when it begins and ends.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from headrace.testing.checker import Clock, join
from headrace.testing.races import Site

if TYPE_CHECKING:
    from headrace.testing.fake import FakeDevice, FakeStream

_KEY = "headrace.forward"
_MOST_TASKS = 64
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Forward:
    """What is remembered at a node about the operation that made it."""

    number: int
    stream: FakeStream
    site: Site


@dataclass(slots=True)
class _Task:
    """One run of the engine."""

    caller: FakeStream
    #: For each node that has not begun: what the nodes that feed it knew, and when they ended.
    pending: dict[int, tuple[Clock, int]] = field(default_factory=dict)
    streams: set[FakeStream] = field(default_factory=set)


# A run that raised leaves its task behind; the oldest are dropped.
_tasks: OrderedDict[int, _Task] = OrderedDict()


def tag(outputs: list[torch.Tensor], stream: FakeStream, site: Site) -> None:
    """Remember `stream` and `site` at all nodes that these outputs brought into being."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while todo:
        node: Any = todo.pop()
        if _KEY in node.metadata:
            continue
        node.metadata[_KEY] = _Forward(next(_numbers), stream, site)
        node.register_prehook(_begins)
        node.register_hook(_ends)
        todo += [feeding for feeding, _ in node.next_functions if feeding is not None]


def stream_of_node(device: FakeDevice, chosen: FakeStream) -> FakeStream:
    """The stream that work goes to now: the running node's, unless a hook chose another."""
    forward = _running()
    if forward is None or forward.stream.device is not device:
        return chosen
    task = _tasks.get(torch._C._current_graph_task_id())
    return forward.stream if task is not None and task.caller is chosen else chosen


def forward_site() -> Site | None:
    """The line of the forward operation whose backward is running, if one is."""
    forward = _running()
    return None if forward is None else forward.site


def in_node() -> bool:
    """Whether a node that belongs to a fake device is running."""
    return _running() is not None


def _running() -> _Forward | None:
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(_KEY)


def _begins(gradients: object) -> None:
    forward = _running()
    assert forward is not None
    stream, device = forward.stream, forward.stream.device
    number = torch._C._current_graph_task_id()
    with device.lock:
        task = _tasks.get(number)
        if task is None:
            chosen = device._current.get()
            task = _tasks[number] = _Task(chosen)  # type: ignore[arg-type]
            while len(_tasks) > _MOST_TASKS:
                _tasks.popitem(last=False)
            Variable._execution_engine.queue_callback(lambda: _finished(number))
        # A root is fed by whatever the caller's stream holds: the gradient came from there.
        caller = task.caller.actor
        clock, ends_ns = task.pending.pop(forward.number, (caller.clock, caller.time_ns))
        device.launch(stream.actor)
        join(stream.actor.clock, clock)
        stream.actor.time_ns = max(stream.actor.time_ns, ends_ns)
        task.streams.add(stream)


def _ends(gradients_in: object, gradients_out: object) -> None:
    forward = _running()
    assert forward is not None
    task = _tasks.get(torch._C._current_graph_task_id())
    node: Any = torch._C._current_autograd_node()
    if task is None:
        return
    actor = forward.stream.actor
    with forward.stream.device.lock:
        for fed, _ in node.next_functions:
            below = None if fed is None else fed.metadata.get(_KEY)
            if below is None:
                continue
            clock, ends_ns = task.pending.setdefault(below.number, ({}, 0))
            join(clock, actor.clock)
            task.pending[below.number] = (clock, max(ends_ns, actor.time_ns))


def _finished(number: int) -> None:
    """The engine's end: the caller's stream waits for every stream that was used."""
    task = _tasks.pop(number, None)
    if task is None:
        return
    with task.caller.device.lock:
        caller = task.caller.actor
        for stream in task.streams:
            join(caller.clock, stream.actor.clock)
            caller.time_ns = max(caller.time_ns, stream.actor.time_ns)
