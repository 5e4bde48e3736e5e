"""Where random generators stand, and going back to where they stood."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from headrace.device import Device

# What a Mersenne Twister is in NumPy's memory: 624 words and a position.
_TWISTER_BYTES = 624 * 4 + 4


class _NumpyState:
    """NumPy's global generator. Its state takes 50 µs to get, so it is got when it has changed."""

    def __init__(self) -> None:
        self._known: tuple[bytes, tuple[Any, ...]] | None = None

    def get(self) -> tuple[Any, ...] | None:
        """Its name, words, position, and a normal number in stock, if any; None of one that is no
        Mersenne Twister, which somebody has put in its place."""
        generator = numpy.random.mtrand.get_bit_generator()
        if not isinstance(generator, numpy.random.MT19937):
            return None
        now = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
        # With a normal number in stock, one may be drawn without a trace in the words.
        if self._known is None or self._known[0] != now or self._known[1][3]:
            state: Any = numpy.random.get_state()
            name, words, *rest = state
            self._known = (now, (name, torch.from_numpy(words.astype("int64")), *rest))
        return self._known[1]


_NUMPY = _NumpyState()


def host_states() -> dict[str, Any]:
    """Where the host's generators stand: PyTorch's, Python's and NumPy's. Some 12 µs."""
    return {"host": torch.get_rng_state(), "python": random.getstate(), "numpy": _NUMPY.get()}


def random_states(device: Device) -> dict[str, Any]:
    """Where all random generators stand that a training step may draw from."""
    return host_states() | {"device": device.random_state()}


def set_host_states(states: dict[str, Any]) -> None:
    """Go back to `host_states()`, also to those that have been through JSON."""
    torch.set_rng_state(states["host"].to("cpu"))
    random.setstate(_tuples(states["python"]))
    if states["numpy"] is not None:
        name, words, *rest = states["numpy"]
        numpy.random.set_state((name, words.to("cpu").numpy().astype("uint32"), *rest))


def set_random_states(device: Device, states: dict[str, Any]) -> None:
    """Go back to `random_states()`; or to a `seed`."""
    if "seed" in states:
        torch.manual_seed(states["seed"])
        random.seed(states["seed"])
        numpy.random.seed(states["seed"])
        return
    set_host_states(states)
    device.set_random_state(states["device"].to("cpu"))


@contextmanager
def drawing_from(states: dict[str, Any]) -> Iterator[None]:
    """Inside the block the host's generators stand as in `states`, after it as before."""
    before = host_states()
    set_host_states(states)
    try:
        yield
    finally:
        set_host_states(before)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers were given to draw from."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _tuples(value: Any) -> Any:
    """Lists become tuples: what has been through JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
