"""A graphed model's eager calls: the first of each kind, which are watched, and the checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.capture.captured_model import CallKind
from headrace.capture.eager_calls import DOUBLE_BACKWARD
from headrace.capture.host_draws import HostDraws
from headrace.capture.model_state import ModelState
from headrace.capture.outputs import own_tensors
from headrace.capture.part import CHECKED, FIRST_CALLS
from headrace.capture.state import StepState
from headrace.capture.trials import TracedRun, Trials
from headrace.data import flatten_batch

# A loader that never repeats a shape must not fill the memory.
_MAX_KINDS = 4096
# For how many calls of its kind a check waits for the backward of others, at most.
_MAX_POSTPONED = 8
# After a check, so many calls at most run eagerly until its backward.
_MAX_UNFINISHED_CALLS = 8
Run = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """`after` is how many calls of a kind run eagerly before its capture, `shapes` how many graphs
    a model has at most, `recheck` after how many replays a graph is checked (0: never)."""

    after: int
    shapes: int
    recheck: int


class ModelTrials:
    """Watches and checks calls. `give_up` is told why nothing can be captured."""

    def __init__(
        self, step: StepState, options: GraphOptions, give_up: Callable[[str], None]
    ) -> None:
        self._device = step.device
        after, recheck = options.after, options.recheck
        self._trials = Trials(step.device, first=max(after - 1, 1), last=after, recheck=recheck)
        self._give_up = give_up
        self._kinds: dict[Hashable, CallKind] = {}
        # How many more calls may run eagerly.
        self._unfinished = 0

    def kind(self, key: Hashable) -> CallKind:
        """The kind of the calls that have this key."""
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) > _MAX_KINDS:
                kinds = self._kinds.items()
                self._kinds = {at: one for at, one in kinds if self.has_agreed(one)}
            found = self._kinds[key] = CallKind(key)
        return found

    def has_agreed(self, kind: CallKind) -> bool:
        return self._trials.watch.has_agreed(kind)

    def wants(self, kind: CallKind) -> bool:
        """Whether to watch a call."""
        return self._trials.watch.wants(kind, kind.uses)

    def known_of(self, kind: CallKind) -> tuple[list[torch.Tensor], HostDraws | None]:
        """What calls of a kind read besides the model's own tensors, and draw on the host."""
        return self._trials.watch.read_by(kind), self._trials.watch.host_draws(kind)

    @property
    def rounding(self) -> str | None:
        return self._trials.watch.rounding

    def forget(self, *, kinds: bool = False) -> None:
        """Watch every kind again. `kinds`: forget also what they have shown."""
        self._trials.watch.forget()
        if kinds:
            self._kinds.clear()

    def watch(
        self, kind: CallKind, state: ModelState, call: Any, run: Run
    ) -> tuple[Any, str | None]:
        """Run eagerly, and look for what no graph could repeat. Returns also why nothing can be
        captured, if that is clear."""
        device, guards = self._device, state.guards
        before, random_state = device.memory().allocated, device.random_state()
        versions = [one._version for one in guards.buffers]
        result, trial = self._run(FIRST_CALLS, state, call, run)
        kind.note_run(
            device.memory().allocated - before,
            draws=not torch.equal(random_state, device.random_state()),
            writes=guards.written_buffer(versions),
        )
        is_first, changed = kind.uses == 1, state.change_of_code()
        why = None if is_first else changed or state.change_of_model()
        if why is None:
            why = self._trials.learn(kind, trial, first=is_first)
        given = [*flatten_batch(call), *guards.tensors]
        for number, tensor in enumerate(own_tensors(result, given)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(self._see_gradient, kind, number))
        return result, why

    def _see_gradient(self, kind: CallKind, number: int, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self._give_up(DOUBLE_BACKWARD)
        kind.note_gradient(number, tuple(gradient.stride()))
        kind.note_backward(autocast=torch.is_autocast_enabled(self._device.torch_device.type))

    def _run(self, why: str, state: ModelState, call: Any, run: Run) -> tuple[Any, TracedRun]:
        leaves = flatten_batch(call)
        code = ModelTrials._run.__code__
        with self._trials.run(code, lambda: [*state.guards.tensors, *leaves]) as trial:
            torch.clear_autocast_cache()  # what is cast here is not what earlier calls have cast
            with trial.tracer:
                result = run(why)
        trial.allow_host_draws()
        return result, trial

    # --- checks -----------------------------------------------------------------------------------

    def is_unfinished(self) -> bool:
        """Whether a call runs eagerly since one that was checked waits for its backward. In one
        backward either all calls are graphs or none, else a gradient that others are added to would
        be rounded otherwise."""
        if not self._unfinished:
            return False
        self._unfinished -= 1
        return True

    def is_check_due(self, kind: CallKind, is_pending: Callable[[], bool]) -> bool:
        """Whether to check a call now. Until no other call waits for its backward, a check waits,
        too, but not for ever."""
        if self._trials.recheck.is_due(kind):
            kind.let_check_wait(_MAX_POSTPONED)
        return kind.begins_check(is_pending)

    def check(
        self, kind: CallKind, state: ModelState, call: Any, run: Run, name: str
    ) -> tuple[Any, str | None]:
        """Run eagerly what a graph would repeat, and compare. Returns also what differs."""
        result, trial = self._run(CHECKED, state, call, run)
        for output in own_tensors(result, flatten_batch(call)):
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(self._finish_check)
                self._unfinished = _MAX_UNFINISHED_CALLS
        found = self._trials.difference(kind, trial)
        return result, found if self._trials.learn_of(kind, found, name) else None

    def is_hopeless(self) -> bool:
        """Whether checks have differed so often that nothing is worth capturing."""
        return self._trials.recheck.is_hopeless

    def _finish_check(self, gradient: torch.Tensor) -> None:
        self._unfinished = 0
