"""`Capturable`: what a `CapturedFunction` captures, as it sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from headrace.capture.graphs.captured_work import CapturedWork
from headrace.capture.guards.guards import Guards
from headrace.capture.state.capturable_optimizer import CapturableOptimizer
from headrace.capture.state.memory import StateBeforeCapture
from headrace.capture.state.state import StepState
from headrace.capture.watching.tracer import StepTracer

Call = TypeVar("Call")
Outcome = TypeVar("Outcome")
Result = TypeVar("Result")


class Capturable(ABC, Generic[Call, Outcome, Result]):
    """What is captured. A `call` is whatever the function is called with."""

    # --- what must be said ------------------------------------------------------------------------

    @abstractmethod
    def tree(self, call: Call) -> Any:
        """The arguments: tensors and values, nested."""

    @abstractmethod
    def find_state(self) -> StepState | None:
        """What the function uses; None if that cannot be said before another call."""

    @abstractmethod
    def obstacle(self, state: StepState) -> str | None:
        """Why the function cannot be captured; None if nothing prevents it."""

    @abstractmethod
    def key(self, call: Call) -> tuple[Hashable, ...]:
        """What a graph depends on besides the arguments and PyTorch's settings."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that the function may read besides its state, since other checks notice if one is
        replaced."""

    @abstractmethod
    def write_rates(self) -> None:
        """Bring the learning rates on the device up to date."""

    @abstractmethod
    def use_optimizers(self, capturable: Sequence[CapturableOptimizer]) -> None:
        """The optimizers are capturable from now on; none: they are plain again."""

    @abstractmethod
    def run(self, call: Call) -> Result:
        """Run eagerly."""

    @abstractmethod
    def run_watched(self, call: Call, key: Hashable, tracer: StepTracer) -> tuple[Result, bool]:
        """Run eagerly, traced. Returns also whether the trace is complete: False if the call has
        shown more state than was known."""

    @abstractmethod
    def record(self, tree: Any) -> Outcome:
        """What a graph records."""

    @abstractmethod
    def keep(self, captured: CapturedWork[Outcome], key: Hashable) -> None:
        """A capture has succeeded."""

    @abstractmethod
    def replay(
        self,
        captured: CapturedWork[Outcome],
        key: Hashable,
        call: Call,
        leaves: list[torch.Tensor],
    ) -> Result: ...

    @abstractmethod
    def dropped(self) -> None:
        """All graphs have been dropped."""

    @abstractmethod
    def given_up(self) -> None:
        """Nothing will be captured any more."""

    # --- what may be said -------------------------------------------------------------------------

    def found(self, guards: Guards) -> None:
        """What the function uses has been searched for."""

    def settings(self) -> tuple[tuple[str, Any], ...]:
        """What a graph freezes besides the optimizers' settings, by name."""
        return ()

    def graph_key(self, key: Hashable) -> Hashable | None:
        """The key of the graph, if it depends on more than is known before calls have agreed. None:
        run eagerly, the memory that a graph would use has not settled."""
        return key

    def held(self) -> list[torch.Tensor]:
        """Those of the `tensors` that must stay where they are while there are graphs."""
        return []

    def replaced(self) -> str | None:
        """Why graphs would use memory that nobody uses any more; None if they would not."""
        return None

    def memory_moves(self) -> None:
        """Called before the state is searched for again."""

    def run_compared(self, call: Call) -> tuple[Result, str | None] | None:
        """Run as a replay would where no trace can be compared, and return what differs. None:
        traces can be compared."""
        return None

    def ready(self) -> bool:
        """Whether this call may be captured, if it is due."""
        return True

    def check(self, key: Hashable, before: StateBeforeCapture) -> None:
        """Called after a capture. Raises `CaptureError` if a replay would not do."""
