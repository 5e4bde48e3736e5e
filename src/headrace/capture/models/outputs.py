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
from typing import Any

import torch

from headrace.capture.models.shared_memory import ranges_of
from headrace.capture.state.nested import parts_of
from headrace.data import flatten_batch, is_plain_object, rebuild_batch
from headrace.errors import CaptureError

# Tensors, and values that a replay may return as they were.
_PLAIN = (
    *(torch.Tensor, enum.Enum, bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, type),
)


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
        self._ranges = ranges_of(self.tensors, requires)
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
        for one in self._ranges:
            one.copy_into(made, self.tensors)
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


def apart(result: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """The result of an eager call, with an alias for each output that another output is computed
    from, as a loss from logits: the gradient of the alias is that from outside of the model."""
    behind = _edges_behind(outputs)
    inner = {id(one) for one in outputs if (one.grad_fn, one.output_nr) in behind}
    if not inner:
        return result
    try:
        require_plain(result)
    except CaptureError:
        return result  # it will not be captured either
    leaves = flatten_batch(result, objects=True)
    aliases = {id(one): one.view_as(one) for one in leaves if id(one) in inner}
    return rebuild_batch(result, [aliases.get(id(one), one) for one in leaves], objects=True)


def _edges_behind(outputs: Sequence[torch.Tensor]) -> set[tuple[Any, int]]:
    """The results of autograd's nodes that the outputs are computed from."""
    todo: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    found: set[tuple[Any, int]] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.update(node.next_functions)
            todo += (one for one, _ in node.next_functions)
    return found


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


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of tensors, as `Outputs` wants them."""
    return {one.untyped_storage()._cdata for one in tensors if torch._C._has_storage(one)}


def own_tensors(result: Any, given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a model's result by number: without those that it was given, each once."""
    known = {id(one) for one in given}
    leaves = flatten_batch(result, objects=True)
    leaves = [one for one in leaves if isinstance(one, torch.Tensor)]
    return list({id(one): one for one in leaves if id(one) not in known}.values())
