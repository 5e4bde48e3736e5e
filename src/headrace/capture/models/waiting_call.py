"""A replayed call that waits for its backward: all that an eager one would need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.models.captured_model import CapturedModel
from headrace.capture.models.checked_call import CheckedCall
from headrace.capture.models.lanes import Ticket
from headrace.capture.models.model_clones import ModelClones
from headrace.capture.state.state import StepState
from headrace.errors import StepError


class WaitingCall:
    """A call of a graph, with what it was called with. The random
    states are those before the forward; None if it draws nothing."""

    def __init__(
        self,
        step: StepState,
        graph: CapturedModel,
        call: Any,
        leaves: list[Any],
        ticket: Ticket,
        random_states: tuple[torch.Tensor | None, torch.Tensor | None],
        checked: CheckedCall | None = None,
    ) -> None:
        self._device = step.device
        self.graph = graph
        self._ticket = ticket
        # Dropped when the backward is done: the loop may keep its loss.
        self._call: Any = call
        self.leaves: Any = leaves
        self._random_states = random_states
        self._checked = checked
        self._versions = _versions(leaves)

    def run(self, function: Any) -> Any:
        args, kwargs = self._call
        return function(*args, **kwargs)

    def take_checked(self) -> CheckedCall | None:
        """The call run eagerly, if it is compared, once."""
        checked, self._checked = self._checked, None
        return checked

    def finish(self) -> None:
        """Its backward is done."""
        self._ticket.done()
        self._call = self.leaves = None
        self._random_states = (None, None)

    def require_repeatable(self, name: str) -> None:
        """Raise if the call could not be computed again."""
        what = None
        if _versions(self.leaves) != self._versions:
            what = "an argument of it was written to in place after the call"
        elif self.graph.kind.writes is not None:
            what = f"its forward writes to {self.graph.kind.writes}"
        if what is not None:
            raise StepError(
                f"{name}: this backward needs the forward once more (create_graph=True, "
                f"or a gradient of an output that had none before), and {what}: leave this model "
                "out of speed_up()"
            )

    @contextmanager
    def as_then(self, model: torch.nn.Module, settings: KernelSettings) -> Iterator[None]:
        """In the block, random numbers and PyTorch's settings are those of the call. Buffers are
        clones, which the forward may write."""
        random, host = self._random_states
        of_device = (self._device.random_state, self._device.set_random_state)
        with (
            _other_state(random, *of_device),
            _other_state(host, torch.get_rng_state, torch.set_rng_state),
            settings.set(self.graph.kind.key.settings),
            ModelClones(model).in_place(),
        ):
            yield


@contextmanager
def _other_state(
    state: torch.Tensor | None,
    read: Callable[[], torch.Tensor],
    write: Callable[[torch.Tensor], None],
) -> Iterator[None]:
    """In the block a random generator has this state; None: its own."""
    now = None if state is None else read()
    if state is not None:
        write(state)
    try:
        yield
    finally:
        if now is not None:
            write(now)


def _versions(leaves: list[Any]) -> list[int]:
    return [one._version if not one.is_inference() else 0 for one in leaves]
