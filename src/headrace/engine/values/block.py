"""Memory for the values of a few steps: filled on the device, copied to the host, read there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device, PinnedBuffer, Stream
from headrace.engine.values.arrived import DeferredValues, Scalar
from headrace.parallel import AllReduce, Ranks

# Stands for a value that is on the device. Compared with `is`: a host value may be NaN, too.
ON_DEVICE = float("nan")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a block: the names and dtypes of the values that are read from the device."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, numbers: Mapping[str, float], tensors: list[torch.Tensor]) -> Columns:
        names = tuple(name for name, number in numbers.items() if number is ON_DEVICE)
        return cls(names, tuple(tensor.dtype for tensor in tensors))

    def fits(self, numbers: Mapping[str, float], tensors: list[torch.Tensor]) -> bool:
        """Whether these values have the same columns, in the same order."""
        if len(tensors) == len(numbers) == 1 and len(self.names) == 1:  # usually just the loss
            return self.names[0] in numbers and self.dtypes[0] == tensors[0].dtype
        return self == Columns.of(numbers, tensors)

    @property
    def dtype(self) -> torch.dtype:
        """A dtype that holds all of them exactly."""
        exact = (torch.float32, torch.float16, torch.bfloat16)
        return torch.float32 if all(t in exact for t in self.dtypes) else torch.float64


class Block:
    """Memory for the values of `every` steps, on the device and pinned on the host.

    It is filled again only after the host has read it. So the next writes need no edge to the copy.
    """

    def __init__(self, device: Device, every: int, columns: Columns) -> None:
        self._device = device
        self.columns = columns
        self.entries: list[tuple[int, dict[str, float]]] = []
        self._on_device: torch.Tensor | None = None
        self._on_host: torch.Tensor | None = None
        self._buffer: PinnedBuffer | None = None
        self._filled, self._arrived = device.event(), device.event()
        self._sum: AllReduce | None = None
        self._rows: list[torch.Tensor] = []
        # The numbers of an entry that has nothing but the columns.
        self._only_columns = dict.fromkeys(columns.names, ON_DEVICE)
        if columns.names:
            shape = (every, len(columns.names))
            self._on_device = device.empty(shape, columns.dtype)
            # Views of the rows, made once. If there is one value, its rows are 0-dim.
            single = self._on_device.view(-1) if shape[1] == 1 else self._on_device
            self._rows = list(single.unbind(0))
            self._buffer = device.pinned.take(math.prod(shape) * columns.dtype.itemsize)
            self._on_host = self._buffer.view(shape, columns.dtype)

    def add_same(self, step: int, values: dict[str, Scalar]) -> bool:
        """A faster `add` for what most batches have: 0-dim tensors, the same as the batch before.
        Returns False, and adds nothing, if the values are anything else."""
        at, columns = len(self.entries), self.columns
        if at == len(self._rows) or tuple(values) != columns.names:
            return False
        for value, dtype in zip(values.values(), columns.dtypes, strict=True):
            if not isinstance(value, torch.Tensor) or value.dim() or value.dtype is not dtype:
                return False
        tensors: Any = values.values()
        self._write(self._rows[at], [value.detach() for value in tensors])
        self.entries.append((step, self._only_columns))
        return True

    def add(self, step: int, numbers: dict[str, float], tensors: list[torch.Tensor]) -> None:
        """Keep one step's values: tensors in the next row, numbers as they are."""
        if tensors:
            scalars = [value if value.dim() == 0 else value.reshape(()) for value in tensors]
            self._write(self._rows[len(self.entries)], scalars)
        self.entries.append((step, numbers))

    def _write(self, row: torch.Tensor, scalars: list[torch.Tensor]) -> None:
        """Copy 0-dim tensors to a row, by one kernel if they have its dtype."""
        if len(scalars) == 1:
            row.copy_(scalars[0])
        else:
            dtype = row.dtype
            torch.stack([one if one.dtype is dtype else one.to(dtype) for one in scalars], out=row)

    def send(self, stream: Stream, ranks: Ranks) -> None:
        """Start the sum over ranks, if there are several, and the copy to the host."""
        if self._on_device is None:
            return
        self._filled.record()
        stream.wait_event(self._filled)
        with self._device.use(stream):
            if ranks.several:
                self._sum = ranks.all_reduce(self._on_device[: len(self.entries)])
            if self._sum is None or self._sum.on_stream:
                self._copy("ranks")

    def _copy(self, reason: str) -> None:
        """Start the copy to the host, after the sum over ranks if there is one."""
        assert self._on_device is not None
        assert self._on_host is not None
        if self._sum is not None:
            self._sum.wait(self._device.ledger, reason)
            self._sum = None
        rows = len(self.entries)
        self._device.copy(self._on_host[:rows], self._on_device[:rows])
        self._arrived.record()

    def has_arrived(self) -> bool:
        if self._on_device is None:
            return True
        if self._sum is not None:  # computed by the hosts, not on the stream
            if not self._sum.done():
                return False
            self._copy("ranks")
        return self._arrived.query()

    def wait(self, reason: str) -> None:
        if self._on_device is not None:
            if self._sum is not None:
                self._copy(reason)
            self._device.wait(self._arrived, reason)

    def read(self) -> list[DeferredValues]:
        rows: list[list[float]] = [[]] * len(self.entries)
        if self._on_host is not None:
            # No host wait: this is pinned memory, and the copy to it is done.
            rows = self._device.read_host(self._on_host[: len(self.entries)])
        arrived = [
            DeferredValues(step, named | dict(zip(self.columns.names, row, strict=True)))
            for (step, named), row in zip(self.entries, rows, strict=True)
        ]
        self.entries = []
        return arrived

    def state(self) -> dict[str, Any]:
        count = len(self.entries)
        return {
            "steps": [step for step, _ in self.entries],
            "numbers": [numbers for _, numbers in self.entries],
            "names": list(self.columns.names),
            "rows": None if self._on_device is None else self._on_device[:count],
        }

    def release(self) -> None:
        """Give the memory back. Its next use is ordered after the copy that may still run."""
        if self._buffer is not None:
            after = self._arrived if self._arrived.recorded else None
            if after is not None:
                self._device.current_stream().wait_event(after)
            self._buffer.release(after=after)
            self._buffer = self._on_device = self._on_host = None
            self._rows = []
