"""Graphs on the fake device: a capture records work on a tape, a replay puts it on a stream again.

As on CUDA, nothing runs during a capture. PyTorch has to compute to know the shapes of results, but
afterwards the tape restores all older memory and the random generator, and fills the memory that
the capture allocated with garbage. A replay does the tape's arithmetic again in the same memory,
and is checked and timed like any other work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from headrace.device import Graph, Obstacle, Result, cuda_namespace, noting_host_draws
from headrace.errors import CaptureError, ClosedError, DeviceError, DeviceMismatchError
from headrace.fake import patches
from headrace.fake.graph_pools import GraphPool
from headrace.fake.patches import Replacement
from headrace.fake.raw_memory import unobserved
from headrace.fake.tape import Tape
from headrace.fake.tape_entries import Mark

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeStream


class FakeGraph(Graph):
    def __init__(self, tape: Tape) -> None:
        self._tape: Tape | None = tape

    def replay(self) -> None:
        tape = self._tape
        if tape is None:
            raise ClosedError("a graph was replayed after its close()")
        refuse(tape.device, "the replay of a graph")
        for tensor, launch in tape.freed_inputs():
            tape.device.replays_freed(tensor, launch)
        with unobserved():
            with tape.device.drawing():
                for step in tape.arithmetic:
                    step.run()
            tape.overwrite_shared()
        shared = [tape.pool.memory]
        if tape.draws:
            shared.append(tape.device.graph_random_state.memory)
        tape.device.replay(tape.launches, shared)

    def close(self) -> None:
        if self._tape is not None:
            self._tape.forget()
        self._tape = None


# --- for the device -------------------------------------------------------------------------------


def capture(
    device: FakeDevice, work: Callable[[], Result], pool: object, stream: FakeStream
) -> tuple[Graph, Result]:
    if not isinstance(pool, GraphPool) or pool.device is not device:
        raise DeviceMismatchError(f"capture on {device} expects a pool from its graph_pool()")
    if not device.watches_this_thread():
        raise DeviceError(f"{device} captures only inside its `with device:` block")
    tape = Tape(device, stream, pool)
    try:
        with device.use(stream), tape.recording():
            result = work()
    except Exception as problem:
        tape.forget()
        raise CaptureError("the step could not be captured") from problem
    return FakeGraph(tape), result


@contextmanager
def watch(device: FakeDevice) -> Iterator[list[Obstacle]]:
    found: list[Obstacle] = []
    draws = noting_host_draws(found, with_torch=device.draws_apart)
    with draws, device.call.changed(obstacles=found):
        yield found


def refuse(device: FakeDevice, what: str, stream: FakeStream | None = None) -> None:
    """Raise if this thread is capturing, or `stream` is captured: `what` makes the host wait for or
    query the device, which a capture forbids."""
    tape = device.call.tape or (None if stream is None else stream.tape)
    if tape is not None:
        tape.refuse(what)


def wait(stream: FakeStream, mark: Mark | None) -> bool:
    """Handle a stream's wait for a captured position; None: for work outside any capture. Returns
    whether the wait was recorded in a capture, so that it orders nothing now."""
    if mark is None:
        if stream.tape is not None:
            stream.tape.refuse("a dependency on work outside the capture")
        return False
    if mark.tape.over or stream.tape not in (None, mark.tape):
        raise RuntimeError("operation not permitted on an event last recorded in another capture")
    mark.tape.wait(stream, mark)
    return True


# --- what PyTorch asks the real device ------------------------------------------------------------

_IS_CAPTURING = "_cuda_isCurrentStreamCapturing"
_HEALTH_CHECK = next(
    name
    for name in (
        "_accelerator_graph_capture_health_check",
        "_cuda_graph_capture_health_check",  # before PyTorch 2.10
    )
    if hasattr(torch.optim.Optimizer, name)
)


def _health_check(optimizer: torch.optim.Optimizer) -> None:
    """Replaces PyTorch's own check, which asks the real device whether it is capturing."""
    for device in patches.devices:
        if device.current_stream().tape is None:
            continue
        if not all(group.get("capturable") for group in optimizer.param_groups):
            raise RuntimeError(
                "Attempting CUDA graph capture of step() for an instance of "
                f"{type(optimizer).__name__} but param_groups' capturable is False."
            )


def _is_capturing() -> bool:
    """Replaces what `torch.cuda.is_current_stream_capturing` calls."""
    for device in patches.devices:
        query = device.call.capture_query
        if query is not None and query.in_captures:
            return query.ask()
        if device.current_stream().tape is not None:
            return True
        if query is not None and query.ask():
            return True
    return cuda_namespace().is_available() and bool(patches.originals[_IS_CAPTURING]())


def _capturable_devices(supports_xla: bool = True) -> list[str]:
    """PyTorch's list, with "cpu" added: that is what C++ takes the fake's tensors for. It calls
    nothing, since importing torch.distributed.optim compiles it with TorchScript."""
    devices = ["cpu", "cuda", "xpu", "hpu"]
    if supports_xla:
        devices.append("xla")
    return devices


def _not_captured(name: str) -> Callable[..., Any]:
    """Replaces a function that sets the device's random generator, as checkpointing does. A capture
    refuses it, because a replay would not repeat it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for device in patches.devices:
            refuse(device, f"torch.{name}()")
        return patches.originals[name](*args, **kwargs)

    return run


def replacements() -> Iterator[Replacement]:
    for name in ("manual_seed", "set_rng_state"):
        yield Replacement(torch.random, name, _not_captured(name))
    yield Replacement(cuda_namespace().graphs, _IS_CAPTURING, _is_capturing)
    yield Replacement(torch.optim.Optimizer, _HEALTH_CHECK, _health_check)
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
    yield Replacement(optimizer, "_get_capturable_supported_devices", _capturable_devices)
