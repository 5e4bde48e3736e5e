"""Which stream each part of a step runs on under a plan, and the edges between them.

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

_THERE_ALREADY = nullcontext()


class Lanes:
    """The streams of one pass over a loader, ordered among themselves and with the caller's.

    With `split`, backward and update have a stream of their own and four edges order a batch:
    forward after its transfer, backward after its forward, the next forward after this update, and
    new transfers after the backward that used the memory before. The first and the last are the
    prefetcher's: a transfer waits for the forward stream, which has waited for the update.
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
        """Send work to `stream`, called `name` in the vendor's profiler if that is wanted; nothing
        to do for the caller's, on which the loop runs."""
        if name is not None and self._annotate:
            return self._annotated(stream, name)
        return _THERE_ALREADY if stream is self.caller else self._device.use(stream)

    @contextmanager
    def _annotated(self, stream: Stream, name: str) -> Iterator[None]:
        with self.on(stream), self._device.annotate(name):
            yield

    def take_over(self) -> None:
        """The engine's streams start after what the caller's holds."""
        for stream in self._own():
            stream.wait_stream(self.caller)

    def give_back(self) -> None:
        """The caller's stream goes on after what the engine's hold."""
        for stream in self._own():
            self.caller.wait_stream(stream)

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Inside the block the caller may look at the state, and put work of its own on a stream;
        the engine's streams go on after that."""
        self.give_back()
        try:
            yield
        finally:
            self.take_over()

    def forward_to_backward(self) -> None:
        if self._split:
            self._forwarded.record(self.forward)
            self.backward.wait_event(self._forwarded)

    def backward_to_forward(self) -> None:
        if self._split:
            self._updated.record(self.backward)
            self.forward.wait_event(self._updated)

    def _own(self) -> set[Stream]:
        return {self.forward, self.backward} - {self.caller}
