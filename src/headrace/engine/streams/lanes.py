"""The lanes of a plan: the streams that run each part of a step, and the edges between them.

pipeline      transfer | the caller's stream (forward, backward, update) | losses
baseline, interval, event
              transfer | forward (and all that follows)
streams4      transfer, transfer_next | forward | backward
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from headrace.device import Device, Stream, StreamManager
from headrace.plan import Plan

_ON_CALLERS_STREAM = nullcontext()


class Lanes:
    """The streams of one pass over a loader, ordered among themselves and with the caller's stream.

    With `split`, backward and update have their own stream, and four edges order a batch:

    - Its forward waits for its transfer (`PrefetchIterator`).
    - Its backward waits for its forward (`forward_to_backward`).
    - The next forward waits for its update (`backward_to_forward`).
    - A new transfer waits before it reuses the batch's memory (`Sender`): it waits for the forward
      stream, which has waited for the update.
    """

    def __init__(self, device: Device, plan: Plan, *, split: bool, annotate: bool = False) -> None:
        self._device = device
        self._annotate = annotate
        self.caller = device.current_stream()
        self._split = split
        self._forwarded, self._updated = device.event(), device.event()
        if plan.sync == "none":
            self.forward = self.backward = self.caller
            self.losses = device.stream("losses")
            self.transfers: tuple[Stream, ...] = (device.stream("transfer"),)
        else:
            manager = StreamManager(device, plan.streams)
            self.forward = self.losses = manager.get_stream("forward")
            self.backward = manager.get_stream("backward") if split else self.forward
            transfer, following = (manager.get_stream(r) for r in ("transfer", "transfer_next"))
            self.transfers = (transfer,) if transfer is following else (transfer, following)

    def on(self, stream: Stream, name: str | None = None) -> AbstractContextManager[object]:
        """Inside the block, launch work on `stream`. With `annotate`, the vendor's profiler shows
        it as `name`. For the caller's stream there is nothing to do: the loop runs on it."""
        if name is not None and self._annotate:
            return self._annotated(stream, name)
        return _ON_CALLERS_STREAM if stream is self.caller else self._device.use(stream)

    @contextmanager
    def _annotated(self, stream: Stream, name: str) -> Iterator[None]:
        with self.on(stream), self._device.annotate(name):
            yield

    def wait_for_caller(self) -> None:
        """Make the engine's streams wait for the caller's stream."""
        for stream in self._engine_streams():
            stream.wait_stream(self.caller)

    def make_caller_wait(self) -> None:
        """Make the caller's stream wait for the engine's streams."""
        for stream in self._engine_streams():
            self.caller.wait_stream(stream)

    @contextmanager
    def yielding_to_caller(self) -> Iterator[None]:
        """Inside the block the caller may read the state and launch work on its stream. The
        engine's streams wait for that work."""
        self.make_caller_wait()
        try:
            yield
        finally:
            self.wait_for_caller()

    def forward_to_backward(self) -> None:
        """The edge from a batch's forward to its backward."""
        if self._split:
            self._forwarded.record(self.forward)
            self.backward.wait_event(self._forwarded)

    def backward_to_forward(self) -> None:
        """The edge from a batch's update to the next forward."""
        if self._split:
            self._updated.record(self.backward)
            self.forward.wait_event(self._updated)

    def _engine_streams(self) -> set[Stream]:
        return {self.forward, self.backward} - {self.caller}
