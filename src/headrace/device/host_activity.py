"""What a step does on the host that no graph can repeat: copies from host memory, random draws."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.device.graph import Obstacle, host_copy, host_draw
from headrace.source_lines import users_line

if TYPE_CHECKING:
    from headrace.device.base import Device

_COPIES = ("aten::copy_", "aten::_to_copy")


class HostActivity(TorchDispatchMode):
    """Appends to `found` what the block does on the host that a graph could not repeat.

    These are copies from host memory, with their lines, and draws from the host's random
    generators: a graph would repeat the numbers that were drawn at capture.
    """

    def __init__(self, device: Device, found: list[Obstacle]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._found = found

    def __enter__(self) -> HostActivity:
        self._rng_before = _rng_states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for name, state in _rng_states().items():
            if not _same(state, self._rng_before.get(name, state)):
                self._found.append(host_draw(name))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _COPIES:
            source = args[1] if func._schema.name == "aten::copy_" else args[0]
            if source.is_cpu and self._device.holds(result):
                self._found.append(host_copy(users_line()))
        return result


def _rng_states() -> dict[str, Any]:
    """The state of each of the host's random generators, by name."""
    states: dict[str, Any] = {
        "torch's CPU generator": torch.get_rng_state(),
        "the random module": random.getstate(),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy.random"] = numpy.random.get_state()[1:3]
    return states


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and len(one) == 2 and not isinstance(one[0], int):
        words, position = one
        return bool((words == other[0]).all() and position == other[1])
    return bool(one == other)
