"""Why no shape comes again: the part of the batch, or of a call, that differs each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headrace.device import Device

# After this many calls in a row with a key that had not been seen, say which part differs.
_MAX_NEW = 30


class KeyChanges:
    """Looks at calls of `who` with a key that was never seen. `why` says which part makes it new,
    once many calls in a row were, and `is_value` whether that is a value and no shape."""

    def __init__(self, who: str, device: Device) -> None:
        self._who, self._device = who, device
        self.streak = 0
        self._parts: dict[str, str] = {}
        self.why: str | None = None
        self.is_value = False

    def add(self, named: Mapping[str, Any]) -> None:
        """A call has a new key. Its arguments are given by name."""
        self.streak += 1
        if self.why is not None or self.streak < _MAX_NEW - 1:
            return
        before, self._parts = self._parts, dict(self._parts_of(named))
        differing = [name for name in self._parts if before.get(name) != self._parts[name]]
        if not before or not differing:
            return
        name = differing[0]
        self.is_value = not self._parts[name].startswith("shape")
        remedy = "pad to a few shapes (hr.Buckets)"
        if self.is_value:
            from_loader = "leave it out of what the loader returns, or return it"
            remedy = f"{from_loader if 'batch' in named else 'pass it'} as a tensor on the device"
        self.why = (
            f"{name} is another each time ({before.get(name, 'nothing')}, then "
            f"{self._parts[name]}), and a graph holds for one alone: {remedy}"
        )
        self._device.warn_once(
            f"graphs: {self._who}, {name}",
            "%s: %d calls in a row had no graph, because %s",
            *(self._who, self.streak, self.why),
        )

    def _parts_of(self, named: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name, value in named.items():
            yield from _parts(value, name, self._device)

    def seen(self) -> None:
        """A call has a key that was seen before."""
        self.streak, self._parts = 0, {}


def _parts(tree: Any, name: str, device: Device) -> Iterator[tuple[str, str]]:
    """What a key is made of: shapes and values, each with the name of its part."""
    if isinstance(tree, torch.Tensor):
        yield name, f"shape {tuple(tree.shape)}, {tree.dtype}"
        if not device.holds(tree):
            values = device.read_host(tree.detach().reshape(1, -1)[:, :20])
            yield f"{name} (on the host)", str(values)[:60]
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _parts(value, f"{name}[{key!r}]", device)
    elif isinstance(tree, list | tuple):
        yield f"len({name})", str(len(tree))
        for at, value in enumerate(tree):
            yield from _parts(value, f"{name}[{at}]", device)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _parts(getattr(tree, field.name), f"{name}.{field.name}", device)
    else:
        yield name, repr(tree)[:60]
