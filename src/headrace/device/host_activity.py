"""What a step does on the host that no graph can repeat: copies from host memory, random draws."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.device.graph import Obstacle, host_copy, host_draw, torch_draw
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
        self._draws = noting_host_draws(self._found)
        self._draws.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._draws.__exit__(None, None, None)

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
        elif torch.Tag.nondeterministic_seeded in func.tags and _all_on_host(result):
            self._found.append(torch_draw(users_line()))
        return result


@contextmanager
def noting_host_draws(found: list[Obstacle], *, with_torch: bool = True) -> Iterator[None]:
    """Append to `found` from which of the host's random generators the block draws. `with_torch`
    is False where PyTorch's CPU generator is the device's."""
    generators: dict[Obstacle, Callable[[], Any]] = {
        host_draw("the random module"): random.getstate,
        host_draw("numpy.random"): _numpy_state,
    }
    if with_torch:
        generators[torch_draw()] = _torch_state
    before = {draw: state() for draw, state in generators.items()}
    yield
    known = {obstacle.what for obstacle in found}  # with their lines
    drawn = [draw for draw, state in generators.items() if state() != before[draw]]
    found += [draw for draw in drawn if draw.what not in known]


def _all_on_host(result: Any) -> bool:
    return all(one.is_cpu for one in tree_iter(result) if isinstance(one, torch.Tensor))


def _numpy_state() -> bytes:
    numpy: Any = sys.modules.get("numpy")
    return b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))


def _torch_state() -> bytes:
    return bytes(torch.get_rng_state().numpy())
