"""`graphed(step)`: a training step of the user's own as graphs, for any loop.

    @hr.graphed
    def step(batch):
        fake = generator(batch.noise)
        d_optimizer.zero_grad()
        d_loss(discriminator(batch.real), discriminator(fake.detach())).backward()
        d_optimizer.step()
        ...
        return {"d_loss": d.detach(), "g_loss": g.detach()}

The first calls with a shape run eagerly, and two of them are watched. If both did the same, the
next call is captured, and later ones are replays. A step that no graph can repeat always runs
eagerly; the log says why, once.

Gradients may stay from call to call (an update every n-th batch). `p.grad` is then an input of the
step, like the batch: each graph belongs to the gradients, None or tensors, that it was captured
with. After a replay, `p.grad` is what it was after the capture. Gradients that a step neither uses
nor drops, such as those of another step's model, stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from headrace.capture import GraphReport
from headrace.device import Device, open_device
from headrace.engine.graphs.function_work import FunctionWork
from headrace.engine.loss.carried_state import CarriedState
from headrace.engine.loss.carry import Carry
from headrace.errors import StepError

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class GraphedFunction(Generic[Arguments, Returned]):
    """A step function that replays graphs of itself."""

    def __init__(
        self,
        step: Callable[Arguments, Returned],
        device: Device,
        *,
        carry: CarriedState | None,
        **settings: Any,
    ) -> None:
        functools.update_wrapper(self, step)
        self._carry = carry
        work: FunctionWork[Returned] = FunctionWork(step, device, carry=carry, **settings)
        self._graphs = work.graphs

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        return self._graphs((args, kwargs))

    def call_eagerly(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        """Call the step without a graph, also if there is one."""
        return self._graphs.run((args, kwargs))

    def give_up(self, why: str) -> None:
        """Capture nothing any more."""
        self._graphs.give_up(why, quietly=True)

    @property
    def replays(self) -> int:
        """Calls that were replays."""
        return self._graphs.replays

    @property
    def carried(self) -> Any:
        """The state that the next call gets, as live tensors; None without a `carry`, or if it is
        the initial state. Set it to continue from another state, or to None to begin anew."""
        return None if self._carry is None else self._carry.state

    @carried.setter
    def carried(self, state: Any) -> None:
        if self._carry is None:
            raise StepError("this step carries no state: expected graphed(step, carry=…)")
        self._carry.set(state)

    def report(self) -> GraphReport:
        """What was captured and replayed, and why not."""
        return self._graphs.report()

    def close(self) -> None:
        """Drop all graphs and free their memory. Later calls capture again."""
        self._graphs.drop()


@overload
def graphed(
    step: Callable[Arguments, Returned],
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    carry: Any = None,
    shapes: int = 16,
    after: int = 2,
    recheck: int = 1000,
) -> GraphedFunction[Arguments, Returned]: ...


@overload
def graphed(
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    carry: Any = None,
    shapes: int = 16,
    after: int = 2,
    recheck: int = 1000,
) -> Callable[[Callable[Arguments, Returned]], GraphedFunction[Arguments, Returned]]: ...


def graphed(
    step: Callable[Arguments, Returned] | None = None,
    *,
    device: Device | str | torch.device = "auto",
    modules: Iterable[torch.nn.Module] | None = None,
    optimizers: Iterable[torch.optim.Optimizer] | None = None,
    carry: Any = None,
    shapes: int = 16,
    after: int = 2,
    recheck: int = 1000,
) -> Any:
    """Capture a training step of your own as graphs. Call what this returns instead of `step`.

    `hr.graphed(step, after=3)`, or as a decorator: `@hr.graphed` or `@hr.graphed(after=3)`.

    The step may do anything that runs on the device: several models and optimizers, several
    backward passes, `zero_grad`, random numbers, averages of weights. Its arguments are the batch
    (tensors, nested as you like) and values such as `update=True`; each combination of shapes and
    values has a graph of its own. Learning rates may change between calls.

    - `modules`, `optimizers`: what the step uses. Found by looking at the step's code, unless
      given.
    - `carry`: state that is carried from call to call: tensors on the device, nested as you like,
      or a `Carry`. The step gets it as its last positional argument, which you leave out, and
      returns `(result, carried)`; the call returns the result. `carried` of what this returns is
      the present state. For a `Carry`, the batch is the step's first argument.
    - `shapes`: how many graphs there are at most; the least used is dropped.
    - `after`: how many calls with a shape run eagerly before it is captured.
    - `recheck`: at its replays 10, 30, 100, 300 and then after each `recheck` of them, a graph is
      checked: the call runs eagerly and is compared. 0: never.

    You may keep what a call returns: a replay returns copies. `report()` of the result says what
    was captured, or why not; `close()` frees the graphs.
    """
    if after < 1 or shapes < 1:
        raise StepError(f"graphed: shapes = {shapes}, after = {after}; expected at least 1 each")
    if step is None:
        return functools.partial(
            graphed,
            device=device,
            modules=modules,
            optimizers=optimizers,
            carry=carry,
            shapes=shapes,
            after=after,
            recheck=recheck,
        )
    if not callable(step):
        raise StepError(f"graphed: step is a {type(step).__name__}; expected a function")
    device, spec = open_device(device), Carry.of(carry)
    return GraphedFunction(
        step,
        device,
        modules=None if modules is None else tuple(modules),
        optimizers=None if optimizers is None else tuple(optimizers),
        carry=None if spec is None else CarriedState(spec, device),
        max_graphs=shapes,
        watch_after=after,
        recheck=recheck,
    )
