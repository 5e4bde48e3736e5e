"""Pools of a model's forward graphs, each with the call that waits for its backward.

Forward graphs keep what the backward needs in their pool. So a pool, here called a lane, has one
call at most that waits for its backward; a second such call gets a lane of its own. Backward graphs
have another pool: what they free is no memory of a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.capture.models.captured_model import CallKind, CapturedModel
from headrace.device import Device, Stream

# Calls that may wait for their backward at once and still be replays. In the plain loop they keep
# as much memory, but not beyond the step: so there are more lanes if all of them need little.
_MAX_LANES, _MAX_SMALL_LANES = 3, 8
_SMALL_BYTES = 256_000_000


class Ticket:
    """A call that waits for its backward, as long as autograd keeps it."""

    __slots__ = ("__weakref__", "_is_done")

    def __init__(self) -> None:
        self._is_done = False

    def is_done(self) -> bool:
        return self._is_done

    def done(self) -> None:
        self._is_done = True


class ReplayOrder:
    """Replays that use the same memory, on whatever streams: each runs after those before it."""

    __slots__ = ("_stream",)

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def move_to(self, here: Stream) -> None:
        """The next replay is on this stream."""
        if self._stream is not here:
            if self._stream is not None:
                here.wait_stream(self._stream)
            self._stream = here


@dataclass(slots=True)
class Lane:
    """A pool of forward graphs, and the call that waits for its backward, if one does."""

    pool: object
    graphs: dict[CallKind, CapturedModel] = field(default_factory=dict)
    _ticket: Callable[[], Ticket | None] = lambda: None
    order: ReplayOrder = field(default_factory=ReplayOrder)

    def is_free(self) -> bool:
        ticket = self._ticket()
        return ticket is None or ticket.is_done()

    def take(self) -> Ticket:
        """A call uses the lane from now on, until its backward."""
        ticket = Ticket()
        self._ticket = weakref.ref(ticket)
        return ticket


class ModelLanes:
    """A model's graphs."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes: list[Lane] = []
        # Of graphs that are dropped, but have calls that wait.
        self._dropped: list[Lane] = []
        self._backward_pool: object | None = None
        # Whether calls of one autocast block have waited at once for their backward, and whether
        # more calls have waited than get lanes.
        self._shared_casts = self._was_full = False

    def find(self, kind: CallKind) -> tuple[Lane | None, CapturedModel | None]:
        """A lane whose calls have all had their backward, and its graph for calls of this kind, if
        one has it; else a free one."""
        free = None
        for lane in self._lanes:
            if lane.is_free():
                graph = lane.graphs.get(kind)
                if graph is not None:
                    return lane, graph
                free = free or lane
        return free, None

    def open(self) -> Lane:
        """A new lane."""
        if self._lanes and torch.is_autocast_enabled(self._device.torch_device.type):
            self._shared_casts = True
        self._lanes.append(Lane(self._device.graph_pool()))
        return self._lanes[-1]

    def is_full(self, kind: CallKind) -> bool:
        """Whether a call of this kind, which finds no lane free, gets none."""
        count = len(self._lanes)
        is_small = (count + 1) * kind.kept_bytes <= _SMALL_BYTES
        full = count >= (_MAX_SMALL_LANES if is_small else _MAX_LANES)
        self._was_full |= full
        return full

    def backward_pool(self) -> object:
        if self._backward_pool is None:
            self._backward_pool = self._device.graph_pool()
        return self._backward_pool

    @property
    def rounding(self) -> str | None:
        """Why last digits differ from the plain loop's, which casts a weight once a block, and adds
        all of a weight's gradients in turn."""
        if self._shared_casts:
            return (
                "it is called several times in one autocast block, and each call casts the weights "
                "anew, so the last digits differ from the plain loop's"
            )
        kinds = [kind for lane in self._lanes[1:] for kind in lane.graphs]
        if self._was_full:
            why = "more of its calls wait for one backward than have graphs"
        elif any(kind.sums for kind in kinds):
            why = "several of its calls wait for one backward, and use a weight more than once"
        else:
            return None
        return f"{why}: gradients are added in another order, so the last digits may differ"

    def __len__(self) -> int:
        return len(self._lanes)

    def count_graphs(self) -> int:
        return sum(len(lane.graphs) for lane in self._lanes)

    def is_pending(self) -> bool:
        """Whether a call waits for its backward."""
        return any(not lane.is_free() for lane in (*self._lanes, *self._dropped))

    def forget(self, graph: CapturedModel) -> None:
        """Capture a graph anew at its next use."""
        for lane in self._lanes:
            lane.graphs = {kind: one for kind, one in lane.graphs.items() if one is not graph}

    def drop(self) -> None:
        """Drop all graphs. Backward passes still find calls that wait for theirs."""
        for lane in self._lanes:
            if lane.is_free():
                for graph in lane.graphs.values():
                    graph.close()
        self._dropped = [one for one in (*self._dropped, *self._lanes) if not one.is_free()]
        self._lanes.clear()
        self._backward_pool = None
