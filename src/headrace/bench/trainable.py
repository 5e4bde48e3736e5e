"""A workload together with what trains it: Headrace's engine here, other libraries in `peers`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from headrace.bench.endless_batches import EndlessBatches
from headrace.bench.plan_list import PlanEntry
from headrace.bench.works.training import Made
from headrace.bench.works.work import Workload
from headrace.device import Device
from headrace.engine import Engine, EpochResult
from headrace.errors import BenchError
from headrace.source_lines import line_of_error


@dataclass(frozen=True, slots=True)
class Timing:
    """How long some steps took. `start_ns` is on the ledger's clock. `result` is the engine's; None
    for a peer. `pass_ns` is what the pass took besides its steps, if that was measured."""

    steps: int
    start_ns: int
    elapsed_ns: int
    result: EpochResult | None = None
    pass_ns: float | None = None

    @property
    def ms_per_step(self) -> float:
        return self.elapsed_ns / 1e6 / self.steps

    def without(self, short: Timing) -> Timing:
        """This timing less that of a `short` pass of fewer steps: what is left began and ended no
        pass."""
        steps, elapsed_ns = self.steps - short.steps, self.elapsed_ns - short.elapsed_ns
        if elapsed_ns <= 0:  # steps that take no longer than the clock's noise
            return self
        pass_ns = short.elapsed_ns - short.steps * elapsed_ns / steps
        return replace(self, steps=steps, elapsed_ns=elapsed_ns, pass_ns=pass_ns)


class Trainable(Protocol):
    """A workload and what trains it. After `close` it holds no device memory."""

    #: Steps to run before those that are timed.
    lead_in: int
    #: How many steps were trained so far; errors name the next one.
    trained: int

    def run(self, steps: int) -> Timing:
        """Train for some steps. The device is idle before and after them."""

    def losses(self, batches: Sequence[Any]) -> tuple[float, ...]:
        """Train on these batches and return their losses."""

    def graphs(self) -> dict[str, Any] | None: ...

    def compiled(self) -> dict[str, Any] | None: ...

    def close(self) -> None: ...


def timed(device: Device, steps: int, work: Callable[[], EpochResult | None]) -> Timing:
    """Time `work` between two waits for the device: the time includes all that it queued."""
    device.synchronize("bench")
    start_ns = device.ledger.now_ns()
    result = work()
    device.synchronize("bench")
    return Timing(steps, start_ns, device.ledger.now_ns() - start_ns, result)


class EngineTrainable:
    """A workload that Headrace's engine trains under a plan."""

    def __init__(
        self,
        work: Workload,
        device: Device,
        entry: PlanEntry,
        *,
        seed: int,
        deterministic: bool = False,
        made: Made | None = None,
    ) -> None:
        made = made or work.make(device, seed=seed, loader=entry.loader, pin=entry.plan.pin)
        self._device = device
        self._batches: EndlessBatches | None = EndlessBatches(made.loader, work.name)
        # Graphs are checked by eager steps, four of them within the first 300: far more of them in
        # a round of a few steps than in training.
        plan = replace(entry.plan, recheck=0)
        self._engine: Engine | None = made.engine(device, plan, deterministic=deterministic)
        self.lead_in, self.trained = self._batches.ahead, 0

    def run(self, steps: int) -> Timing:
        assert self._batches is not None
        batches = self._batches
        return timed(self._device, steps, lambda: self._epoch(batches.take(steps)))

    def losses(self, batches: Sequence[Any]) -> tuple[float, ...]:
        return self._epoch(batches).losses

    def graphs(self) -> dict[str, Any] | None:
        assert self._engine is not None
        report = self._engine.graphs
        return None if report is None else asdict(report)

    @property
    def rounding(self) -> str | None:
        """Why the last digits of its losses may differ from a plain loop's; None if they do not."""
        assert self._engine is not None
        report = self._engine.graphs
        return None if report is None else report.rounding

    def compiled(self) -> dict[str, Any] | None:
        assert self._engine is not None
        report = self._engine.compiled
        return None if report is None else asdict(report)

    def close(self) -> None:
        if self._engine is not None and self._batches is not None:
            self._engine.close()
            self._batches.close()
        self._engine = self._batches = None

    def _epoch(self, batches: Iterable[Any]) -> EpochResult:
        engine = self._engine
        assert engine is not None
        before = engine.last_result
        try:
            return engine.epoch(batches)
        finally:
            result = engine.last_result
            if result is not None and result is not before:
                self.trained += result.statistics.batches


def describe_error(problem: BaseException, trained: int | None = None) -> str:
    """An error in one line: the step, the error, and the line in the user's code, if any."""
    if is_out_of_memory(problem):
        first = (str(problem).strip().splitlines() or ["no message"])[0]
        return f"out of memory: {first}"
    text = " ".join(str(problem).split()) or "no message"
    if isinstance(problem, BenchError):
        return text  # it names the place already
    short = text if len(text) <= 300 else f"{text[:297]}…"
    site = line_of_error(problem.__traceback__)
    step = "" if trained is None else f"step {trained + 1}: "
    return f"{step}{type(problem).__name__}: {short}" + (f" ({site})" if site else "")


def is_out_of_memory(problem: BaseException | None) -> bool:
    """Whether the error is out of memory, or was caused by one that is."""
    while problem is not None:
        if isinstance(problem, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


class DeviceLost(Exception):  # noqa: N818 - the contestant's error, which is in its row
    """The device takes no more work from this process, whoever asks."""


def require_usable(device: Device, why: str) -> None:
    """Raise `DeviceLost` if, after the error `why`, every later call to the device fails.

    An illegal memory access ends the CUDA context: only another process can use the device.
    """
    try:
        device.synchronize("bench")
    except Exception as problem:
        raise DeviceLost(f"ended the device's context ({why})") from problem


def release_memory(device: Device) -> None:
    """Return the memory of closed trainables to the device."""
    gc.collect()
    device.release_unused()
