"""What a captured model returned, as a recipe for what its replays return.

A replay overwrites the captured tensors, so callers get copies. They must not notice: a tensor
that the model returns twice is one tensor, an argument or a parameter that it returns is that very
tensor, and tensors that share memory still do.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from headrace.capture.state.nested import parts_of
from headrace.data import flatten_batch, is_plain_object, rebuild_batch
from headrace.errors import CaptureError

# Tensors, and values that a replay may return as they were.
_PLAIN = (
    *(torch.Tensor, enum.Enum, bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, type),
)
# Above this many elements, tensors whose memory overlaps in part count as one and the same.
_MAX_COMPARED = 1 << 26


@dataclass(frozen=True, slots=True)
class _MemoryRange:
    """A range of captured memory, and the captured tensors in it by their number."""

    memory: torch.Tensor
    begin: int
    numbers: tuple[int, ...]


class Outputs:
    """The tensors that a captured model made and returned, numbered. `require_plain` has passed.

    `given` are the captured arguments and weights, each with what the caller knows in its place: a
    function of the arguments' leaves.
    """

    def __init__(
        self, result: Any, given: dict[int, Callable[[Sequence[Any]], Any]], known: set[int]
    ) -> None:
        leaves = flatten_batch(result, objects=True)
        numbers: dict[int, int] = {}
        self._recipe: list[Callable[[Sequence[Any]], Any] | int] = []
        #: What the capture made, without autograd's history.
        self.tensors: list[torch.Tensor] = []
        requires: list[bool] = []
        self._places_of: list[int] = []
        self._with_history: list[torch.Tensor] = []
        for place, leaf in enumerate(leaves):
            if id(leaf) in given:
                self._recipe.append(given[id(leaf)])
                continue
            if leaf.layout is not torch.strided or leaf.is_nested or type(leaf) is not torch.Tensor:
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__} with the layout {leaf.layout}: "
                    "expected a dense tensor"
                )
            if leaf.untyped_storage()._cdata in known:
                raise CaptureError(
                    "the model returns a view of an argument, a parameter or a buffer, and a graph "
                    "would return a view of a copy: return a clone"
                )
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf.detach())
                self._with_history.append(leaf)
                requires.append(leaf.requires_grad)
                self._places_of.append(place)
            self._recipe.append(numbers[id(leaf)])
        #: The numbers of those that require a gradient.
        self.differentiable = [number for number, one in enumerate(requires) if one]
        self._blocks = _blocks(self.tensors, requires)
        self._places = _places(result)

    def with_history(self) -> list[torch.Tensor]:
        """The captured tensors with their autograd history; once."""
        history, self._with_history = self._with_history, []
        return history

    def find(self, result: Any) -> list[torch.Tensor]:
        """The tensors of another result of the same call, by number."""
        leaves = flatten_batch(result, objects=True)
        return [leaves[place] for place in self._places_of]

    def copies(self) -> list[torch.Tensor]:
        """Copies of the captured tensors, by number, in memory that nobody else has."""
        made: list[Any] = [None] * len(self.tensors)
        for block in self._blocks:
            if block.begin < 0:
                (number,) = block.numbers
                made[number] = block.memory.clone()
                continue
            memory = block.memory.clone()
            for number in block.numbers:
                one = self.tensors[number]
                # `.data`: a view would not let its caller write to it in place.
                made[number] = memory.as_strided(
                    one.size(), one.stride(), one.storage_offset() - block.begin
                ).data
        return made

    def result(self, made: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Any:
        """What the model returns: `made` are its tensors by number, `leaves` its arguments."""
        values = [made[one] if isinstance(one, int) else one(leaves) for one in self._recipe]
        return self._places(values)


def _places(result: Any) -> Callable[[list[Any]], Any]:
    """A function that puts values in the places of a result's tensors."""
    kind = type(result)
    if isinstance(result, torch.Tensor):
        return lambda values: values[0]
    if kind is tuple and all(isinstance(one, torch.Tensor) for one in result):
        return tuple
    if kind is list and all(isinstance(one, torch.Tensor) for one in result):
        return list
    if kind is dict and all(isinstance(one, torch.Tensor) for one in result.values()):
        keys = list(result)
        return lambda values: dict(zip(keys, values, strict=True))
    nothing = [torch.empty(0, device="cpu")] * len(flatten_batch(result, objects=True))
    empty = rebuild_batch(result, nothing, objects=True)
    return lambda values: rebuild_batch(empty, values, objects=True)


