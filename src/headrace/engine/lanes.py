"""The lanes of a plan: which stream runs each part of a step, and the edges between them.

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

    With `split`, backward and update have a stream of their own, and four edges order a batch:
    forward after its transfer, backward after its forward, the next forward after this update, and
    a new transfer after the backward that read its memory before. The prefetcher makes the first
    and the last: a transfer waits for the forward stream, which has waited for the update.
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

    def take_over(self) -> None:
        """Make the engine's streams wait for the caller's stream."""
        for stream in self._own():
            stream.wait_stream(self.caller)

    def give_back(self) -> None:
        """Make the caller's stream wait for the engine's streams."""
        for stream in self._own():
            self.caller.wait_stream(stream)

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Inside the block the caller may read the state and launch work on its stream. The
        engine's streams wait for that work."""
        self.give_back()
        try:
            yield
        finally:
            self.take_over()

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

    def _own(self) -> set[Stream]:
        return {self.forward, self.backward} - {self.caller}
