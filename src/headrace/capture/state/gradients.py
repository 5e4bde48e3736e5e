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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from headrace.capture.state.held_buffers import HeldBuffers, pick, picker
from headrace.device import Device, Stream

_GRADIENT = operator.attrgetter("grad")
_IS_NONE = functools.partial(operator.is_, None)


class GradientBuffers:
    """A model's gradients. `parameters` are numbered by their position."""

    def __init__(self, device: Device, parameters: Sequence[torch.Tensor]) -> None:
        self._device = device
        self.parameters = list(parameters)
        self._held = HeldBuffers(self.parameters)
        self._buffers = self._held.tensors
        # Memory for what must outlive a replay: what others hold, and a backward's earlier parts.
        self._aside: dict[int, torch.Tensor] = {}
        self._partial: dict[int, torch.Tensor] = {}
        self._sum: _GradientSum | None = None

    def buffers(self) -> dict[int, torch.Tensor]:
        """The buffers by their parameter's number."""
        return self._buffers

    def make_buffers(self, numbers: Sequence[int]) -> None:
        """Allocate buffers for the parameters that have none."""
        for number in numbers:
            if number not in self._buffers:
                self._held.add(number, torch.empty_like(self.parameters[number]).detach())

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
            self._held.add(number, one.detach())

    def write(self, gradients: dict[int, torch.Tensor]) -> None:
        """In a capture: write gradients to the buffers."""
        if gradients:
            torch._foreach_copy_(pick(self._buffers, gradients), list(gradients.values()))

    def note_references(self) -> None:
        """Call after a capture that has added buffers, while nobody else holds any."""
        self._held.note_references()

    def missing_bytes(self) -> int:
        """The memory that the first capture will take for gradients."""
        trained = (one for one in self.parameters if one.requires_grad)
        return 0 if self._buffers else sum(one.nbytes for one in trained)

    # --- one backward -----------------------------------------------------------------------------

    def replay(self, numbers: Sequence[int], replay: Callable[[], None]) -> None:
        """Replay a backward graph that writes the gradients of these parameters, as a part of the
        backward that is running. At its end, `p.grad` is what an eager backward leaves."""
        if self._sum is None or self._sum.task != torch._C._current_graph_task_id():
            self._begin()
        assert self._sum is not None
        total = self._sum
        self._put_aside(self._held.held(numbers, besides=total.aside), total.aside)
        again = [number for number in numbers if number in total.numbers] if total.numbers else []
        self._copy(self._partial, self._buffers, again)
        replay()
        if again:
            sums, parts = pick(self._buffers, again), pick(self._partial, again)
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
        kept = {n: self._buffers[n].clone() for n in self._held.held(numbers, besides=inner)}
        kept |= {n: self._buffers[n].clone() for n in open_part if n in numbers and n not in kept}
        replay()
        wishes = {id(one) for one in wanted}
        found = {
            self.parameters[number]: self._buffers[number].clone()
            for number in numbers
            if id(self.parameters[number]) in wishes
        }
        if kept:
            torch._foreach_copy_(pick(self._buffers, kept), list(kept.values()))
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
        of = picker(tuple(numbers))
        if not aside and all(map(_IS_NONE, map(_GRADIENT, of(self.parameters)))):
            _give(of(self.parameters), of(self._buffers))
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
            torch._foreach_add_(pick(self._buffers, added), pick(self._aside, added))
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
        torch._foreach_copy_(pick(into, numbers), pick(source, numbers))


class _GradientSum:
    """The gradients of one backward while it runs. `numbers` have been written, and `aside` hold
    what somebody had before. A backward inside another one has it as `outer`."""

    def __init__(self, task: int, outer: _GradientSum | None) -> None:
        self.task, self.outer = task, outer
        self.numbers: dict[int, None] = {}
        self.aside: dict[int, None] = {}
        self.streams: set[Stream] = set()


def _give(parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
