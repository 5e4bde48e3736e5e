"""Where random generators stand, and going back to where they stood."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from headrace.device import Device

# NumPy's and Python's generators take 50 and 12 µs to say where they stand, which before each batch
# is too much: so it is asked for only where the memory of their Mersenne Twisters has changed.
_NUMPY_BYTES = 624 * 4 + 4  # words and a position
_PYTHON: Any = getattr(random.getstate, "__self__", None)  # the module's own generator
_HEAD = object.__basicsize__
_PYTHON_BYTES = (random.Random.__base__ or object).__basicsize__ - _HEAD


class _NumpyState:
    """NumPy's global generator."""

    def __init__(self) -> None:
        self._known: tuple[bytes, tuple[Any, ...]] | None = None

    def set(self, state: Any) -> None:
        self._known = None  # the same words may come with another number in stock
        name, words, *rest = state
        numpy.random.set_state((name, words.to("cpu").numpy().astype("uint32"), *rest))

    def get(self) -> tuple[Any, ...] | None:
        """Its name, words, position, and a normal number in stock, if any; None of one that is no
        Mersenne Twister, which somebody has put in its place."""
        generator = numpy.random.mtrand.get_bit_generator()
        if not isinstance(generator, numpy.random.MT19937):
            return None
        now = ctypes.string_at(generator.ctypes.state_address, _NUMPY_BYTES)
        # With a normal number in stock, one may be drawn without a trace in the words.
        if self._known is None or self._known[0] != now or self._known[1][3]:
            state: Any = numpy.random.get_state()
            name, words, *rest = state
            self._known = (now, (name, torch.from_numpy(words.astype("int64")), *rest))
        return self._known[1]


class _PythonState:
    """Python's global generator."""

    def __init__(self) -> None:
        self._known: tuple[bytes, tuple[Any, ...]] | None = None
        self._may_be_read = _memory_tells()

    def get(self) -> tuple[Any, ...]:
        if not self._may_be_read:
            return random.getstate()
        now = _memory(_PYTHON)
        stock = _PYTHON.gauss_next  # here, too, a normal number may be
        if self._known is None or self._known[0] != now or self._known[1][2] != stock:
            self._known = (now, random.getstate())
        return self._known[1]


def _memory(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + _HEAD, _PYTHON_BYTES)


def _memory_tells() -> bool:
    """Whether a draw is seen in a generator's memory, as it is in CPython's."""
    if not isinstance(_PYTHON, random.Random) or sys.implementation.name != "cpython":
        return False
    trial = random.Random(0)
    before = _memory(trial)
    trial.random()
    return _PYTHON_BYTES >= _NUMPY_BYTES and _memory(trial) != before


_NUMPY_STATE, _PYTHON_STATE = _NumpyState(), _PythonState()


def host_states() -> dict[str, Any]:
    """Where the host's generators stand: PyTorch's, Python's and NumPy's."""
    python, numpys = _PYTHON_STATE.get(), _NUMPY_STATE.get()
    return {"host": torch.get_rng_state(), "python": python, "numpy": numpys}


def have_moved(since: dict[str, Any]) -> bool:
    """Whether anything was drawn from the host's generators since those `host_states()`."""
    now = host_states()
    same = (now["python"], now["numpy"] is None) == (since["python"], since["numpy"] is None)
    if same and now["numpy"] is not None:
        (_, words, *rest), (_, before, *others) = now["numpy"], since["numpy"]
        same = rest == others and torch.equal(words, before)
    return not (same and torch.equal(now["host"], since["host"]))


def random_states(device: Device) -> dict[str, Any]:
    """Where all random generators stand that a training step may draw from."""
    return host_states() | {"device": device.random_state()}


def set_host_states(states: dict[str, Any]) -> None:
    """Go back to `host_states()`, also to those that have been through JSON."""
    torch.set_rng_state(states["host"].to("cpu"))
    random.setstate(_tuples(states["python"]))
    if states["numpy"] is not None:
        _NUMPY_STATE.set(states["numpy"])


def set_random_states(device: Device, states: dict[str, Any]) -> None:
    """Go back to `random_states()`; or to a `seed`."""
    if "seed" in states:
        torch.manual_seed(states["seed"])
        random.seed(states["seed"])
        numpy.random.seed(states["seed"])
        return
    device.set_random_state(states["device"].to("cpu"))
    set_host_states(states)  # last: a CPU's generator is the host's


@contextmanager
def drawing_from(states: dict[str, Any]) -> Iterator[None]:
    """Inside the block the host's generators stand as in `states`, after it as before."""
    before = host_states()
    set_host_states(states)
    try:
        yield
    finally:
        set_host_states(before)


def states_of(generators: list[torch.Generator]) -> list[dict[str, Any]]:
    """Where they stand, and the seeds they began with."""
    return [{"seed": one.initial_seed(), "state": one.get_state()} for one in generators]


def _tuples(value: Any) -> Any:
    """Lists become tuples: what has been through JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