def require_plain(result: Any) -> None:
    """Raise if a result has a part that may hold tensors of the capture, and hides them, or an
    object that the call has not made for its caller alone. Nobody but the caller may hold it."""
    hidden = (one for one in flatten_batch(result) if not isinstance(one, torch.Tensor))
    objects: dict[int, Any] = {}
    todo = [*hidden, *parts_of(result)]
    while todo:
        part = todo.pop()
        if id(part) in objects or isinstance(part, _PLAIN):
            continue
        if not is_plain_object(part):
            raise CaptureError(
                f"the model returns a {type(part).__name__}, which may hold tensors that a graph "
                "would overwrite: return tensors, numbers and strings in tuples, lists, dicts or "
                "dataclasses"
            )
        objects[id(part)] = part
        todo += parts_of(vars(part))
    if objects and (kept := _held_elsewhere(result, objects)) is not None:
        raise CaptureError(
            f"the model returns a {type(kept).__name__} that it also keeps, and a graph would "
            "return a copy: return a new one at each call"
        )


def _held_elsewhere(result: Any, objects: dict[int, Any]) -> Any:
    """One of a result's objects that something outside of the result refers to; None if none."""
    holders = {id(objects)}
    todo = [result, *objects.values()]
    while todo:
        part = todo.pop()
        if id(part) not in holders:
            holders.add(id(part))
            todo += (one for one in gc.get_referents(part) if _is_container(one))
    for holder in gc.get_referrers(*objects.values()):
        if id(holder) not in holders and not isinstance(holder, types.FrameType):
            return next(one for one in gc.get_referents(holder) if id(one) in objects)
    return None


def _is_container(part: object) -> bool:
    return isinstance(part, Mapping | list | tuple) or dataclasses.is_dataclass(part)


def _blocks(tensors: list[torch.Tensor], differentiable: list[bool]) -> list[_MemoryRange]:
    """The tensors by the memory that they share."""
    by_storage: dict[int, list[int]] = {}
    for number, one in enumerate(tensors):
        by_storage.setdefault(one.untyped_storage()._cdata, []).append(number)
    blocks = []
    for numbers in by_storage.values():
        first = tensors[numbers[0]]
        if len(numbers) == 1 and _is_dense(first):
            blocks.append(_MemoryRange(first, -1, (numbers[0],)))
            continue
        with_gradient = [tensors[number] for number in numbers if differentiable[number]]
        for at, one in enumerate(with_gradient):
            if any(_overlap(one, other) for other in with_gradient[:at]):
                raise CaptureError(
                    "the model returns two tensors that share memory and both have a gradient, and "
                    "copies of them could not be written in place: return a clone of one"
                )
        begin = min(int(tensors[number].storage_offset()) for number in numbers)
        end = max(map(_end, (tensors[number] for number in numbers)))
        memory = first.as_strided((end - begin,), (1,), begin)
        if len({tensors[number].dtype for number in numbers}) > 1:
            raise CaptureError(
                "the model returns tensors of several dtypes that share memory: return a clone"
            )
        blocks.append(_MemoryRange(memory, begin, tuple(numbers)))
    return blocks


def _end(tensor: torch.Tensor) -> int:
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin
    extents = ((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return begin + int(sum(extents)) + 1


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether `clone()` gives a tensor the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    end = max(_end(one), _end(other))
    begin = min(int(one.storage_offset()), int(other.storage_offset()))
    if one.storage_offset() >= _end(other) or other.storage_offset() >= _end(one):
        return False
    if end - begin > _MAX_COMPARED:
        return True
    marks = numpy.zeros(end - begin, dtype=numpy.bool_)
    _elements(marks, one, begin)[...] = True
    return bool(_elements(marks, other, begin).any())


def _elements(marks: Any, tensor: torch.Tensor, begin: int) -> Any:
    return numpy.lib.stride_tricks.as_strided(
        marks[tensor.storage_offset() - begin :], tuple(tensor.size()), tensor.stride()
    )


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of tensors, as `Outputs` wants them."""
    return {one.untyped_storage()._cdata for one in tensors if torch._C._has_storage(one)}


def own_tensors(result: Any, given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a model's result by number: without those that it was given, each once."""
    known = {id(one) for one in given}
    leaves = flatten_batch(result, objects=True)
    leaves = [one for one in leaves if isinstance(one, torch.Tensor)]
    return list({id(one): one for one in leaves if id(one) not in known}.values())
