"""Every ordering edge in the package is load-bearing: without it, the checker objects.

The scenarios are run once to see which lines of Headrace order anything (a stream's wait, an
event's record, a host wait before host memory is read, a pinned buffer's release). Then each such
line is run without its effect, and some scenario must show a race, or a wait on an event that was
never recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
import torch

import headrace
from headrace.checkpoint import CheckpointWriter
from headrace.data import Prefetcher, prefetch
from headrace.device import Device, Event, PinnedBuffer, Stream
from headrace.engine import DeferredScalars, Engine
from headrace.errors import EventNotRecordedError
from headrace.fake import FakeDevice
from headrace.plan import Plan
from headrace.source_lines import Site

PACKAGE = Path(headrace.__file__).parent
# The primitives themselves, and code whose calls are not part of any loop.
PRIMITIVES = tuple(str(PACKAGE / name) for name in ("device", "fake", "races"))


# --- scenarios ------------------------------------------------------------------------------------


def data(count: int = 6, *, pinned: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 6, generator=generator), torch.ones(4)) for _ in range(count)]
    return [tuple(part.pin_memory() for part in batch) for batch in batches] if pinned else batches


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()


def engine(device: FakeDevice, plan: str | Plan, **options: Any) -> Engine:
    model = torch.nn.Linear(6, 1).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters())
    return Engine(model, optimizer, loss, plan=plan, device=device, **options)


def epochs(plan: str, **options: Any) -> Callable[[FakeDevice], object]:
    def run(device: FakeDevice) -> None:
        trained = engine(device, plan, **options)
        trained.epoch(data())
        trained.epoch(data(pinned=True))
        trained.evaluate(data(2))

    return run


def callers_loop(plan: str) -> Callable[[FakeDevice], object]:
    def run(device: FakeDevice) -> None:
        trained = engine(device, plan, accumulate=4)
        weight = next(trained.model.parameters())
        for _ in trained.steps(data()):
            with torch.no_grad():
                weight.mul_(0.9)  # the caller's own work, on the caller's stream
        weight + 1

    return run


def own_loop(device: FakeDevice) -> None:
    for batch in prefetch(data(), device):
        batch[0] * 2


def own_loop_on_another_stream(device: FakeDevice) -> None:
    side = device.stream("side")
    iterator = iter(prefetch(data(8, pinned=True), device, depth=1))
    for _ in range(8):
        with device.use(side):
            batch = next(iterator)
            batch[0] * 2
            del batch


def left_early(device: FakeDevice) -> None:
    iterator = iter(prefetch(data(), device))
    next(iterator)
    del iterator
    for _ in range(6):
        torch.ones(4, 6, device=device.torch_device)


def many_small_tensors(device: FakeDevice) -> None:
    for batch in prefetch([[torch.ones(3) for _ in range(9)] for _ in range(6)], device):
        torch.stack(batch).sum()


def batches_already_there(device: FakeDevice) -> None:
    def loader() -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield torch.ones(400, device=device.torch_device) * 2

    reader = device.stream("reader")
    with device.use(device.stream("producer")):
        for batch in Prefetcher(loader(), device, owner=reader):
            with device.use(reader):
                batch + 1
            del batch
            torch.ones(400, device=device.torch_device)


def batches_in_one_tensor(device: FakeDevice) -> None:
    def loader() -> Iterator[torch.Tensor]:
        batch = torch.empty(400, device=device.torch_device)
        for number in range(4):
            yield batch.fill_(number)

    reader = device.stream("reader")
    for batch in Prefetcher(loader(), device, owner=reader):
        with device.use(reader):
            batch + 1


def values_dropped(device: FakeDevice) -> None:
    deferred = DeferredScalars(device, every=2)
    for step in range(2):
        deferred.push(step, torch.ones((), device=device.torch_device))
    deferred.close()
    torch.ones(2, 1, device=device.torch_device)
    device.pinned.take(8).view((2,), torch.float32).fill_(0)


def values_over_and_over(device: FakeDevice) -> None:
    deferred = DeferredScalars(device, every=2)
    for step in range(30):
        deferred.push(step, torch.ones((), device=device.torch_device))
    deferred.drain()


def checkpoints(memory_bytes: int | None) -> Callable[[FakeDevice], object]:
    """Written while training goes on; in line, where there is no memory for a copy."""

    def run(device: FakeDevice) -> None:
        weight = torch.ones(400, device=device.torch_device)
        device.limit_memory(memory_bytes)
        with TemporaryDirectory() as folder, CheckpointWriter(device, Path(folder)) as writer:
            for step in range(3):
                writer.save({"weight": weight}, step)
                weight.mul_(2)
                if memory_bytes is None:
                    torch.ones(400, device=device.torch_device)

    return run


SCENARIOS: list[Callable[[FakeDevice], object]] = [
    *(epochs(plan) for plan in ("baseline", "interval", "event", "streams4", "pipeline")),
    epochs("streams4", accumulate=4),
    *(callers_loop(plan) for plan in ("event", "streams4", "pipeline")),
    own_loop,
    left_early,
    own_loop_on_another_stream,
    many_small_tensors,
    batches_already_there,
    batches_in_one_tensor,
    values_dropped,
    values_over_and_over,
    checkpoints(None),
    checkpoints(2_000),
]


# --- looking at, and leaving out, one line's effect -----------------------------------------------


def line_of_headrace() -> Site | None:
    """The line of Headrace, above the primitives, that is running; None if the test itself is."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*PRIMITIVES, "<")):
        frame = frame.f_back
    assert frame is not None
    name = frame.f_code.co_filename
    return Site(name, frame.f_lineno) if name.startswith(str(PACKAGE)) else None


