"""Values read late, never waited for.

A loss stays on the device. Every so many steps the values gathered there are copied to pinned
memory on a stream of their own, and are read when that copy has passed, which nobody waits for:

    compute   [step 1][step 2]..[step 10][step 11]..
    losses                        [copy 1–10]           host reads them some steps later
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

Scalar = torch.Tensor | float | int
_MOST_BLOCKS = 4
# Stands for a value that is on the device. Told by identity: a value of the host may be NaN too.
_ON_DEVICE = float("nan")


@dataclass(frozen=True, slots=True)
class DeferredValues:
    """One step's values, come back from the device. Numbers are exact: they travel as float64,
    or as float32 where all of them are."""

    step: int
    values: dict[str, float]

    @property
    def non_finite(self) -> tuple[str, ...]:
        """The names of values that were NaN or infinite in this very step."""
        return tuple(name for name, value in self.values.items() if not math.isfinite(value))


class DeferredScalars:
    """Push device scalars, read them later: in order, each exactly once.

        deferred = DeferredScalars("cuda")                   # or a Device
        for step, batch in enumerate(loader):
            deferred.push(step, loss)                        # or {"loss": …, "accuracy": …}
            for entry in deferred.ready():                   # what has come back; never blocks
                print(entry.step, entry.values["loss"])
        rest = deferred.drain()                              # waits, and the ledger knows

    Python numbers among the values cost the device nothing. Device and pinned memory are bounded:
    four blocks of `every` steps each; when all are under way, `push` waits for the oldest
    (`deferred_full` in the ledger). Keys may change from step to step. With several `ranks` each
    block is summed over them on its way, all of its values at once: then `push`, `flush` and
    `drain` are called at the same steps on all of them.
    """

    def __init__(
        self,
        device: Device | str | torch.device,
        every: int = 10,
        *,
        stream: Stream | None = None,
        ranks: Ranks = SINGLE,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise DeferredError(f"every = {every!r}: expected a whole number, 1 or more")
        self._device = open_device(device)
        self._every = every
        self._ranks = ranks
        self._stream = stream if stream is not None else self._device.stream("losses")
        self._filling: _Block | None = None
        self._under_way: deque[_Block] = deque()
        self._idle: list[_Block] = []
        self._come_back: deque[DeferredValues] = deque()

    def push(self, step: int, values: Scalar | Mapping[str, Scalar]) -> None:
        """Keep this step's values on the device, to be read back with the others."""
        self.add(step, values)
        self.send_full()

    def add(self, step: int, values: Scalar | Mapping[str, Scalar]) -> None:
        """The first half of `push`: keep this step's values on the device."""
        block = self._filling
        if block is not None and type(values) is dict and block.add_only(step, values):
            return
        # A dict nearly always: asking for any Mapping is slower.
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
        if block is None or not block.layout.fits(numbers, tensors):
            self.flush()
            block = self._filling = self._take_block(_Layout.of(numbers, tensors))
        block.add(step, numbers, tensors)

    def send_full(self) -> None:
        """The second half of `push`: send a full block on its way."""
        if self.is_full:
            self.flush()

    @property
    def is_full(self) -> bool:
        """Whether there are enough values to be sent."""
        return self._filling is not None and len(self._filling.entries) == self._every

    def flush(self) -> None:
        """Send what was pushed so far on its way, without waiting for a full block."""
        block = self._filling
        if block is not None:
            block.send(self._stream, self._ranks)  # if that fails, its values are still here
            self._under_way.append(block)
            self._filling = None

    def ready(self) -> list[DeferredValues]:
        """The values that have come back since the last call. Never blocks."""
        if not self._under_way and not self._come_back:
            return []
        self.awaits()
        arrived = list(self._come_back)
        self._come_back.clear()
        return arrived

    def drain(self, reason: str = "losses") -> list[DeferredValues]:
        """All values not yet handed out. Waits for those still under way."""
        self.flush()
        while self._under_way:
            self._under_way[0].wait(reason)
            self._collect()
        return self.ready()

    def awaits(self) -> bool:
        """Whether values are still on their way. Never blocks."""
        while self._under_way and self._under_way[0].has_arrived():
            self._collect()
        return bool(self._under_way) or self._filling is not None

    @property
    def pending(self) -> int:
        """Steps that were pushed and not yet handed out."""
        blocks = [*self._under_way, *([self._filling] if self._filling else [])]
        return len(self._come_back) + sum(len(block.entries) for block in blocks)

    def abandon(self) -> None:
        """Leave out what was not sent yet: another rank will not take part in its sum any more."""
        if self._filling is not None:
            self._idle.append(self._filling)
            self._filling = None

    def state(self) -> list[dict[str, Any]]:
        """What was pushed and not yet handed out, as plain values and the device's own tensors:
        nothing is waited for. `restored` makes values of it again."""
        blocks = [*self._under_way, *([self._filling] if self._filling else [])]
        return to_be_restored(self._come_back) + [block.state() for block in blocks]

    def close(self) -> None:
        """Give the pinned memory back. What was not drained is lost, so drain first."""
        self.flush()
        for block in [*self._under_way, *self._idle]:
            block.release()
        self._under_way.clear()
        self._idle.clear()

    def _collect(self) -> None:
        block = self._under_way[0]
        self._come_back.extend(block.read())  # if that fails, its values are still under way
        self._idle.append(self._under_way.popleft())

    def _take_block(self, layout: _Layout) -> _Block:
        while self._under_way and self._under_way[0].has_arrived():
            self._collect()
        if len(self._under_way) == _MOST_BLOCKS:
            self._under_way[0].wait("deferred_full")
            self._collect()
        for index, block in enumerate(self._idle):
            if block.layout == layout:
                return self._idle.pop(index)
        for block in self._idle:  # of another layout: rare, and not worth keeping
            block.release()
        self._idle.clear()
        return _Block(self._device, self._every, layout)


