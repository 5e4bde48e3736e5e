"""Values that a framework logs, handed on once they have arrived on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from headrace.device import Device
from headrace.engine import DeferredScalars

Number = int | float | bool
#: How many batches the host may be ahead of the device, and values may be late.
MAX_AHEAD = 8


class LateValues:
    """Copies values to the host without a wait, and hands them on in order, each exactly once.

    `push(values, use)` starts the copy. `deliver` calls `use` with the numbers of all pushes that
    have arrived; `drain` waits for the others first.
    """

    def __init__(self, device: Device) -> None:
        self._deferred = DeferredScalars(device, every=1)
        self._uses: deque[tuple[Callable[[dict[str, Number]], None], dict[str, torch.dtype]]]
        self._uses = deque()
        self._pushed = 0

    def push(
        self, values: Mapping[str, torch.Tensor | float], use: Callable[[dict[str, Number]], None]
    ) -> None:
        """`values` are numbers, or tensors of one element."""
        kinds = {name: one.dtype for name, one in values.items() if isinstance(one, torch.Tensor)}
        self._deferred.push(self._pushed, values)
        self._pushed += 1
        self._uses.append((use, kinds))

    def deliver(self) -> None:
        """Hand on what has arrived. Never waits."""
        self._hand_on([entry.values for entry in self._deferred.ready()])

    def drain(self) -> None:
        """Hand on everything."""
        self._hand_on([entry.values for entry in self._deferred.drain("logged values")])

    def close(self) -> None:
        """Free the memory. Values that were not handed on are lost."""
        self._uses.clear()
        self._deferred.close()

    def _hand_on(self, arrived: list[dict[str, float]]) -> None:
        for values in arrived:
            use, kinds = self._uses.popleft()
            use({name: _as_item(one, kinds.get(name)) for name, one in values.items()})


def _as_item(value: float, dtype: torch.dtype | None) -> Number:
    """The number that `tensor.item()` gives for a tensor of this type."""
    if dtype is torch.bool:
        return bool(value)
    if dtype is None or dtype.is_floating_point:
        return value
    return int(value)
