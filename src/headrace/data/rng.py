"""Reads and restores the states of random generators."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from headrace.device import Device

_MT19937_BYTES = 624 * 4 + 4  # the words and the position


class _NumpyGenerator:
    """NumPy's global generator, whose state is read only after it has changed.

    The state is needed before each batch. `numpy.random.get_state()` takes 30 to 50 µs (between
    training steps, with cold caches, over 70), which is half of what the engine adds to a batch.
    Reading PyTorch's takes 1 µs. So this compares NumPy's memory first, at the address that NumPy
    publishes for C code: less than 2 µs.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._state: tuple[Any, ...] | None = None

    def get(self) -> tuple[Any, ...] | None:
        """Name, words, position, whether a normal number is stored, and that number. None if the
        global generator was replaced by one of another kind."""
        generator = numpy.random.mtrand.get_bit_generator()
        if not isinstance(generator, numpy.random.MT19937):
            return None
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        # NumPy makes normal numbers in pairs. Drawing a stored one leaves the memory as it was.
        has_stored_normal = self._state is not None and self._state[3]
        if self._state is None or memory != self._memory or has_stored_normal:
            state: Any = numpy.random.get_state()
            name, words, *rest = state
            self._memory = memory
            self._state = (name, torch.from_numpy(words.astype("int64")), *rest)
        return self._state

    def set(self, state: Any) -> None:
        self._state = None  # the memory does not show whether a normal number is stored
        name, words, *rest = state
        numpy.random.set_state((name, words.to("cpu").numpy().astype("uint32"), *rest))


class _PythonGenerator:
    """Python's global generator, whose state is read only after it has changed.

    `random.getstate()` makes a tuple of 625 numbers, which takes 8 µs (with cold caches over 20).
    CPython has the same numbers in the object, behind its header. This compares them first, unless
    they are found to be elsewhere in this interpreter.
    """

    def __init__(self) -> None:
        self._generator: Any = random.seed.__self__  # type: ignore[attr-defined]
        self._address = id(self._generator) + object.__basicsize__
        state = random.getstate()
        *words, position = state[1]
        self._is_readable = type(
            self._generator
        ).__basicsize__ >= object.__basicsize__ + _MT19937_BYTES and self._read() == struct.pack(
            f"=i{len(words)}I", position, *words
        )
        self._memory = b""
        self._state: Any = None

    def get(self) -> Any:
        if not self._is_readable:
            return random.getstate()
        memory = self._read()
        # `gauss` makes numbers in pairs. Drawing a stored one leaves the memory as it was.
        stored = self._generator.gauss_next
        if memory != self._memory or self._state is None or self._state[2] != stored:
            self._memory, self._state = memory, random.getstate()
        return self._state

    def _read(self) -> bytes:
        return ctypes.string_at(self._address, _MT19937_BYTES)


_NUMPY = _NumpyGenerator()
_PYTHON = _PythonGenerator()


def host_rng_states() -> dict[str, Any]:
    """The states of the host's generators: PyTorch's, Python's and NumPy's."""
    return {"host": torch.get_rng_state(), "python": _PYTHON.get(), "numpy": _NUMPY.get()}


def have_drawn(since: dict[str, Any]) -> bool:
    """Whether anything was drawn from the host's generators since `host_rng_states()` returned
    `since`."""
    now = host_rng_states()
    same = (now["python"], now["numpy"] is None) == (since["python"], since["numpy"] is None)
    if same and now["numpy"] is not None:
        (_, words, *rest), (_, words_then, *rest_then) = now["numpy"], since["numpy"]
        same = rest == rest_then and torch.equal(words, words_then)
    return not (same and torch.equal(now["host"], since["host"]))


def rng_states(device: Device) -> dict[str, Any]:
    """The states of all generators that a training step may draw from: the host's and the
    device's."""
    return host_rng_states() | {"device": device.random_state()}


def set_host_rng_states(states: dict[str, Any]) -> None:
    """Restore what `host_rng_states()` returned, also if it was stored as JSON in between."""
    torch.set_rng_state(states["host"].to("cpu"))
    random.setstate(_as_tuples(states["python"]))
    if states["numpy"] is not None:
        _NUMPY.set(states["numpy"])


def set_rng_states(device: Device, states: dict[str, Any]) -> None:
    """Restore what `rng_states()` returned, or seed all generators if `states` has a `seed`."""
    if "seed" in states:
        torch.manual_seed(states["seed"])
        random.seed(states["seed"])
        numpy.random.seed(states["seed"])
        return
    device.set_random_state(states["device"].to("cpu"))
    set_host_rng_states(states)  # last: on the CPU, the device's generator is the host's


@contextmanager
def drawing_from(states: dict[str, Any]) -> Iterator[None]:
    """Set the host's generators to `states` inside the block, and back after it."""
    before = host_rng_states()
    set_host_rng_states(states)
    try:
        yield
    finally:
        set_host_rng_states(before)


def generator_states(generators: list[torch.Generator]) -> list[dict[str, Any]]:
    """The state of each generator, its device, and the seed it began with."""
    return [
        {
            "seed": generator.initial_seed(),
            "state": generator.get_state(),
            "device": generator.device.type,
        }
        for generator in generators
    ]


def _as_tuples(value: Any) -> Any:
    """Lists as tuples: JSON has only lists, and `random.setstate` wants tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