class SummedScalars:
    """The scalars of several ranks: each value is the mean over all of them, by weight."""

    def __init__(self, scalars: DeferredScalars, device: Device) -> None:
        self._scalars, self._device = scalars, device

    def add(self, step: int, values: Mapping[str, Scalar]) -> None:
        self._scalars.add(step, _to_be_summed(values, self._device))

    @property
    def is_full(self) -> bool:
        return self._scalars.is_full

    def ready(self) -> list[DeferredValues]:
        return [_as_means(summed) for summed in self._scalars.ready()]

    def drain(self, reason: str = "losses") -> list[DeferredValues]:
        return [_as_means(summed) for summed in self._scalars.drain(reason)]

    def state(self) -> list[dict[str, Any]]:
        if self.pending:
            raise StepError(
                "values of earlier batches are not summed over ranks yet: expected engine.settle() "
                "on all ranks before a state is taken"
            )
        return []

    @property
    def pending(self) -> int:
        return self._scalars.pending

    def awaits(self) -> bool:
        return self._scalars.awaits()

    def flush(self) -> None:
        self._scalars.flush()

    def abandon(self) -> None:
        self._scalars.abandon()

    def close(self) -> None:
        self._scalars.close()


def to_be_restored(entries: Iterable[DeferredValues]) -> list[dict[str, Any]]:
    """Values that have come back, as `DeferredScalars.state` has them."""
    return [
        {"steps": [entry.step], "numbers": [entry.values], "names": [], "rows": None}
        for entry in entries
    ]


def restored(state: Iterable[Mapping[str, Any]], device: Device) -> list[DeferredValues]:
    """The values of a stored `DeferredScalars.state`, whose tensors are on the host by now."""
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


def _to_be_summed(values: Mapping[str, Scalar], device: Device) -> dict[str, torch.Tensor]:
    """What ranks add up, to have means by weight: each value times its weight, and the weight."""
    dtype = torch.float32 if device.torch_device.type == "mps" else torch.float64

    def number(value: Scalar) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().to(dtype).reshape(())
        return torch.full((), float(value), dtype=dtype, device=device.torch_device)

    total = number(values.get("weight", 1))
    numbers = {name: number(value) for name, value in values.items() if name != "weight"}
    # The loss of nothing is often 0/0.
    shares = {name: torch.where(total > 0, one * total, 0.0) for name, one in numbers.items()}
    return shares | {"weight": total}


