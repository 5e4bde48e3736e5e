"""The call that would remove a race, as a line of the user's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from headrace.device import Device
from headrace.fake import autograd
from headrace.fake.cuda.streams import Stream
from headrace.races import race as races
from headrace.races.frames import is_users_frame
from headrace.races.operators import is_collective
from headrace.races.race import Access, Freed
from headrace.races.source import assigned_name
from headrace.source_lines import short_path, variables_of

if TYPE_CHECKING:
    from headrace.fake.cuda.device import FakeCuda
    from headrace.fake.streams import FakeStream
    from headrace.source_lines import Site

# More than a user's object has; a module or a table has more.
_MAX_ATTRIBUTES = 200


def missing_call(
    device: FakeCuda, kind: str, first: Access, second: Access, freed: Freed | None, known: bool
) -> str:
    """The missing call and where it belongs. `known` says whether the thread of the second access
    knows that the first is launched. Streams and tensors have the names that the line which
    is running now can use, or else those that their own line gave them."""
    # The second line may have called the first, as `backward()` calls hooks: to wait before it is
    # to wait too early.
    is_inside = second.called(first)
    where = f"after {_place(first.site)}" if is_inside else f"before {_place(second.site)}"
    if kind == "reuse":
        tensor = (freed and assigned_name(freed.allocated_by)) or "tensor"
        waited_for = _stream_name(device, first.where, is_inside)
        recorded = f"{tensor}.record_stream({waited_for}) before the last reference to it goes"
        if not known:  # the allocating stream cannot wait for what may not be launched yet
            return recorded
        waiting = _stream_name(device, second.where, is_inside)
        return f"{recorded}, or {waiting}.wait_stream({waited_for}) {where}"
    if kind == "freed" or is_collective(first.operation):
        return races.missing_call(kind, first, second, freed, known)
    if first.on_host or (first.where == second.where):
        threads = "host threads" if first.on_host and second.on_host else "threads that launch them"
        return f"a lock, queue or join between the two {threads}"
    waited_for = _stream_name(device, first.where, is_inside)
    if second.on_host:
        if is_inside:
            return f"{waited_for}.synchronize() {where}"
        return (
            f"done = {waited_for}.record_event() after {_place(first.site)}, and "
            f"done.synchronize() {where}"
        )
    # A collective runs after what is on the stream that is current at the call.
    launched = device.current_stream().name if is_collective(second.operation) else second.where
    waiting = _stream_name(device, launched, is_inside)
    if waiting == waited_for:  # a variable that has named both, one after the other
        waited_for = f"<stream {first.where!r}>"
    return f"{waiting}.wait_stream({waited_for}) {where}"


def _place(site: Site) -> str:
    return f"{short_path(site.file)}:{site.line}"


def _stream_name(device: FakeCuda, where: str, elsewhere: bool = False) -> str:
    """An expression for a stream. With `elsewhere`, it is for another line than the running one:
    another stream may be current there."""
    stream = device.stream_named(where) or device.default_stream
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_frame(frame):
            for name in _names_of(stream, frame):
                return name
        frame = frame.f_back
    callers = autograd.callers_stream(device) or stream
    if not elsewhere and device.current_stream() is stream is callers:
        return "torch.cuda.current_stream()"
    if stream is device.default_stream:
        return "torch.cuda.default_stream()"
    if stream in device.wrappers and device.wrappers[stream]._is_assigned:
        return stream.name.partition(" #")[0]
    return f"<stream {stream.name!r}>"  # no variable names it


def _names_of(stream: FakeStream, frame: FrameType) -> Iterator[str]:
    """The names by which a frame can use a stream: a variable, an attribute of one, or an item of a
    list or dict."""
    variables = variables_of(frame)
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
    for name, value in frame.f_globals.items():
        yield from _items_of(name, value, stream)


def _items_of(name: str, value: object, stream: FakeStream) -> Iterator[str]:
    if type(value) in (list, tuple, dict) and len(value) <= _MAX_ATTRIBUTES:  # type: ignore[arg-type]
        items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
        for key, inner in items:
            if _is(inner, stream) and isinstance(key, int | str):
                yield f"{name}[{key!r}]"


def _is(value: object, stream: FakeStream) -> bool:
    return issubclass(type(value), Stream) and value._made is stream  # type: ignore[attr-defined]
