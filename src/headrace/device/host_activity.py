"""What a step does on the host that no graph can repeat: copies from host memory, random draws."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.device.graph import Obstacle, host_copy, host_draw, torch_draw
from headrace.device.marked import noting_marked
from headrace.source_lines import Site, users_line

if TYPE_CHECKING:
    from headrace.device.base import Device

_COPIES = ("aten::copy_", "aten::_to_copy")


def copied_tensor(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The tensor that an operation copies; None if it is no copy."""
    if func._schema.name not in _COPIES:
        return None
    source: torch.Tensor = args[1] if func._schema.name == "aten::copy_" else args[0]
    return source


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
        source = copied_tensor(func, args)
        if source is not None:
            if source.is_cpu and source.numel() and self._device.holds(result):
                self._found.append(host_copy(users_line()))
        elif torch.Tag.nondeterministic_seeded in func.tags and _all_on_host(result):
            self._found.append(torch_draw(users_line()))
        return result


@contextmanager
def noting_host_draws(found: list[Obstacle], *, with_torch: bool = True) -> Iterator[None]:
    """Append to `found` from which of the host's random generators the block draws, and the line of
    the first draw, if it is known; and the calls of functions that are marked `@eager`.
    `with_torch` is False where PyTorch's CPU generator is the device's."""
    states: list[tuple[Callable[[], Any], Callable[[], Obstacle]]] = []
    with ExitStack() as stack:
        stack.enter_context(noting_marked(found))
        for name, module, owner, state in _generators():
            sites = stack.enter_context(_noting_calls(module, owner))
            states.append((state, partial(_draw_from, name, sites)))
        if with_torch:
            states.append((_torch_state, torch_draw))
        before = [state() for state, _ in states]
        yield
        known = {obstacle.what for obstacle in found}  # with their lines
        after = [state() for state, _ in states]
    drawn = [
        draw() for (_, draw), one, other in zip(states, before, after, strict=True) if one != other
    ]
    found += [draw for draw in drawn if draw.what not in known]


def _generators() -> Iterator[tuple[str, Any, object, Callable[[], Any]]]:
    """The host's global generators: name, module, the object whose methods are the module's
    functions, and what reads the state."""
    python: Any = random
    yield "the random module", python, python._inst, python._inst.getstate
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        owner = numpy.mtrand._rand
        yield "numpy.random", numpy, owner, partial(_numpy_state, owner)


@contextmanager
def _noting_calls(module: Any, owner: object) -> Iterator[list[Site]]:
    """The user's lines that call functions of `module` that are methods of `owner`. Calls of a
    function that was imported by its name are not noted."""
    sites: list[Site] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            sites.append(users_line())
            return function(*args, **kwargs)

        return call

    functions = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is owner and name not in ("getstate", "get_state")
    }
    vars(module).update({name: noting(function) for name, function in functions.items()})
    try:
        yield sites
    finally:
        vars(module).update(functions)


def _draw_from(name: str, sites: list[Site]) -> Obstacle:
    return host_draw(name, sites[0] if sites else None)


def _all_on_host(result: Any) -> bool:
    return all(one.is_cpu for one in tree_iter(result) if isinstance(one, torch.Tensor))


def _numpy_state(generator: Any) -> bytes:
    return pickle.dumps(generator.get_state(legacy=False))


def _torch_state() -> bytes:
    return bytes(torch.get_rng_state().numpy())
