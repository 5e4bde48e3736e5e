"""What places hold, compared by content: numbers in memory, containers, generators of the host."""

from __future__ import annotations

import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch

_MAX_BYTES = 64_000  # larger arrays are not compared
_MAX_ITEMS = 1000
_CONSTANT_TYPES = (int, float, complex, bool, str, bytes, type(None), Enum)
_COMPARED_BY_VALUE = (torch.dtype, torch.device, types.MethodType, PurePath, range)
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)
_SHARED_GENERATORS: list[Any] = [random._inst, numpy.random.mtrand._rand]


def has_contents(value: Any) -> bool:
    """Whether a value is to be compared by what it holds: numbers in memory, a context variable, or
    a random generator of the host that only the program draws from. A watched step says whether it
    draws from the others."""
    if isinstance(value, ContextVar):
        return True
    if not isinstance(value, bytes | torch.Tensor | str | type):
        try:
            return memoryview(value).nbytes <= _MAX_BYTES
        except (TypeError, ValueError):  # no numbers in memory
            pass
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu" and value is not torch.default_generator
    return isinstance(value, _GENERATORS) and not any(value is one for one in _SHARED_GENERATORS)


def contents_of(value: Any) -> Any:
    """What such a value, or a tensor on the host, holds; of a large tensor, how often it was
    written. None if that cannot be said."""
    if isinstance(value, ContextVar):
        held = value.get(None)
        return id(held), held
    if isinstance(value, random.SystemRandom):
        return object()  # the operating system's numbers always change
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, numpy.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    if not isinstance(value, torch.Tensor):
        return memoryview(value).tobytes()
    if value.layout is torch.strided and value.numel() <= _MAX_ITEMS and value.device.type == "cpu":
        try:
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
            return flat.view(torch.uint8).numpy().tobytes()
        except (RuntimeError, TypeError):  # quantized, or of a class with its own memory
            pass
    return None if value.is_inference() else value._version


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same object, equal constants, or containers of the same values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (*_CONSTANT_TYPES, numpy.generic)):
        is_equal = bool(one == other) or bool(one != one and other != other)
        return is_equal and repr(one) == repr(other)  # -0.0 differs from 0.0 only as text
    if isinstance(one, tuple | list | set | frozenset | dict | deque):
        # Code may build an equal container each time: compare the items.
        if len(one) != len(other) or len(one) > _MAX_ITEMS:
            return False
        if isinstance(one, set | frozenset):
            return bool(one == other)
        if isinstance(one, dict):
            pairs = zip(one.items(), other.items(), strict=True)  # in order, as code reads them
            return all(same_value(a, b) and same_value(c, d) for (a, c), (b, d) in pairs)
        return all(map(same_value, one, other))
    if isinstance(one, _COMPARED_BY_VALUE):
        return bool(one == other)
    if isinstance(one, numpy.ndarray):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape) and one.nbytes <= _MAX_BYTES
        return alike and one.tobytes() == other.tobytes()
    return False


def holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | deque):
        return depth < 4 and any(holds_tensors(one, depth + 1) for one in list(value)[:_MAX_ITEMS])
    return isinstance(value, torch.Tensor)


def restore_generator(generator: Any, state: Any) -> None:
    """Put a generator back. The numbers of arrays and tensors stay: a capture writes none."""
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = pickle.loads(state)  # noqa: S301 - our own
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(pickle.loads(state))  # noqa: S301 - our own


def refill(container: Any, keys: list[Any] | None, items: list[Any]) -> None:
    if isinstance(container, list):
        container[:] = items
        return
    put: Callable[[Any], Any] = (
        container.extend if isinstance(container, deque) else container.update
    )
    container.clear()
    put(items if keys is None else zip(keys, items, strict=True))
