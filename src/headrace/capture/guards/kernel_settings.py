"""PyTorch's settings that decide which kernels it launches, and which a graph therefore freezes.

Autocast, the default dtype, determinism, the precision of float32, the kernels of attention. A
loop's forward and its backward may run under different ones, and so do their graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device

Values = tuple[Hashable, ...]

_FLOAT32_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
)
# As `torch._C` calls them: how they are read, and how they are written.
_FLAGS = (
    ("_get_deterministic_algorithms", "_set_deterministic_algorithms"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
)


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], object]


class KernelSettings:
    """The settings for work on a device."""

    def __init__(self, device: Device) -> None:
        self._kind = device.torch_device.type
        self._settings = _settings_for(self._kind)
        self._readers = tuple(one.read for one in self._settings)

    def now(self) -> Values:
        """Their present values."""
        return tuple([read() for read in self._readers])

    def without_autocast(self) -> Values:
        """The present values, outside of autocast."""
        before = torch.is_autocast_enabled(self._kind)
        torch.set_autocast_enabled(self._kind, False)
        try:
            return self.now()
        finally:
            torch.set_autocast_enabled(self._kind, before)

    @contextmanager
    def set(self, values: Values) -> Iterator[None]:
        """In the block they have these values, as `now` has returned them."""
        before = self.now()
        try:
            self._write(values)
            yield
        finally:
            self._write(before)

    def _write(self, values: Values) -> None:
        # One at a time, and only what differs: one precision may follow another.
        for setting, value in zip(self._settings, values, strict=True):
            if setting.read() != value:
                setting.write(value)


def _settings_for(kind: str) -> list[_Setting]:
    """The settings for a kind of device that this version of PyTorch has."""
    own: Any = torch._C
    there = [one for one in _FLAGS if all(hasattr(own, name) for name in one)]
    return [
        _Setting(torch.get_default_dtype, torch.set_default_dtype),
        _Setting(
            functools.partial(torch.is_autocast_enabled, kind),
            functools.partial(torch.set_autocast_enabled, kind),
        ),
        _Setting(
            functools.partial(torch.get_autocast_dtype, kind),
            functools.partial(torch.set_autocast_dtype, kind),
        ),
        _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        # Not `get_float32_matmul_precision`: it raises once a precision was set by backend.
        *(
            _Setting(
                functools.partial(own._get_fp32_precision_getter, *one),
                functools.partial(own._set_fp32_precision_setter, *one),
            )
            for one in _FLOAT32_PRECISIONS
        ),
        *(_Setting(getattr(own, get), _unpacking(getattr(own, put))) for get, put in there),
    ]


def _unpacking(write: Callable[..., object]) -> Callable[[Any], object]:
    """Some settings are read as a tuple, and written as so many arguments."""
    return lambda value: write(*value) if isinstance(value, tuple) else write(value)
