"""Deferred values: losses and metrics that the host reads late and never waits for.

A loss stays on the device. Every few steps the values collected there are copied to pinned memory,
on a separate stream. The host reads them once the copy is done, and never waits for it:

    compute   [step 1][step 2]..[step 10][step 11]..
    losses                        [copy 1–10]           the host reads them some steps later
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device, PinnedBuffer, Stream, open_device
from headrace.errors import DeferredError, StepError
from headrace.parallel import SINGLE, AllReduce, Ranks
from headrace.schema import require_whole

Scalar = torch.Tensor | float | int
_MAX_BLOCKS = 4
# Stands for a value that is on the device. Compared with `is`: a host value may be NaN, too.
_ON_DEVICE = float("nan")


@dataclass(frozen=True, slots=True)
class DeferredValues:
    """One step's values, arrived on the host. They are exact: the copy uses float64, or float32 if
    that holds all of them. `outputs` are the tensors that the loss function returned under that
    name; they are on the device."""

    step: int
    values: dict[str, float]
    outputs: Any = None

    @property
    def non_finite(self) -> tuple[str, ...]:
        """The names of values that were NaN or infinite in this step."""
        return tuple(name for name, value in self.values.items() if not math.isfinite(value))


class DeferredScalars:
    """Push device scalars, read them later: in order, each exactly once.

        deferred = DeferredScalars("cuda")                   # or a Device
        for step, batch in enumerate(loader):
            deferred.push(step, loss)                        # or {"loss": …, "accuracy": …}
            for entry in deferred.ready():                   # what has arrived; never blocks
                print(entry.step, entry.values["loss"])
        rest = deferred.drain()                              # waits; the ledger records it

    Python numbers among the values cost the device nothing. Device and pinned memory are limited to
    four blocks of `every` steps each. If all four are being copied, `push` waits for the oldest
    (`deferred_full` in the ledger). Keys may change from step to step. With several `ranks`, one
    all-reduce sums each block over them before its copy. Then all ranks must call `push`, `flush`
    and `drain` at the same steps.
    """

    def __init__(
        self,
        device: Device | str | torch.device,
        every: int = 10,
        *,
        stream: Stream | None = None,
        ranks: Ranks = SINGLE,
    ) -> None:
        require_whole("every", every, 1, DeferredError)
        self._device = open_device(device)
        self._every = every
        self._ranks = ranks
        self._stream = stream if stream is not None else self._device.stream("losses")
        self._filling: _Block | None = None
        self._in_flight: deque[_Block] = deque()
        self._idle: list[_Block] = []
        self._arrived_values: deque[DeferredValues] = deque()

    def push(self, step: int, values: Scalar | Mapping[str, Scalar]) -> None:
        """Keep this step's values on the device, to be read back with the others."""
        self.add(step, values)
        self.send_full()

    def add(self, step: int, values: Scalar | Mapping[str, Scalar]) -> None:
        """The first half of `push`: keep this step's values on the device."""
        block = self._filling
        if block is not None and type(values) is dict and block.add_same(step, values):
            return
        # Check for a dict first: nearly all values are one, and the check for Mapping is slower.
        named = values if isinstance(values, (dict, Mapping)) else {"loss": values}
        tensors, numbers = [], {}
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise DeferredError(
                        f"{name!r} has shape {tuple(value.shape)}: expected a single number"
                    )
                tensors.append(value.detach())
                numbers[name] = _ON_DEVICE
            else:
                numbers[name] = float(value)
        self.send_full()
        block = self._filling
        if block is None or not block.columns.fits(numbers, tensors):
            self.flush()
            block = self._filling = self._take_block(_Columns.of(numbers, tensors))
        block.add(step, numbers, tensors)

    def send_full(self) -> None:
        """The second half of `push`: start the copy of a full block."""
        if self.is_full:
            self.flush()

    @property
    def is_full(self) -> bool:
        """Whether the present block is full."""
        return self._filling is not None and len(self._filling.entries) == self._every

    def flush(self) -> None:
        """Start the copy of what was pushed so far, even if the block is not full."""
        block = self._filling
        if block is not None:
            block.send(self._stream, self._ranks)  # if this raises, the block keeps its values
            self._in_flight.append(block)
            self._filling = None

    def ready(self) -> list[DeferredValues]:
        """The values that have arrived since the last call. Never blocks."""
        if not self._in_flight and not self._arrived_values:
            return []
        self.has_outstanding()
        arrived = list(self._arrived_values)
        self._arrived_values.clear()
        return arrived

    def drain(self, reason: str = "losses") -> list[DeferredValues]:
        """All values not yet handed out. Waits for those that have not arrived."""
        self.flush()
        while self._in_flight:
            self._in_flight[0].wait(reason)
            self._collect()
        return self.ready()

    def has_outstanding(self) -> bool:
        """Whether some values have not arrived yet. Never blocks."""
        while self._in_flight and self._in_flight[0].has_arrived():
            self._collect()
        return bool(self._in_flight) or self._filling is not None

    @property
    def pending(self) -> int:
        """Steps that were pushed and not yet handed out."""
        blocks = [*self._in_flight, *([self._filling] if self._filling else [])]
        return len(self._arrived_values) + sum(len(block.entries) for block in blocks)

    def abandon(self) -> None:
        """Drop values whose copy has not started: other ranks no longer take part in their sum."""
        if self._filling is not None:
            self._idle.append(self._filling)
            self._filling = None

    def state(self) -> list[dict[str, Any]]:
        """What was pushed and not yet handed out, as Python numbers and tensors on the device.
        Never blocks. `values_of_state` turns it into values again."""
        blocks = [*self._in_flight, *([self._filling] if self._filling else [])]
        return state_of_values(self._arrived_values) + [block.state() for block in blocks]

    def close(self) -> None:
        """Give the pinned memory back. Values that were not drained are lost, so drain first."""
        self.flush()
        for block in [*self._in_flight, *self._idle]:
            block.release()
        self._in_flight.clear()
        self._idle.clear()

    def _collect(self) -> None:
        block = self._in_flight[0]
        self._arrived_values.extend(block.read())  # if this raises, the block stays in flight
        self._idle.append(self._in_flight.popleft())

    def _take_block(self, columns: _Columns) -> _Block:
        while self._in_flight and self._in_flight[0].has_arrived():
            self._collect()
        if len(self._in_flight) == _MAX_BLOCKS:
            self._in_flight[0].wait("deferred_full")
            self._collect()
        for index, block in enumerate(self._idle):
            if block.columns == columns:
                return self._idle.pop(index)
        for block in self._idle:  # other columns are rare: these blocks are not worth keeping
            block.release()
        self._idle.clear()
        return _Block(self._device, self._every, columns)


