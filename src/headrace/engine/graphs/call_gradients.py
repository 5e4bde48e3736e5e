"""The gradients that calls of a step find, use and leave, and in which memory they are."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.capture import GraphCache, Storage, storages
from headrace.errors import CaptureError

# After this many calls in a row that find their gradients elsewhere, none is captured any more.
_MAX_UNSETTLED = 20
_GRADIENT = operator.attrgetter("grad")
_GRADIENTS_MOVE = (
    "each call finds the gradients that it uses in other memory, and a graph would read the old: "
    "write to a gradient in place (p.grad.copy_(…)) instead of assigning a new tensor, or drop it "
    "in the step with zero_grad()"
)


@dataclass(frozen=True, slots=True)
class Remains:
    """What a captured call leaves: its result, the parameters that it has given a gradient or None,
    each with that, and the state for the next call."""

    result: Any
    gradients: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    carried: Any


class FoundGradients:
    """The gradients that a call finds, and what becomes of them, by the parameter's position."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._entry = {
            at: (p, p.grad, p.grad._version)
            for at, p in enumerate(parameters)
            if p.grad is not None
        }
        self.tensors = [gradient for _, gradient, _ in self._entry.values()]
        self._seen_by_optimizer: set[int] = set()

    def seen_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Call before an optimizer's step."""
        seen = {id(p.grad) for group in optimizer.param_groups for p in group["params"]}
        self._seen_by_optimizer |= {
            at for at, (_, gradient, _) in self._entry.items() if id(gradient) in seen
        }

    def fates(self, touched: set[Storage]) -> GradientFates:
        """Call after the call. `touched` is all memory that its operations had as arguments."""
        used = {
            at
            for at, (_, gradient, version) in self._entry.items()
            if at in self._seen_by_optimizer
            or gradient._version != version
            or storages([gradient]) & touched
        }
        stays = {at for at, (p, gradient, _) in self._entry.items() if p.grad is gradient}
        return GradientFates(frozenset(used), frozenset(stays - used))


@dataclass(frozen=True, slots=True)
class GradientFates:
    """What a call does with the gradients that it finds: it has `used` some, and has left others as
    they were (`kept`). The rest it has dropped unread, as `zero_grad()` does."""

    used: frozenset[int]
    kept: frozenset[int]


class CallGradients:
    """The gradients of a step's `parameters`: all that has a gradient."""

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []
        # What calls, by their key, do with the gradients of the calls before.
        self._fates: dict[Hashable, GradientFates] = {}
        # Addresses of the gradients that graphs leave: memory of the graphs' pool.
        self._own: set[int] = set()
        # By their key: calls in a row whose gradients were in new memory.
        self._unsettled: Counter[Hashable] = Counter()
        self._captured_key: Hashable = None
        self._at_capture: list[torch.Tensor] = []

    def use(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def missing(self) -> tuple[bool, ...]:
        """Which parameters have no gradient."""
        gradients = map(_GRADIENT, self.parameters)
        return tuple(map(operator.is_, gradients, itertools.repeat(None)))

    def present(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def note(self, key: Hashable, fates: GradientFates) -> None:
        """What a call has done with the gradients that it found."""
        self._fates[key] = fates

    def graph_key(self, key: Hashable, graphs: GraphCache[Any]) -> Hashable | None:
        """With the addresses of the gradients that a graph would use, and 0 for all others. None if
        they are in new memory: those of an eager call are elsewhere each time.

        A gradient that the step leaves alone counts if another graph of this function has made it:
        the graphs share memory, and one captured without it might use that memory for its own.
        """
        fates, found_at = self._fates[key], [0] * len(self.parameters)
        for at in fates.used | fates.kept:
            gradient = self.parameters[at].grad
            address = 0 if gradient is None else gradient.data_ptr()
            if at in fates.used or address in self._own:
                found_at[at] = address
        graph_key = (key, tuple(found_at))
        settled = not any(found_at) or graphs.uses(graph_key) > 0
        self._unsettled[key] = 0 if settled else self._unsettled[key] + 1
        if self._unsettled[key] == _MAX_UNSETTLED:
            raise CaptureError(_GRADIENTS_MOVE)
        if not settled:
            graphs.find(graph_key)  # counts it: this memory has been seen
            return None
        self._captured_key = key
        return graph_key

    # --- a capture --------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        self._at_capture = self.present()

    def entry(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self.parameters]

    def left_since(
        self, entry: list[torch.Tensor | None]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...]:
        """The parameters that the captured call has given a gradient or None, each with that."""
        used = self._fates[self._captured_key].used
        return tuple(
            (p, p.grad)
            for at, p in enumerate(self.parameters)
            if p.grad is None or p.grad is not entry[at] or at in used
        )

    def captured(self) -> list[torch.Tensor]:
        """The gradients at the beginning of the capture, which its graph reads."""
        found, self._at_capture = self._at_capture, []
        return found

    def own(self, gradients: Iterable[torch.Tensor]) -> None:
        """A graph leaves these."""
        self._own |= {gradient.data_ptr() for gradient in gradients}

    def disown(self) -> None:
        self._own.clear()
