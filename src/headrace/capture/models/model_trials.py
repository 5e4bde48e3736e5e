"""A graphed model's eager calls: the first of each kind, which are watched, and the checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.models.captured_model import CallKey, CallKind
from headrace.capture.models.eager import DOUBLE_BACKWARD
from headrace.capture.models.eager_waits import EagerWaits
from headrace.capture.models.model_state import ModelState
from headrace.capture.models.outputs import apart, own_tensors
from headrace.capture.reports.key_changes import KeyChanges
from headrace.capture.reports.reasons import BESIDE_CHECK, BESIDE_EAGER, CHECKED, FIRST_CALLS
from headrace.capture.state.state import StepState
from headrace.capture.watching.host_constants import HostConstants
from headrace.capture.watching.host_draws import HostDraws
from headrace.capture.watching.traced_run import TracedRun
from headrace.capture.watching.trials import Trials
from headrace.data import flatten_batch

# A loader that never repeats a shape must not fill the memory.
_MAX_KINDS = 4096
# For how many calls a check waits for one of its kind that nothing else waits beside.
_PATIENCE = 16
Run = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """`after` is how many calls of a kind run eagerly before its capture, `shapes` how many graphs
    a model has at most, `recheck` after how many replays a graph is checked (0: never), `check`
    how many of the first replays are compared with eager calls."""

    after: int
    shapes: int
    recheck: int
    check: int = 0


class ModelTrials:
    """Watches and checks calls. `give_up` is told why nothing can be captured."""

    def __init__(
        self, step: StepState, name: str, options: GraphOptions, give_up: Callable[[str], None]
    ) -> None:
        self._device = step.device
        after, recheck = options.after, options.recheck
        self._trials = Trials(
            step.device,
            name,
            first=max(after - 1, 1),
            last=after,
            recheck=recheck,
            can_deny=True,
        )
        #: Of the calls of each kind.
        self.agreement = self._trials.watch
        self._give_up = give_up
        self._settings = KernelSettings(step.device)
        self._kinds: dict[CallKey, CallKind] = {}
        # Kinds of which a call is to be checked, and for how many calls they may wait.
        self._due: set[CallKind] = set()
        self._patience = 0
        self.eager_waits, self.key_changes = EagerWaits(), KeyChanges(name, step.device)
        # Whether calls run eagerly until the backward of those that are checked.
        self._is_checking = False

    def kind(self, key: CallKey, call: Any) -> CallKind:
        """The kind of the calls that have this key; `call` is one."""
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) > _MAX_KINDS:
                kinds = self._kinds.items()
                self._kinds = {at: one for at, one in kinds if self.agreement.has_agreed(one)}
            found = self._kinds[key] = CallKind(key)
            args, kwargs = call
            named = {f"argument {at}": one for at, one in enumerate(args, 1)}
            self.key_changes.add(
                named | {f"argument {name!r}": one for name, one in kwargs.items()}
            )
        elif self.key_changes.streak:
            self.key_changes.seen()
        return found

    def known_of(
        self, kind: CallKind
    ) -> tuple[list[torch.Tensor], HostDraws | None, HostConstants | None]:
        """What calls of a kind read besides the model's own tensors, draw on the host, and copy
        from there."""
        kinds = self.agreement
        return kinds.read_by(kind), kinds.host_draws(kind), kinds.host_constants(kind)

    def answering_in_capture(self) -> AbstractContextManager[None]:
        """In the block, code that asks whether it is captured is answered as in the trials."""
        return self._device.answering(self.agreement.query_in_capture())

    def forget(self, *, kinds: bool = False) -> None:
        """Watch every kind again. `kinds`: forget also what they have shown."""
        self.agreement.forget()
        self._due.clear()
        self._is_checking = False
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
            why = self.agreement.learn(kind, trial, first=is_first)
        given = [*flatten_batch(call), *guards.tensors]
        result = apart(result, own_tensors(result, given))
        for number, tensor in enumerate(own_tensors(result, given)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                see = functools.partial(self._see_gradient, kind, kind.uses, number)
                tensor.register_hook(see)
        return result, why

    def _see_gradient(
        self, kind: CallKind, call: int, number: int, gradient: torch.Tensor | None
    ) -> None:
        if torch.is_grad_enabled():
            self._give_up(DOUBLE_BACKWARD)
        if gradient is None:  # another output of the same node has one
            return
        backward = call, torch._C._current_graph_task_id()
        kind.note_gradient(backward, self._settings.now(), number, tuple(gradient.stride()))

    def _run(self, why: str, state: ModelState, call: Any, run: Run) -> tuple[Any, TracedRun]:
        leaves = flatten_batch(call)
        code = ModelTrials._run.__code__

        def known() -> list[torch.Tensor]:
            return [*state.guards.tensors, *leaves]

        with self._trials.run(code, known, constants_of=state.guards.untrained()) as trial:
            torch.clear_autocast_cache()  # what is cast here is not what earlier calls have cast
            with trial.tracer:
                result = run(why)
        trial.allow_host_draws()
        trial.allow_host_constants()
        return result, trial

    # --- checks -----------------------------------------------------------------------------------

    def why_no_replay(self, kind: CallKind, is_pending: Callable[[], bool]) -> str | None:
        """Whether a call that has a graph is checked, or runs eagerly beside one that is; None: it
        may be a replay. In one backward either all calls are graphs or none, else a gradient that
        others are added to would be rounded otherwise. So a check begins when no call waits for its
        backward, and all calls from there to the backward of the checked one are eager."""
        if self._trials.recheck.is_due(kind):
            self._due.add(kind)
            self._patience = _PATIENCE
        if self._due and not self._is_checking and not self._waits(kind, is_pending()):
            self._is_checking = True
        if not self._is_checking:
            return BESIDE_EAGER if self.eager_waits.is_any() else None
        return CHECKED if kind in self._due else BESIDE_CHECK

    def _waits(self, kind: CallKind, is_pending: bool) -> bool:
        """Whether no check begins at this call. At first only a call of the wanted kind will do;
        after a while any, from which on the wanted one may come; and at last also a pending one."""
        self._patience -= 1
        if self._patience > 0:
            return is_pending or kind not in self._due
        return is_pending and self._patience > -_PATIENCE

    def run_beside(self, call: Any, run: Callable[[], Any]) -> Any:
        """Run a call eagerly, since one that is checked has, or will have, the same backward."""
        return self._hooked(run(), call)

    def _hooked(self, result: Any, call: Any) -> Any:
        """A call's result, whose backward ends the check."""
        outputs = [one for one in own_tensors(result, flatten_batch(call)) if one.grad_fn]
        for output in outputs:
            output.register_hook(self._end_check)
        if not outputs:
            self._is_checking = False
        return result

    def _end_check(self, gradient: torch.Tensor | None) -> None:
        if self._patience <= 0:
            self._due.clear()  # whether or not a call of these kinds has come
        self._is_checking = False

    def check(self, kind: CallKind, state: ModelState, call: Any, run: Run, drop: Run) -> Any:
        """Run eagerly what a graph would repeat, and compare. `drop` is told what differs."""
        self._due.discard(kind)
        result, trial = self._run(CHECKED, state, call, run)
        self._hooked(result, call)
        found = self.agreement.difference(kind, trial)
        self._trials.judge(kind, found, drop, self._give_up)
        return result
