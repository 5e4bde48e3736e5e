"""The memory of gradients that graphs write, one buffer a parameter, and who holds one of them."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_GRADIENT = operator.attrgetter("grad")
#: All that exist: captures, also of other things, may refer to their memory.
_all: weakref.WeakSet[HeldBuffers] = weakref.WeakSet()


class HeldBuffers:
    """The buffers of some parameters, by their number: those that a graph has given a gradient."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        #: Changed by `add` alone.
        self.tensors: dict[int, torch.Tensor] = {}
        self._memory: dict[int, int] = {}
        # The same memory by other tensors, which nobody can give other memory (`p.grad.data = …`).
        self._own: dict[int, torch.Tensor] = {}
        self._addresses: dict[int, int] = {}
        # How many references there are, to the tensor and its memory, while nobody holds them.
        self._own_objects: dict[int, int] = {}
        self._own_memory: dict[int, int] = {}
        _all.add(self)

    def add(self, number: int, buffer: torch.Tensor) -> None:
        """Take `buffer` as a parameter's. The caller keeps no reference."""
        self.tensors[number] = buffer
        self._memory[number] = buffer.untyped_storage()._cdata
        self._own[number], self._addresses[number] = buffer.detach(), buffer.data_ptr()

    def note_references(self) -> None:
        """Count the references to buffers that have been added. Nobody else may hold any yet."""
        new = [number for number in self.tensors if number not in self._own_objects]
        for number, objects, memory in zip(new, *self._references(new), strict=True):
            self._own_objects[number], self._own_memory[number] = objects, memory

    def held(self, numbers: Sequence[int], besides: dict[int, None]) -> list[int]:
        """Those whose buffer somebody holds, as `p.grad` or otherwise, and that are not known."""
        pick = picker(tuple(numbers))
        if tuple(map(torch.Tensor.data_ptr, pick(self.tensors))) != pick(self._addresses):
            self._leave_moved(numbers)
        objects, memory = self._references(numbers)
        gradients = list(map(_GRADIENT, pick(self._parameters)))
        own_objects, own_memory = pick(self._own_objects), pick(self._own_memory)
        if (
            objects == own_objects
            and memory == own_memory
            and not any(map(operator.is_, gradients, pick(self.tensors)))
        ):
            return []
        return [
            number
            for at, number in enumerate(numbers)
            if number not in besides
            and (
                gradients[at] is self.tensors[number]
                or objects[at] > own_objects[at]
                or memory[at] > own_memory[at]
            )
        ]

    def _leave_moved(self, numbers: Sequence[int]) -> None:
        """Leave buffers that have got other memory to who gave it."""
        for number in numbers:
            if self.tensors[number].data_ptr() != self._addresses[number]:
                self.tensors[number] = self._own[number].detach()

    def _references(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For each buffer the references to the tensor's object, and to its memory."""
        pick = picker(tuple(numbers))
        objects = map(sys.getrefcount, pick(self.tensors))
        return tuple(objects), tuple(map(torch._C._storage_Use_Count, pick(self._memory)))

    def memory_references(self) -> dict[int, int]:
        """For each buffer the references to its memory."""
        return {at: torch._C._storage_Use_Count(one) for at, one in self._memory.items()}

    def leave_out(self, before: dict[int, int]) -> None:
        """References that have come and gone since `before` count as nobody's."""
        for number, now in self.memory_references().items():
            if number in self._own_memory and number in before:
                self._own_memory[number] += now - before[number]


@contextmanager
def captures_keep_buffers() -> Iterator[None]:
    """Capture in this block, or close graphs: what these hold of the buffers counts as nobody's."""
    before = [(one, one.memory_references()) for one in list(_all)]
    try:
        yield
    finally:
        for one, counts in before:
            one.leave_out(counts)


@functools.lru_cache(maxsize=256)
def picker(numbers: tuple[int, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the values at these numbers, of a list or dict."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda values: tuple([values[number] for number in numbers])


def pick(tensors: dict[int, torch.Tensor], numbers: Any) -> list[torch.Tensor]:
    return [tensors[number] for number in numbers]
