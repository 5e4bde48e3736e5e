"""Tell the checker about an order that it cannot see."""

from __future__ import annotations

from typing import Any

from headrace.errors import DeviceError
from headrace.fake import patches
from headrace.fake.streams import FakeStream


def ordered(before: Any, after: Any = None) -> None:
    """Say that all work on the stream `before` is done before what the stream `after` does from now
    on, or before what this host thread does, if `after` is None.

        extension.join_streams(copies, compute)        # C++ that the checker cannot see
        headrace.fake.ordered(copies, compute)

    It orders nothing itself: be sure that the program does. On a real device, where no race is
    looked for, it does nothing. To accept one race, write `# headrace: ordered-by <why>` at one of
    its two lines instead.
    """
    if not patches.devices:
        return
    first = _stream(before, "before")
    device = first.device
    if after is not None:
        _stream(after, "after").wait_stream(first)
        return
    with device.lock:
        device.launch(first.actor)
        device.host_waits(dict(first.actor.clock), first.actor.time_ns, "ordered")


def _stream(given: Any, name: str) -> FakeStream:
    stream = getattr(given, "_fake", given)
    if not isinstance(stream, FakeStream):
        raise DeviceError(f"ordered({name}={given!r}): expected a stream of the fake device")
    return stream