def _as_means(summed: DeferredValues) -> DeferredValues:
    """The means, of what ranks have added up."""
    weight = summed.values["weight"]
    values = {
        name: value / weight if weight and name != "weight" else value
        for name, value in summed.values.items()
    }
    return DeferredValues(summed.step, values)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which names are read from the device, and in which type."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, numbers: Mapping[str, float], tensors: list[torch.Tensor]) -> _Layout:
        names = tuple(name for name, number in numbers.items() if number is _ON_DEVICE)
        return cls(names, tuple(tensor.dtype for tensor in tensors))

    def fits(self, numbers: Mapping[str, float], tensors: list[torch.Tensor]) -> bool:
        """Whether these values have this layout; the order of names counts, too."""
        if len(tensors) == len(numbers) == 1 and len(self.names) == 1:  # mostly: a loss, no more
            return self.names[0] in numbers and self.dtypes[0] == tensors[0].dtype
        return self == _Layout.of(numbers, tensors)

    @property
    def dtype(self) -> torch.dtype:
        """One type in which all of them are exact."""
        exact = (torch.float32, torch.float16, torch.bfloat16)
        return torch.float32 if all(t in exact for t in self.dtypes) else torch.float64


class _Block:
    """Room for `every` steps' values, on the device and in pinned memory.

    It is filled again only after the host has read it, so the copy that read it needs no edge.
    """

    def __init__(self, device: Device, every: int, layout: _Layout) -> None:
        self._device = device
        self.layout = layout
        self.entries: list[tuple[int, dict[str, float]]] = []
        self._on_device: torch.Tensor | None = None
        self._on_host: torch.Tensor | None = None
        self._buffer: PinnedBuffer | None = None
        self._filled, self._arrived = device.event(), device.event()
        self._sum: AllReduce | None = None
        self._rows: list[torch.Tensor] = []
        #: The name of a single value, and an entry's numbers where it is on the device.
        self._only = layout.names[0] if len(layout.names) == 1 else None
        self._no_numbers = {} if self._only is None else {self._only: _ON_DEVICE}
        if layout.names:
            shape = (every, len(layout.names))
            self._on_device = device.empty(shape, layout.dtype)
            # Views of each row, made once: a single value's row is the number itself.
            single = self._on_device.view(-1) if shape[1] == 1 else self._on_device
            self._rows = list(single.unbind(0))
            self._buffer = device.pinned.take(math.prod(shape) * layout.dtype.itemsize)
            self._on_host = self._buffer.view(shape, layout.dtype)

    def add_only(self, step: int, values: dict[str, Scalar]) -> bool:
        """The short way, for a single value (mostly: a loss, no more). Whether it could be gone."""
        row = len(self.entries)
        if len(values) != 1 or self._only not in values or row == len(self._rows):
            return False
        value = values[self._only]
        if (
            not isinstance(value, torch.Tensor)
            or value.dim()
            or value.dtype != self.layout.dtypes[0]
        ):
            return False
        self._rows[row].copy_(value.detach())
        self.entries.append((step, self._no_numbers))
        return True

    def add(self, step: int, numbers: dict[str, float], tensors: list[torch.Tensor]) -> None:
        """Keep one step's values: tensors in the next row, numbers as they are."""
        if tensors:
            row = self._rows[len(self.entries)]
            if len(tensors) == 1:
                value = tensors[0]
                row.copy_(value if value.dim() == 0 else value.reshape(()))
            else:
                fitting = [
                    value
                    if value.dim() == 0 and value.dtype == row.dtype
                    else value.to(row.dtype).reshape(())
                    for value in tensors
                ]
                torch.stack(fitting, out=row)
        self.entries.append((step, numbers))

    def send(self, stream: Stream, ranks: Ranks) -> None:
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
        """To the host, in order after the sum over ranks, if there is one."""
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
        if self._sum is not None:  # the hosts do it
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
            # No host wait: this is pinned host memory, and its copy has passed.
            rows = self._device.read_host(self._on_host[: len(self.entries)])
        come_back = [
            DeferredValues(step, named | dict(zip(self.layout.names, row, strict=True)))
            for (step, named), row in zip(self.entries, rows, strict=True)
        ]
        self.entries = []
        return come_back

    def state(self) -> dict[str, Any]:
        count = len(self.entries)
        return {
            "steps": [step for step, _ in self.entries],
            "numbers": [numbers for _, numbers in self.entries],
            "names": list(self.layout.names),
            "rows": None if self._on_device is None else self._on_device[:count],
        }

    def release(self) -> None:
        """Let go of the memory, in order after the copy that may still read it."""
        if self._buffer is not None:
            after = self._arrived if self._arrived.recorded else None
            if after is not None:
                self._device.current_stream().wait_event(after)
            self._buffer.release(after=after)
            self._buffer = self._on_device = self._on_host = None
            self._rows = []