@contextmanager
def watched(
    monkeypatch: pytest.MonkeyPatch, left_out: Site | None = None
) -> Iterator[dict[Site, set[str]]]:
    """Note which lines call which primitives, and make those of `left_out` do nothing."""
    seen: dict[Site, set[str]] = {}

    def watch(owner: type, name: str, instead: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            line = line_of_headrace()
            if line is not None and not (name == "release" and kwargs.get("after") is None):
                seen.setdefault(line, set()).add(name)
                if line == left_out:
                    return instead(original, self, *args, **kwargs)
            return original(self, *args, **kwargs)

        patch.setattr(owner, name, call)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    with monkeypatch.context() as patch:
        for owner, name in (
            (Stream, "wait_event"),
            (Stream, "wait_stream"),
            (Event, "record"),
            (Device, "wait"),
            (Device, "synchronize"),
            (FakeDevice, "record_stream"),
        ):
            watch(owner, name, nothing)
        watch(PinnedBuffer, "release", lambda original, self, after: original(self))
        yield seen


def is_a_bound(line: Site, calls: set[str]) -> bool:
    """Host waits that bound or slow the host but order nothing that anyone reads: the run-ahead
    window, copies far behind, the plan's synchronizations, blocking copies. Tests of their own
    count them."""
    file = Path(line.file).name
    if file == "copies.py" and calls == {"wait"}:
        return True
    bounding = file in ("host_sync.py", "feed.py") and calls <= {"wait", "synchronize"}
    return file == "run_ahead.py" or bounding


def complaint(scenario: Callable[[FakeDevice], object]) -> str | None:
    """What the checker has to say of a run; None if nothing."""
    with FakeDevice(check=False) as device:
        try:
            scenario(device)
        except EventNotRecordedError as problem:
            return str(problem)
    return str(device.races[0]) if device.races else None


def test_no_scenario_races_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for scenario in SCENARIOS:
        assert complaint(scenario) is None


def test_every_edge_is_load_bearing(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    seen: dict[Site, set[str]] = {}
    passing: dict[Site, list[Callable[[FakeDevice], object]]] = {}  # scenarios that come by a line
    for scenario in SCENARIOS:
        with watched(monkeypatch) as lines:
            complaint(scenario)
        for line, calls in lines.items():
            seen.setdefault(line, set()).update(calls)
            passing.setdefault(line, []).append(scenario)
    edges = {line: calls for line, calls in seen.items() if not is_a_bound(line, calls)}
    unnoticed = []
    for line, calls in sorted(edges.items(), key=lambda item: str(item[0])):
        with watched(monkeypatch, left_out=line):
            if not any(complaint(scenario) for scenario in passing[line]):
                unnoticed.append(f"{line} ({', '.join(sorted(calls))})")
    found = len(edges) - len(unnoticed)
    record_property("summary", f"{len(edges)} ordering edges, {found} found when left out")
    assert len(edges) >= 10
    assert unnoticed == []
