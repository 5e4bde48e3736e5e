"""Values that a forward reads back from the device, and that are the same in each call.

    is_causal = bool((mask == causal(len(mask))).all())  # the mask belongs to the model

A graph has no such read: the host would wait for it. What is computed from constants and from
tensors of the model that nobody writes is the same each time. So it is remembered, and a capture
gets it without a wait. Two calls must have read the same, from tensors with the same content;
before each replay these tensors must have the version that they had; and checks of a graph compare
both, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as Storage
from torch.utils._pytree import tree_iter

from headrace.device import Device, Obstacle
from headrace.errors import CaptureError
from headrace.source_lines import Site, users_line

_READ = "aten::_local_scalar_dense"
# The content of larger tensors is not compared, so what they lead to is not remembered.
_MAX_BYTES = 4_000_000

#: Storages, and numbers of copies from the host.
Sources = frozenset[Storage | int]


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the model from which a value was computed, as it was then."""

    tensor: torch.Tensor
    version: int
    content: torch.Tensor

    def same_as(self, other: _Source, device: Device) -> bool:
        if self.tensor is not other.tensor:
            return False
        with device.ledger.waiting("check"):
            return torch.equal(self.content, other.content)


@dataclass(frozen=True, slots=True)
class _ReadBack:
    """A value that was read, the line, and what it comes from."""

    value: Any
    site: Site
    sources: Sources


class ReadBacks:
    """What one run read back. `tensors` are those of the model that nothing trains."""

    def __init__(self, device: Device, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._device = device
        small = [one for one in tensors if _is_plain(one) and one.nbytes <= _MAX_BYTES]
        self._tensors = {_storage(one): one for one in small}
        # Memory whose content is the same in each call, with what it was computed from.
        self._fixed: dict[Storage, Sources] = {one: frozenset([one]) for one in self._tensors}
        self._sources: dict[Storage, _Source] = {}
        self._found: list[_ReadBack] = []

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, copy: int | None) -> None:
        """An operation has run. `copy`: it was a copy from the host, by its number."""
        if func._schema.name == _READ:
            sources = self._fixed.get(Storage(args[0].untyped_storage()))
            if sources is not None and self._device.holds(args[0]):
                self._found.append(_ReadBack(result, users_line(), sources))
                self._remember(sources)
            return
        inputs = [one for one in tree_iter((args, kwargs or {})) if isinstance(one, torch.Tensor)]
        sources = self._sources_of(func, inputs, copy)
        for one in _written(func, args, kwargs or {}):
            self._write(_storage(one), sources)
        known = {_storage(one) for one in inputs if torch._C._has_storage(one)}
        for one in tree_iter(result):
            if not isinstance(one, torch.Tensor) or not torch._C._has_storage(one):
                continue
            if (storage := _storage(one)) not in known:
                self._fixed.pop(storage, None)
                if sources is not None and self._device.holds(one):
                    self._fixed[storage] = sources

    def excuse(self, obstacles: Sequence[Obstacle], copied: Sequence[bool]) -> list[Obstacle]:
        """Those of the obstacles that remain if a capture gets these values without a wait.
        `copied` says for each copy from the host whether its content is compared."""
        self._found = [
            one
            for one in self._found
            if all(copied[source] for source in one.sources if isinstance(source, int))
        ]
        excused = Counter(one.site for one in self._found)
        remaining = []
        for one in obstacles:
            if one.may_be_read and one.site is not None and excused[one.site]:
                excused[one.site] -= 1
            else:
                remaining.append(one)
        return remaining

    def same_as(self, other: ReadBacks) -> bool:
        """Whether two runs read the same values, from tensors with the same content."""
        mine, theirs = ([repr(one.value) for one in run._found] for run in (self, other))
        if mine != theirs or self._sources.keys() != other._sources.keys():
            return False
        pairs = ((one, other._sources[at]) for at, one in self._sources.items())
        return all(one.same_as(before, self._device) for one, before in pairs)

    def hold(self) -> bool:
        """Whether nobody has written to the tensors that the values come from."""
        return all(one.tensor._version == one.version for one in self._sources.values())

    def __len__(self) -> int:
        return len(self._found)

    def value(self, number: int) -> Any:
        """What a capture reads."""
        if number >= len(self._found):
            raise CaptureError("it read other values from the device than when it was watched")
        return self._found[number].value

    def is_read(self, func: Any, args: Any) -> bool:
        """Whether an operation reads a value from the device."""
        return func._schema.name == _READ and self._device.holds(args[0])

    def _sources_of(
        self, func: Any, inputs: list[torch.Tensor], copy: int | None
    ) -> Sources | None:
        """What the results of an operation are computed from; None if they may differ."""
        if copy is not None:
            return frozenset([copy])
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws or func.namespace != "aten" or "empty" in func._schema.name:
            return None
        found: Sources = frozenset()
        for one in inputs:
            sources = self._fixed.get(_storage(one)) if torch._C._has_storage(one) else None
            if sources is None:
                return None
            found |= sources
        return found

    def _write(self, storage: Storage, sources: Sources | None) -> None:
        """An operation has written to memory."""
        before = self._fixed.pop(storage, None)
        if before is not None and sources is not None and storage not in self._tensors:
            self._fixed[storage] = before | sources

    def _remember(self, sources: Sources) -> None:
        for storage in sources:
            if isinstance(storage, Storage) and storage not in self._sources:
                tensor = self._tensors[storage]
                with torch._C._DisableTorchDispatch():
                    content = tensor.detach().clone()
                self._sources[storage] = _Source(tensor, tensor._version, content)


def _storage(tensor: torch.Tensor) -> Storage:
    return Storage(tensor.untyped_storage())


def _is_plain(tensor: torch.Tensor) -> bool:
    return torch._C._has_storage(tensor) and not tensor.requires_grad


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors = (one for one in tree_iter(value) if isinstance(one, torch.Tensor))
            found += [one for one in tensors if torch._C._has_storage(one)]
    return found
