"""Whether the entries of many dicts are still the same objects, asked before each batch."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable
from typing import Any

import torch

Entry = tuple[dict[Any, Any], Any]
ClassEntry = tuple["types.MappingProxyType[str, Any]", str]
_ABSENT = object()


def dicts_of_modules(modules: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """The dicts in which modules keep their parameters, buffers and submodules."""
    return [
        one for module in modules for one in (module._parameters, module._buffers, module._modules)
    ]


class SameEntries:
    """Entries of dicts, each a dict and a key, and the objects that they held when this was made. A
    key that a dict does not have may not appear in it. A step may have thousands of entries, so no
    Python code runs for each of them.

    `sized` are dicts that may not get or lose an entry; `without` are dicts or classes' attributes,
    each with keys that it may not get; `of_classes` are entries of classes' attributes."""

    def __init__(
        self,
        entries: Iterable[Entry],
        sized: Iterable[dict[Any, Any]],
        without: Iterable[tuple[Any, frozenset[Any]]] = (),
        of_classes: Iterable[ClassEntry] = (),
    ) -> None:
        pairs, class_pairs = list(entries), list(of_classes)
        self._dicts, self._keys = [one for one, _ in pairs], [key for _, key in pairs]
        self._classes = [one for one, _ in class_pairs]
        self._names = [name for _, name in class_pairs]
        self._values, self._class_values = list(self._now()), list(self._now_of_classes())
        self._sized = list(sized)
        self._sizes = list(map(len, self._sized))
        absent = list(without)
        self._without, self._absent = [one for one, _ in absent], [keys for _, keys in absent]

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> SameEntries:
        """All parameters, buffers and submodules of a model."""
        dicts = dicts_of_modules(model.modules())
        return cls(((one, key) for one in dicts for key in one), dicts)

    def _now(self) -> Iterable[Any]:
        return map(dict.get, self._dicts, self._keys, itertools.repeat(_ABSENT))

    def _now_of_classes(self) -> Iterable[Any]:
        get: Any = types.MappingProxyType.get
        return map(get, self._classes, self._names, itertools.repeat(_ABSENT))

    def hold(self) -> bool:
        """Whether all entries hold the same objects, and the sized dicts have as many entries."""
        return (
            list(map(len, self._sized)) == self._sizes
            and all(map(operator.is_, self._now(), self._values))
            and all(map(operator.is_, self._now_of_classes(), self._class_values))
            and all(map(frozenset.isdisjoint, self._absent, self._without))
        )
