"""Values that a forward makes on the host and copies to the device, the same in each call.

    identity = torch.from_numpy(np.eye(3, dtype=np.float32)).to(x.device)

A graph has no copy from the host: the host would wait for it. What watched calls have copied is
kept on the device instead, and a capture reads it there. Two calls must have copied the same, and
checks of a graph compare it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.capture.watching.read_backs import ReadBacks
from headrace.device import Device, Obstacle, copied_tensor
from headrace.errors import CaptureError
from headrace.source_lines import Site, users_line

_MAX_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class _Copy:
    """`content` is what was copied at a line, `value` what it became on the device; None if it
    stayed on the host, or came to the device as a number that a kernel was given."""

    content: bytes
    value: torch.Tensor | None
    site: Site


class HostConstants:
    """What one run copied from the host."""

    def __init__(self, device: Device, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._device = device
        self._found: list[_Copy] = []
        #: What it read back, of `tensors` of the model and of what was copied.
        self.read_backs = ReadBacks(device, tensors)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note what it copies or reads."""
        result, copy = func(*args, **kwargs), None
        if (source := self.copied(func, args)) is not None:
            self.note(source, result)
            copy = len(self._found) - 1
        self.read_backs.note(func, args, kwargs, result, copy)
        return result

    def copied(self, func: Any, args: Any) -> torch.Tensor | None:
        """The tensor that an operation copies from the host, to the host or to the device; None if
        it copies none."""
        source = copied_tensor(func, args)
        if source is None or not source.is_cpu or self._device.holds(source):
            return None
        return source if source.nbytes <= _MAX_BYTES else None

    def note(self, source: torch.Tensor, result: Any) -> None:
        """A tensor of the host has been copied."""
        value = result.detach().clone() if self._device.holds(result) else None
        self._found.append(_Copy(_content(source), value, users_line()))

    def excuse(self, obstacles: Sequence[Obstacle]) -> list[Obstacle]:
        """Those of the obstacles that the run met which remain if a graph has the values on the
        device. What was copied without a wait is none of these values."""
        met = Counter(one for one in obstacles if one.may_be_copy)
        most: dict[Site | None, int] = {}
        for one, count in met.items():
            most[one.site] = max(count, most.get(one.site, 0))
        copies: Counter[Site | None] = Counter()
        for at, copy in enumerate(self._found):
            if copy.value is not None and copies[copy.site] < most.get(copy.site, 0):
                copies[copy.site] += 1
            else:
                self._found[at] = replace(copy, value=None)
        excused = Counter({one: copies[one.site] for one in met})
        remaining = list((Counter(obstacles) - excused).elements())
        return self.read_backs.excuse(remaining, [one.value is not None for one in self._found])

    def same_as(self, other: HostConstants) -> bool:
        """Whether two runs copied the same values to the device, and read the same back."""
        mine, theirs = (
            [one.content for one in run._found if one.value is not None] for run in (self, other)
        )
        return mine == theirs and self.read_backs.same_as(other.read_backs)

    @property
    def values(self) -> list[torch.Tensor]:
        """What a graph reads of them."""
        return [one.value for one in self._found if one.value is not None]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """In the block, a capture gets the values from the device, and what it reads back without a
        wait. Raises `CaptureError` if they are others now."""
        if not self.values and not len(self.read_backs):
            yield
            return
        with _FromDevice(self) as mode:
            yield
        if mode.copies != len(self._found) or mode.reads != len(self.read_backs):
            raise CaptureError("it copied or read less than when it was watched")

    def value_of(self, number: int, source: torch.Tensor) -> torch.Tensor | None:
        """What one of the copies is replaced by; None if it is not."""
        copy: _Copy | None = self._found[number] if number < len(self._found) else None
        if copy is None or (copy.value is not None and copy.content != _content(source)):
            raise CaptureError("it copied another value from the host than when it was watched")
        return copy.value


class _FromDevice(TorchDispatchMode):
    """Replaces copies from the host, and reads. `copies` and `reads` are how many there were so
    far."""

    def __init__(self, constants: HostConstants) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants = constants
        self.copies = self.reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._constants.read_backs.is_read(func, args):
            self.reads += 1
            return self._constants.read_backs.value(self.reads - 1)
        value, source = None, self._constants.copied(func, args)
        if source is not None:
            value = self._constants.value_of(self.copies, source)
            self.copies += 1
        if value is None:
            return func(*args, **(kwargs or {}))
        return args[0].copy_(value) if func._schema.name == "aten::copy_" else value.clone()


def _content(source: torch.Tensor) -> bytes:
    with torch._C._DisableTorchDispatch():
        flat = source.detach().resolve_conj().resolve_neg().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
