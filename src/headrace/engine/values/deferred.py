"""Deferred values: losses and metrics that the host reads late and never waits for.

A loss stays on the device. Every few steps the values collected there are copied to pinned memory,
on a separate stream. The host reads them once the copy is done, and never waits for it:

    compute   [step 1][step 2]..[step 10][step 11]..
    losses                        [copy 1–10]           the host reads them some steps later
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from headrace.device import Device, Stream, open_device
from headrace.engine.values.arrived import DeferredValues, Scalar, state_of_values
from headrace.engine.values.block import ON_DEVICE, Block, Columns
from headrace.errors import DeferredError
from headrace.parallel import SINGLE, Ranks
from headrace.schema import require_whole

_MAX_BLOCKS = 4


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
        self._filling: Block | None = None
        self._in_flight: deque[Block] = deque()
        self._idle: list[Block] = []
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
                numbers[name] = ON_DEVICE
            else:
                numbers[name] = float(value)
        self.send_full()
        block = self._filling
        if block is None or not block.columns.fits(numbers, tensors):
            self.flush()
            block = self._filling = self._take_block(Columns.of(numbers, tensors))
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

    def _take_block(self, columns: Columns) -> Block:
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
        return Block(self._device, self._every, columns)
