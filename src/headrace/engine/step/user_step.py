"""The user's own step as a step of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.data import Fetched
from headrace.device import Device
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.loss.loss_output import LossOutput
from headrace.engine.stages import Launched, Standing
from headrace.engine.streams.lanes import Lanes
from headrace.source_lines import describe_function


class CountsReplays(Protocol):
    """A step function that replays graphs of itself."""

    @property
    def replays(self) -> int: ...

    def __call__(self, batch: Any) -> Any: ...

    def begin_pass(self) -> None: ...

    def end_pass(self) -> None: ...


StepFunction = Callable[..., Any]


class UpdateCount:
    """Counts the updates of a user's own step, over all passes: one a batch."""

    def __init__(self) -> None:
        self.updates = 0

    def count(self) -> None:
        self.updates += 1


class UserStep:
    """Calls the user's own step function with a batch, or replays its graphs, which keep the
    `carry` themselves."""

    def __init__(
        self,
        step: StepFunction,
        device: Device,
        lanes: Lanes,
        count: UpdateCount,
        carry: CarriedState | None,
        graphs: CountsReplays | None = None,
    ) -> None:
        self._step, self._device, self._lanes, self._count = step, device, lanes, count
        self._carry, self._graphs = carry, graphs
        self._name = f"the step {describe_function(step)}"
        if graphs is not None:
            graphs.begin_pass()

    def __call__(self, fetched: Fetched) -> Launched:
        replays = 0 if self._graphs is None else self._graphs.replays
        with self._lanes.on(self._lanes.forward, "step"):
            returned = self._call(fetched.batch)
        replayed = self._graphs is not None and self._graphs.replays > replays
        self._count.count()
        standing = Standing(self._count.updates)
        if returned is None:
            return Launched(fetched, None, False, True, standing=standing, replayed=replayed)
        loss = LossOutput.of(returned, self._device, needs_grad=False, by=self._name)
        if loss.outputs is not None and not replayed:  # a replay returns copies
            with self._lanes.on(self._lanes.forward):
                loss = loss.unaliased()
        return Launched(
            fetched,
            loss.values,
            loss.weighted,
            updated=True,
            standing=standing,
            replayed=replayed,
            outputs=loss.outputs,
        )

    def _call(self, batch: Any) -> Any:
        if self._graphs is not None:
            return self._graphs(batch)
        if self._carry is None:
            return self._step(batch)
        returned, carried = self._carry.call(self._step, self._name, batch, batch)
        self._carry.keep(carried)
        return returned

    def finish(self) -> None:
        if self._graphs is not None:
            self._graphs.end_pass()

    def recover(self, counted: Standing) -> bool:
        return True
