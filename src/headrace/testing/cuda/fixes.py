"""The call that would remove a race, as a line of the user's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from headrace.device import Device
from headrace.source_lines import short_path
from headrace.testing import races
from headrace.testing.cuda.streams import Stream
from headrace.testing.operators import is_collective
from headrace.testing.races import Access, Freed, is_users_frame
from headrace.testing.source import assigned_name

if TYPE_CHECKING:
    from headrace.source_lines import Site
    from headrace.testing.cuda.device import FakeCuda
    from headrace.testing.streams import FakeStream

# More than a user's object has; a module or a table has more.
_MAX_ATTRIBUTES = 200


def missing_call(
    device: FakeCuda, kind: str, first: Access, second: Access, freed: Freed | None
) -> str:
    """The missing call and where it belongs. Streams and tensors have the names that the line which
    is running now can use, or else those that their own line gave them."""
    here = _place(second.site)
    if kind == "reuse":
        tensor = (freed and assigned_name(freed.allocated_at)) or "tensor"
        streams = _stream_name(device, first.where), _stream_name(device, second.where)
        return (
            f"{tensor}.record_stream({streams[0]}) before the last reference to it goes, or "
            f"{streams[1]}.wait_stream({streams[0]}) before {here}"
        )
    if kind == "freed" or is_collective(first.operation):
        return races.missing_call(kind, first, second)
    if first.on_host or (first.where == second.where):
        threads = "host threads" if first.on_host and second.on_host else "threads that launch them"
        return f"a lock, queue or join between the two {threads}"
    waited_for = _stream_name(device, first.where)
    if second.on_host:
        return (
            f"done = {waited_for}.record_event() after {_place(first.site)}, and "
            f"done.synchronize() before {here}"
        )
    # A collective runs after what is on the stream that is current at the call.
    launched = device.current_stream().name if is_collective(second.operation) else second.where
    waiting = _stream_name(device, launched)
    if waiting == waited_for:  # a variable that has named both, one after the other
        waited_for = f"<stream {first.where!r}>"
    return f"{waiting}.wait_stream({waited_for}) before {here}"


def _place(site: Site) -> str:
    return f"{short_path(site.file)}:{site.line}"


def _stream_name(device: FakeCuda, where: str) -> str:
    """An expression for a stream."""
    stream = device.stream_named(where) or device.default_stream
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_frame(frame):
            for name in _names_of(stream, frame):
                return name
        frame = frame.f_back
    if stream in device.made_at:
        return stream.name.partition(" #")[0]
    if stream is not device.default_stream:  # PyTorch's own, which no variable names
        return f"<stream {stream.name!r}>"
    is_current = device.current_stream() is stream
    return f"torch.cuda.{'current' if is_current else 'default'}_stream()"


def _names_of(stream: FakeStream, frame: FrameType) -> Iterator[str]:
    """The names by which a frame can use a stream: a variable, an attribute of one, or an item of a
    list or dict."""
    variables = frame.f_locals
    for name, value in variables.items():
        if _is(value, stream):
            yield name
    for name, value in variables.items():
        yield from _items_of(name, value, stream)
    for name, value in variables.items():
        attributes: Mapping[str, Any] | None = getattr(value, "__dict__", None)
        if isinstance(value, Device):  # the fake device itself keeps streams, too
            continue
        if isinstance(attributes, dict) and len(attributes) <= _MAX_ATTRIBUTES:
            for attribute, inner in attributes.items():
                if _is(inner, stream):
                    yield f"{name}.{attribute}"
                yield from _items_of(f"{name}.{attribute}", inner, stream)
    for name, value in frame.f_globals.items():
        if _is(value, stream):
            yield name


def _items_of(name: str, value: object, stream: FakeStream) -> Iterator[str]:
    if type(value) in (list, tuple, dict) and len(value) <= _MAX_ATTRIBUTES:  # type: ignore[arg-type]
        items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
        for key, inner in items:
            if _is(inner, stream) and isinstance(key, int | str):
                yield f"{name}[{key!r}]"


def _is(value: object, stream: FakeStream) -> bool:
    return issubclass(type(value), Stream) and value._made is stream  # type: ignore[attr-defined]