class SummedScalars(DeferredScalars):
    """Deferred scalars of several ranks: each value is the mean over all of them, by weight."""

    def add(self, step: int, values: Scalar | Mapping[str, Scalar]) -> None:
        named = values if isinstance(values, Mapping) else {"loss": values}
        super().add(step, _weighted(named, self._device))

    def ready(self) -> list[DeferredValues]:  # `drain` returns these, too
        return [_means(summed) for summed in super().ready()]

    def state(self) -> list[dict[str, Any]]:
        if self.pending:
            raise StepError(
                "values of earlier batches are not summed over ranks yet: expected a call of "
                "engine.settle() on all ranks before engine.state_dict()"
            )
        return []


def state_of_values(entries: Iterable[DeferredValues]) -> list[dict[str, Any]]:
    """Values that have arrived, in the form of `DeferredScalars.state`."""
    return [
        {"steps": [entry.step], "numbers": [entry.values], "names": [], "rows": None}
        for entry in entries
    ]


def values_of_state(state: Iterable[Mapping[str, Any]], device: Device) -> list[DeferredValues]:
    """The values in a stored `DeferredScalars.state`."""
    entries = []
    for block in state:
        rows: list[list[float]] = [[]] * len(block["steps"])
        if block["rows"] is not None:
            with device.ledger.waiting("restore"):
                rows = device.read_host(block["rows"].to("cpu"))
        for step, numbers, row in zip(block["steps"], block["numbers"], rows, strict=True):
            named = dict(zip(block["names"], row, strict=True))
            entries.append(DeferredValues(step, dict(numbers) | named))
    return entries


def _weighted(values: Mapping[str, Scalar], device: Device) -> dict[str, torch.Tensor]:
    """What ranks sum to get means by weight: each value times its weight, and the weight."""
    dtype = torch.float32 if device.torch_device.type == "mps" else torch.float64

    def number(value: Scalar) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().to(dtype).reshape(())
        return torch.full((), float(value), dtype=dtype, device=device.torch_device)

    total = number(values.get("weight", 1))
    numbers = {name: number(value) for name, value in values.items() if name != "weight"}
    # The loss of a batch of weight 0 is often 0/0.
    shares = {name: torch.where(total > 0, one * total, 0.0) for name, one in numbers.items()}
    return shares | {"weight": total}


def _means(summed: DeferredValues) -> DeferredValues:
    """The means by weight, from the sums over ranks."""
    weight = summed.values["weight"]
    values = {
        name: value / weight if weight and name != "weight" else value
        for name, value in summed.values.items()
    }
    return DeferredValues(summed.step, values)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a block: the names and dtypes of the values that are read from the device."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, numbers: Mapping[str, float], tensors: list[torch.Tensor]) -> _Columns:
        names = tuple(name for name, number in numbers.items() if number is _ON_DEVICE)
        return cls(names, tuple(tensor.dtype for tensor in tensors))

    def fits(self, numbers: Mapping[str, float], tensors: list[torch.Tensor]) -> bool:
        """Whether these values have the same columns, in the same order."""
        if len(tensors) == len(numbers) == 1 and len(self.names) == 1:  # usually just the loss
            return self.names[0] in numbers and self.dtypes[0] == tensors[0].dtype
        return self == _Columns.of(numbers, tensors)

    @property
    def dtype(self) -> torch.dtype:
        """A dtype that holds all of them exactly."""
        exact = (torch.float32, torch.float16, torch.bfloat16)
        return torch.float32 if all(t in exact for t in self.dtypes) else torch.float64


class _Block:
    """Memory for the values of `every` steps, on the device and pinned on the host.

    It is filled again only after the host has read it. So the next writes need no edge to the copy.
    """

    def __init__(self, device: Device, every: int, columns: _Columns) -> None:
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
        self._only_columns = dict.fromkeys(columns.names, _ON_DEVICE)
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
