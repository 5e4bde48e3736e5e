"""What a captured function reads besides its arguments, and when a change is noticed.

A replay runs no Python: a number that the function reads from a closure, a global or an object
would stay what it was at capture, and a tensor that it stores for the next call would be ignored.

| what is read | a change is noticed |
| --- | --- |
| arguments | by the key, before the replay |
| parameters, buffers, optimizer state: which tensors, where | by `memory.py`, before the replay |
| places that the function, and the modules, name | here, by one comparison before the replay |
| settings of optimizers, hooks | here, before the replay |
| anything else | by `recheck.py`, within a known number of replays |

If a value changes now and then, the graphs are dropped and captured again. If it keeps changing,
the function is not worth capturing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from headrace.capture.guards.group_settings import GroupSettings
from headrace.capture.guards.obstacles import hooks_so_far, state_obstacle
from headrace.capture.guards.read_values import ReadValues
from headrace.capture.reading.user_compiled import describe_own_graphs
from headrace.capture.state.state import StepState
from headrace.data import host_rng_states, set_host_rng_states
from headrace.errors import CaptureError

# Changes less than this many batches apart are frequent.
_STEADY_BATCHES = 10
# After this many frequent changes the step is no longer captured.
_MAX_FREQUENT_CHANGES = 3
# After this many batches without a change, earlier frequent changes no longer count: a few of them
# at the start of each epoch cost less than an epoch without graphs.
_CALM_BATCHES = 100
GRADIENTS_REPLACED = (
    "gradients are replaced between batches, and a graph would write to the old ones: change them "
    "in place, as p.grad.mul_(…) does"
)
MEMORY_MOVES = (
    "the model or the optimizer gets other memory from batch to batch, and a graph would use the "
    "old: write to it in place, as p.data.copy_(…) does"
)


class Guards:
    """The values with which a step's graphs were captured, or will be. `more_settings` returns
    settings besides those of the optimizers, by name."""

    def __init__(
        self, state: StepState, more_settings: Callable[[], tuple[tuple[str, Any], ...]] = tuple
    ) -> None:
        self._state, self._more_settings = state, more_settings
        self._settings: tuple[Hashable, ...] | None = None
        self._read: ReadValues | None = None
        self._modules: list[torch.nn.Module] = []
        self._batches_since_change = self._frequent_changes = 0
        self._hooks_checked = -1
        self._group_settings = GroupSettings()

    def check(self, replaced: str | None = None, *, after_new_shape: bool = False) -> bool:
        """Call before each batch. Returns whether a value differs from what graphs were captured
        with, so that they must be dropped. Raises `CaptureError` if values change too often.
        `replaced` says which memory is another than graphs use, and what to do.
        `after_new_shape`: the batch before was the first of its shape. What it has changed, such as
        a cache by shape, does not count as often."""
        self._batches_since_change += 1
        changed = self._values().changed()
        self._check_new_hooks()
        settings, before = self._frozen_settings(), self._settings
        if settings == before and changed is None and replaced is None:
            return False
        if before is not None:
            if self._batches_since_change > _CALM_BATCHES:
                self._frequent_changes = 0
            is_frequent = self._batches_since_change < _STEADY_BATCHES and not after_new_shape
            self._frequent_changes += is_frequent
            if is_frequent and self._frequent_changes == _MAX_FREQUENT_CHANGES:
                if replaced is not None:
                    raise CaptureError(replaced)
                raise CaptureError(
                    str(changed)
                    if changed is not None
                    else f"the optimizer's {_changed_setting(before, settings)} changes from step "
                    "to step, and a graph would repeat the value it was captured with: keep it "
                    "constant (cycle_momentum=False in a scheduler; SGD's lr needs fused=True)"
                )
        self._settings, self._batches_since_change = settings, 0
        return before is not None

    def _check_new_hooks(self) -> None:
        """Raise `CaptureError` if a module or an optimizer has got a hook that no graph would run.
        PyTorch numbers all hooks, so usually one comparison shows that there are none."""
        if hooks_so_far() != self._hooks_checked:
            obstacle = state_obstacle(self.state)
            self._hooks_checked = hooks_so_far()
            if obstacle is not None:
                raise CaptureError(obstacle)

    def modules_changed(self) -> bool:
        """Whether the step has other modules than when its values were searched for, because one
        was made or replaced since."""
        if self._read is None:
            return False
        now = self._state.all_modules()
        return len(now) != len(self._modules) or not all(map(operator.is_, now, self._modules))

    def note_capture(self) -> None:
        """Call after a capture: graphs now hold the present values."""
        self._settings = self._frozen_settings()

    @property
    def state(self) -> StepState:
        """The step's state, with all modules that its code can reach: a loss function may have a
        teacher in its closure."""
        found = () if self._read is None else self._read.reader.owners.modules
        known = {id(one) for one in self._state.all_modules()}
        others = [one for one in found if id(one) not in known]
        return replace(self._state, modules=(*self._state.modules, *others))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the Python values."""
        return [] if self._read is None else list(self._read.reader.tensors.values())

    def require_unchanged(self) -> None:
        """Call after a capture. Raises `CaptureError` if it has changed a Python value."""
        if self._read is not None and (changed := self._read.changed_so_far()):
            raise CaptureError(str(changed))

    def restoring_host_state(self) -> ExitStack:
        """A context whose end restores the Python values and the host's random generators to their
        present state. Its `pop_all()` keeps what was changed."""
        undo = ExitStack()
        undo.callback(set_host_rng_states, host_rng_states())
        if self._read is not None:
            undo.callback(self._read.restore)
        return undo

    def find_again(self, state: StepState | None = None) -> None:
        """Look for Python values again before the next batch: the model has other modules, or the
        step has another `state`."""
        self._state = state or self._state
        self._read, self._modules = None, []

    def find(self) -> None:
        """Look for Python values now. Raises `CaptureError` if one prevents a capture."""
        self._values()

    def _values(self) -> ReadValues:
        if self._read is None:
            self._read = ReadValues(self._state)
            self._modules = self._state.all_modules()
            if (compiled := self._read.reader.owners.own_graphs) is not None:
                raise CaptureError(describe_own_graphs(compiled))
            if (iterator := self._read.reader.iterator) is not None:
                name, line = iterator
                where = "" if line is None else f" ({line})"
                raise CaptureError(
                    f"the step draws from the iterator {name}{where}, and a graph would repeat "
                    "what it drew at capture: draw from it in the loader instead"
                )
        return self._read

    def _frozen_settings(self) -> tuple[Hashable, ...]:
        """The settings that a graph freezes, by name."""
        return (*self._more_settings(), *self._group_settings.read(self._state))


def _changed_setting(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """The name of the first setting that differs."""
    differing = (one[0] for one, other in zip(before, after, strict=False) if one != other)
    return str(next(differing, "number of parameter groups"))
