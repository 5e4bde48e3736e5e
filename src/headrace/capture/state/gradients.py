"""Gradients that a model's backward graphs leave in memory of their own: one buffer a parameter.

A graph writes to the memory that it was captured with. All graphs of a model write to the same
buffers, so an update that reads `p.grad` always finds it in the same place. Three things must stay
as they are in an eager loop:

- What somebody holds is never overwritten. A held buffer is `p.grad` of an earlier backward, or a
  variable of the user's, or a view. Its content is put aside before the replay.
- All contributions of one backward are summed first, and then added to `p.grad`.
- A gradient that is added to keeps its tensor: whoever has it sees the sum.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from headrace.device import Device, Stream

_GRADIENT = operator.attrgetter("grad")
_IS_NONE = functools.partial(operator.is_, None)
_STORAGE = torch.Tensor.untyped_storage
#: All that exist: captures, also of other things, may refer to their memory.
_all: weakref.WeakSet[GradientBuffers] = weakref.WeakSet()


class GradientBuffers:
    """A model's gradients. `parameters` are numbered by their position."""

    def __init__(self, device: Device, parameters: Sequence[torch.Tensor]) -> None:
        self._device = device
        self.parameters = list(parameters)
        #: By number; only those that a graph has given a gradient.
        self._buffers: dict[int, torch.Tensor] = {}
        self._memory: dict[int, int] = {}
        # The same memory by other tensors, which nobody can give other memory (`p.grad.data = …`).
        self._own: dict[int, torch.Tensor] = {}
        self._addresses: dict[int, int] = {}
        # How many references there are, to the tensor and its memory, while nobody holds them.
        self._own_objects: dict[int, int] = {}
        self._own_memory: dict[int, int] = {}
        # Memory for what must outlive a replay: what others hold, and a backward's earlier parts.
        self._aside: dict[int, torch.Tensor] = {}
        self._partial: dict[int, torch.Tensor] = {}
        self._sum: _GradientSum | None = None
        _all.add(self)

    def buffers(self) -> dict[int, torch.Tensor]:
        """The buffers by their parameter's number."""
        return self._buffers

    def add_buffer(self, number: int, buffer: torch.Tensor) -> None:
        """Take `buffer` as a parameter's. The caller keeps no reference."""
        self._buffers[number] = buffer
        self._memory[number] = buffer.untyped_storage()._cdata
        self._own[number], self._addresses[number] = buffer.detach(), buffer.data_ptr()

    def make_buffers(self, numbers: Sequence[int]) -> None:
        """Allocate buffers for the parameters that have none."""
        for number in numbers:
            if number not in self._buffers:
                self.add_buffer(number, torch.empty_like(self.parameters[number]).detach())

    def take(
        self, gradients: dict[int, torch.Tensor], besides: Sequence[torch.Tensor | None]
    ) -> None:
        """In a capture: make its gradients the buffers, where they are laid out as `p.grad` must
        be, and nothing else has their memory. Empties `gradients`."""
        used = {one.untyped_storage()._cdata for one in besides if one is not None}
        for number in list(gradients):
            one, parameter = gradients[number], self.parameters[number]
            memory = one.untyped_storage()
            fits = one.stride() == torch.empty_like(parameter, device="meta").stride()
            if not fits or memory._cdata in used or memory.nbytes() != one.nbytes:
                one = torch.empty_like(parameter).detach().copy_(one)
            used.add(memory._cdata)
            self.add_buffer(number, one.detach())

    def write(self, gradients: dict[int, torch.Tensor]) -> None:
        """In a capture: write gradients to the buffers."""
        if gradients:
            torch._foreach_copy_(_pick(self._buffers, gradients), list(gradients.values()))

    def note_references(self) -> None:
        """Count the references to buffers that have been added. Nobody else may hold any yet."""
        new = [number for number in self._buffers if number not in self._own_objects]
        for number, objects, memory in zip(new, *self._references(new), strict=True):
            self._own_objects[number], self._own_memory[number] = objects, memory

    def missing_bytes(self) -> int:
        """The memory that the first capture will take for gradients."""
        trained = (one for one in self.parameters if one.requires_grad)
        return 0 if self._buffers else sum(one.nbytes for one in trained)

    def nbytes(self) -> int:
        kinds = (self._buffers, self._aside, self._partial)
        return sum(one.nbytes for kind in kinds for one in kind.values())

    # --- one backward -----------------------------------------------------------------------------

    def replay(self, numbers: Sequence[int], replay: Callable[[], None]) -> None:
        """Replay a backward graph that writes the gradients of these parameters, as a part of the
        backward that is running. At its end, `p.grad` is what an eager backward leaves."""
        if self._sum is None or self._sum.task != torch._C._current_graph_task_id():
            self._begin()
        assert self._sum is not None
        total = self._sum
        self._put_aside(self._held(numbers, besides=total.aside), total.aside)
        again = [number for number in numbers if number in total.numbers] if total.numbers else []
        self._copy(self._partial, self._buffers, again)
        replay()
        if again:
            sums, parts = _pick(self._buffers, again), _pick(self._partial, again)
            torch._foreach_add_(sums, parts)
        total.numbers |= dict.fromkeys(numbers)
        total.streams.add(self._device.current_stream())

    def replay_for(
        self,
        numbers: Sequence[int],
        replay: Callable[[], None],
        wanted: Sequence[torch.Tensor],
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Replay a backward graph whose gradients are not for `p.grad`. Returns copies of those of
        the wanted parameters."""
        inner: dict[int, None] = {}
        open_part = [] if self._sum is None else list(self._sum.numbers)
        kept = {n: self._buffers[n].clone() for n in self._held(numbers, besides=inner)}
        kept |= {n: self._buffers[n].clone() for n in open_part if n in numbers and n not in kept}
        replay()
        wishes = {id(one) for one in wanted}
        found = {
            self.parameters[number]: self._buffers[number].clone()
            for number in numbers
            if id(self.parameters[number]) in wishes
        }
        if kept:
            torch._foreach_copy_(_pick(self._buffers, kept), list(kept.values()))
        return found

    def forget_backward(self) -> None:
        """Call outside of any backward: one that has failed has never ended."""
        self._sum = None

    def _begin(self) -> None:
        outer = self._sum
        if outer is not None:  # a backward inside another one: what that has so far cannot stay
            self._give_out(list(outer.numbers), outer.aside)
            outer.numbers.clear()
            outer.aside.clear()
        self._sum = _GradientSum(torch._C._current_graph_task_id(), outer)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _end(self) -> None:
        """The end of a backward: give each parameter its gradient. Runs on the caller's stream."""
        total, self._sum = self._sum, None
        if total is None:
            return
        self._sum = total.outer
        here = self._device.current_stream()
        for stream in total.streams:
            if stream is not here:
                here.wait_stream(stream)
        with torch.no_grad():
            self._give_out(list(total.numbers), total.aside)

    def _give_out(self, numbers: list[int], aside: dict[int, None]) -> None:
        pick = _picker(tuple(numbers))
        if not aside and all(map(_IS_NONE, map(_GRADIENT, pick(self.parameters)))):
            _give(pick(self.parameters), pick(self._buffers))
            return
        added: list[int] = []  # `p.grad` is the buffer: what was in it is aside
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        restored: list[int] = []
        for number in numbers:
            parameter, buffer = self.parameters[number], self._buffers[number]
            gradient = parameter.grad
            if gradient is buffer:
                added.append(number)
                continue
            if gradient is not None:
                others.append((gradient, buffer))
            elif number in aside:
                parameter.grad = buffer.clone()
            else:
                parameter.grad = buffer
            if number in aside:
                restored.append(number)
        if others:
            gradients, buffers = zip(*others, strict=True)
            torch._foreach_add_(list(gradients), list(buffers))
        if added:
            torch._foreach_add_(_pick(self._buffers, added), _pick(self._aside, added))
        self._copy(self._buffers, self._aside, restored, make=False)

    def _put_aside(self, numbers: list[int], aside: dict[int, None]) -> None:
        self._copy(self._aside, self._buffers, numbers)
        aside |= dict.fromkeys(numbers)

    def _copy(
        self,
        into: dict[int, torch.Tensor],
        source: dict[int, torch.Tensor],
        numbers: list[int],
        *,
        make: bool = True,
    ) -> None:
        if not numbers:
            return
        if make:
            for number in numbers:
                if number not in into:
                    into[number] = torch.empty_like(self._buffers[number])
        torch._foreach_copy_(_pick(into, numbers), _pick(source, numbers))

    # --- who holds a buffer -----------------------------------------------------------------------

    def _held(self, numbers: Sequence[int], besides: dict[int, None]) -> list[int]:
        """Those whose buffer somebody holds, as `p.grad` or otherwise, and that are not known."""
        pick = _picker(tuple(numbers))
        if tuple(map(torch.Tensor.data_ptr, pick(self._buffers))) != pick(self._addresses):
            self._leave_moved(numbers)
        objects, memory = self._references(numbers)
        gradients = list(map(_GRADIENT, pick(self.parameters)))
        own_objects, own_memory = pick(self._own_objects), pick(self._own_memory)
        if (
            objects == own_objects
            and memory == own_memory
            and not any(map(operator.is_, gradients, pick(self._buffers)))
        ):
            return []
        return [
            number
            for at, number in enumerate(numbers)
            if number not in besides
            and (
                gradients[at] is self._buffers[number]
                or objects[at] > own_objects[at]
                or memory[at] > own_memory[at]
            )
        ]

    def _leave_moved(self, numbers: Sequence[int]) -> None:
        """Leave buffers that have got other memory to who gave it."""
        for number in numbers:
            if self._buffers[number].data_ptr() != self._addresses[number]:
                self._buffers[number] = self._own[number].detach()

    def _references(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each buffer the references to the tensor's object, and to its memory."""
        pick = _picker(tuple(numbers))
        objects = map(sys.getrefcount, pick(self._buffers))
        return tuple(objects), tuple(map(torch._C._storage_Use_Count, pick(self._memory)))


class _GradientSum:
    """The gradients of one backward while it runs. `numbers` have been written, and `aside` hold
    what somebody had before. A backward inside another one has it as `outer`."""

    def __init__(self, task: int, outer: _GradientSum | None) -> None:
        self.task, self.outer = task, outer
        self.numbers: dict[int, None] = {}
        self.aside: dict[int, None] = {}
        self.streams: set[Stream] = set()


@contextmanager
def captures_keep_buffers() -> Iterator[None]:
    """Capture in this block, or close graphs: what these hold of the buffers counts as nobody's."""
    before = {one: _memory_references(one) for one in list(_all)}
    try:
        yield
    finally:
        for one, counts in before.items():
            for number, now in _memory_references(one).items():
                if number in one._own_memory and number in counts:
                    one._own_memory[number] += now - counts[number]


def _memory_references(buffers: GradientBuffers) -> dict[int, int]:
    return {
        number: torch._C._storage_Use_Count(memory) for number, memory in buffers._memory.items()
    }


@functools.lru_cache(maxsize=256)
def _picker(numbers: tuple[int, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the values at these numbers, of a list or dict."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda values: tuple([values[number] for number in numbers])


def _pick(tensors: dict[int, torch.Tensor], numbers: Any) -> list[torch.Tensor]:
    return [tensors[number] for number in numbers]


def _give(parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
