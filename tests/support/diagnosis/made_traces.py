"""Traces of training loops on a host and a device with a virtual clock: exact, and quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.diagnosis.torch_calls import TorchCall, TorchCallKind
from headrace.diagnosis.trace import Call, StepTrace, Work

US = 1000
MS = 1_000_000
WAKE = 8 * US


@dataclass
class Machine:
    """A host that launches work on streams. Every method moves the host's clock."""

    now: int = 0
    calls: list[Call] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    torch_calls: list[TorchCall] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    free: dict[int, int] = field(default_factory=dict)
    latency: int = 6 * US

    def python(self, ns: int) -> None:
        self.now += ns

    @contextmanager
    def inside(self, kind: TorchCallKind) -> Iterator[None]:
        start = self.now
        yield
        self.torch_calls.append(TorchCall(start, self.now, kind))

    def load(self, ns: int) -> None:
        self.inputs.append((self.now, self.now + ns))
        self.now += ns

    def launch(
        self, kernel: int, host: int = 10 * US, stream: int = 0, kind: str = "kernel"
    ) -> None:
        start, self.now = self.now, self.now + host
        self._run(start, kernel, stream, kind)
        self.calls.append(Call(start, self.now, "launch", "cudaLaunchKernel"))

    def copy_pageable(self, ns: int, *, left: int = -WAKE) -> None:
        """The host is blocked until the copy is done, but for the last of it."""
        start = self.now
        self._run(start, ns, 0, "copy")
        self.now = self.free[0] - left
        self.calls.append(Call(start, self.now, "copy", "cudaMemcpyAsync"))

    def wait(self) -> None:
        start = self.now
        self.now = max(self.now + 3 * US, max(self.free.values(), default=0) + WAKE)
        self.calls.append(Call(start, self.now, "wait", "cudaStreamSynchronize"))

    def step(self) -> None:
        self.marks.append(self.now)

    def trace(self) -> StepTrace:
        end = max(self.now, max(self.free.values(), default=0))
        work = tuple(sorted(self.work, key=lambda one: (one.start_ns, one.end_ns)))
        marks, calls, inputs = tuple(self.marks), tuple(self.calls), tuple(self.inputs)
        return StepTrace(0, end, marks, calls, work, inputs, tuple(self.torch_calls))

    def _run(self, launched: int, ns: int, stream: int, kind: str) -> None:
        start = max(launched + self.latency, self.free.get(stream, 0))
        self.free[stream] = start + ns
        self.work.append(Work(start, start + ns, kind, stream, len(self.calls)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Loop:
    """A training loop by its costs, all in nanoseconds."""

    kernels: int = 40
    kernel: int = 100 * US
    launch: int = 10 * US
    between: int = 5 * US
    load: int = 50 * US
    logging: int = 0
    copy: int = 0
    pageable: bool = False
    reads: int = 0
    steps: int = 8

    def run(self) -> StepTrace:
        machine = Machine()
        for _ in range(self.steps):
            machine.load(self.load)
            if self.copy and self.pageable:
                machine.copy_pageable(self.copy)
            elif self.copy:
                machine.launch(self.copy, stream=1, kind="copy")
            for _ in range(self.kernels):
                machine.python(self.between)
                machine.launch(self.kernel, self.launch)
            for _ in range(self.reads):
                machine.wait()
            machine.python(self.logging)
            machine.step()
        return machine.trace()
