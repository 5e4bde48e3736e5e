"""`StreamManager`: a fixed set of streams by index and by role, and the events between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.device.base import Device, Event, Stream
from headrace.device.opening import open_device
from headrace.errors import ClosedError, DeviceError, StreamIndexError

MIN_STREAMS, MAX_STREAMS = 2, 8

#: The stream of each role, by the number of streams. With fewer than four, roles share streams: two
#: are transfer and compute; with three, backward has its own.
ROLES = {
    2: {"transfer": 0, "forward": 1, "backward": 1, "transfer_next": 0},
    3: {"transfer": 0, "forward": 1, "backward": 2, "transfer_next": 0},
    4: {"transfer": 0, "forward": 1, "backward": 2, "transfer_next": 3},
}


class StreamManager:
    """Two to eight streams on one device, by index or by role, and the events that order them.

        manager = StreamManager("cuda", 4)           # or a Device
        arrived = manager.create_event()
        with manager.use("transfer"):
            manager.device.copy(slot, staging)
        manager.record_event(arrived, "transfer")
        manager.wait_event("forward", arrived)       # the forward stream waits, the host does not

    The streams are the device's own: two managers on one device share them. A wrong index, role or
    device raises an error that lists what there is; so does use after `close`.
    """

    def __init__(self, device: Device | str | torch.device, streams: int = 4) -> None:
        if isinstance(streams, bool) or not isinstance(streams, int):
            raise DeviceError(f"streams = {streams!r}: expected a whole number")
        if not MIN_STREAMS <= streams <= MAX_STREAMS:
            raise DeviceError(f"streams = {streams}: expected {MIN_STREAMS} to {MAX_STREAMS}")
        self.device = open_device(device)
        self.roles = ROLES[min(streams, 4)]
        names = [_stream_name(index, self.roles) for index in range(streams)]
        self._streams = [self.device.stream(name) for name in names]
        self._thread = threading.local()
        self._closed = False

    def __len__(self) -> int:
        return len(self._streams)

    def get_stream(self, which: int | str) -> Stream:
        """The stream of that index or role."""
        return self._streams[self.index_of(which)]

    def index_of(self, which: int | str) -> int:
        """The index of a role. An index is checked and returned."""
        self._require_open()
        if isinstance(which, str):
            if which not in self.roles:
                raise StreamIndexError(
                    f"no stream has the role {which!r}; roles: {', '.join(self.roles)}"
                )
            return self.roles[which]
        if isinstance(which, bool) or not isinstance(which, int):
            raise StreamIndexError(f"stream {which!r}: expected an index or the name of a role")
        if not 0 <= which < len(self._streams):
            raise StreamIndexError(
                f"no stream {which}: this manager has {len(self._streams)}, "
                f"0 to {len(self._streams) - 1}"
            )
        return which

    # --- the current stream -----------------------------------------------------------------------

    @contextmanager
    def use(self, which: int | str) -> Iterator[Stream]:
        """Send this thread's work to that stream inside the block."""
        with self.device.use(self.get_stream(which)) as stream:
            yield stream

    def set_current_stream(self, which: int | str) -> Stream:
        """Send this thread's work to that stream until `restore_current_stream`."""
        stream = self.get_stream(which)
        before = self.device.switch(stream)
        if not hasattr(self._thread, "before"):
            self._thread.before = before
        return stream

    def restore_current_stream(self) -> None:
        """Return to this thread's stream before its first `set_current_stream`."""
        if not hasattr(self._thread, "before"):
            raise DeviceError(
                "restore_current_stream without a set_current_stream before it in this thread"
            )
        self.device.switch_back(self._thread.before)
        del self._thread.before

    # --- events -----------------------------------------------------------------------------------

    def create_event(self, *, timing: bool = False) -> Event:
        """A new event of this manager's device."""
        self._require_open()
        return self.device.event(timing=timing)

    def record_event(self, event: Event, which: int | str) -> None:
        """Put the mark at the end of that stream."""
        stream = self.get_stream(which)
        self._require_own(event)
        event.record(stream)

    def query_event(self, event: Event) -> bool:
        """Whether the event has passed. Never blocks."""
        self._require_open()
        self._require_own(event)
        return event.query()

    def wait_event(self, which: int | str, event: Event) -> None:
        """Make that stream wait for the event. The host goes on."""
        stream = self.get_stream(which)
        self._require_own(event)
        stream.wait_event(event)

    def synchronize_event(self, event: Event, reason: str = "synchronize_event") -> None:
        """Make the host wait for the event. The ledger counts it under `reason`."""
        self._require_open()
        self._require_own(event)
        self.device.wait(event, reason)

    # --- synchronize ------------------------------------------------------------------------------

    def synchronize(self, which: int | str, reason: str = "synchronize") -> None:
        """Make the host wait for all work on that stream. The ledger counts it under `reason`."""
        self.device.synchronize(reason, self.get_stream(which))

    def synchronize_all(self, reason: str = "synchronize") -> None:
        """Make the host wait for each stream in turn."""
        self._require_open()
        for index in range(len(self._streams)):
            self.synchronize(index, reason)

    # --- state ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all streams; any later use raises. Closing twice is fine."""
        if not self._closed:
            self.synchronize_all("close")
            self._closed = True

    def __enter__(self) -> StreamManager:
        self._require_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the stream manager on {self.device} was used after close()")

    def _require_own(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise DeviceError(f"event = {event!r}: expected an Event; create_event() makes one")
        self.device.require_own("an event", event.device)


def _stream_name(index: int, roles: dict[str, int]) -> str:
    """A stream's name is its first role; streams past the fourth have none."""
    for role, at in roles.items():
        if at == index:
            return role
    return f"extra{index}"
