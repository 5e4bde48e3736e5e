"""The settings of optimizers' parameter groups, as a graph freezes them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import numpy
import torch

from headrace.capture.reading.comparison import Comparison
from headrace.capture.state.capturable_optimizer import takes_rates_as_tensors
from headrace.capture.state.state import StepState
from headrace.device import Device

# Entries of a parameter group that are not compared: the parameters, what a scheduler remembers,
# and what a capture sets.
_NO_SETTINGS = ("params", "param_names", "capturable", "initial_lr", "max_lr", "min_lr", "swa_lr")
_Setting = tuple[dict[str, Any], str]


class GroupSettings:
    """The settings of all parameter groups. They are read again only after one has changed."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        self._hold: Callable[[], bool] = bool
        self._values: tuple[Hashable, ...] = ()
        self._are_fixed = True  # whether each stays the same as long as it is the same object

    def read(self, state: StepState) -> tuple[Hashable, ...]:
        """The present settings, by name."""
        groups = state.param_groups()
        same = len(groups) == len(self._groups) and all(map(operator.is_, groups, self._groups))
        if not (same and self._are_fixed and self._hold()):
            self._groups = groups
            comparison, settings = Comparison(), _settings_of(state)
            for group in groups:
                comparison.size(group, len(group))
            for group, name in settings:
                comparison.entry(group, name, group[name])
            self._hold = comparison.compile()
            values = [(name, group[name]) for group, name in settings]
            self._values = tuple((name, _frozen(value, state.device)) for name, value in values)
            self._are_fixed = all(_is_fixed(value, state.device) for _, value in values)
        return self._values


def _settings_of(state: StepState) -> list[_Setting]:
    found: list[_Setting] = []
    for optimizer in state.optimizers:
        unread = {*_NO_SETTINGS, *(["lr"] if takes_rates_as_tensors(optimizer) else [])}
        for group in optimizer.param_groups:
            found += [(group, name) for name in group if name not in unread]
    return found


def _frozen(value: Any, device: Device) -> Hashable:
    """A setting's present value, to be compared with a later one: containers by their items, arrays
    by their numbers, tensors and other objects by identity, and host tensors by version, too."""
    if isinstance(value, torch.Tensor):
        return _Itself(value), None if device.holds(value) else value._version
    if isinstance(value, list | tuple):
        return (type(value), *(_frozen(one, device) for one in value))
    if isinstance(value, dict):
        return (type(value), *((key, _frozen(one, device)) for key, one in value.items()))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, numpy.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value if _is_fixed(value, device) else _Itself(value)


class _Itself:
    """Equals only what holds the same object, which lives as long: no other gets its address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _is_fixed(value: Any, device: Device) -> bool:
    """Whether a setting stays the same as long as it is the same object. All objects with a hash
    are taken to."""
    if isinstance(value, torch.Tensor):
        return device.holds(value)
    if isinstance(value, tuple):
        return all(_is_fixed(one, device) for one in value)
    return isinstance(value, Hashable)
