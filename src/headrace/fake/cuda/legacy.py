"""`torch.cuda.FloatTensor` and the other classes that older scripts make tensors with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._utils import _import_dotted_name as import_dotted_name

from headrace.fake.cuda import state


class LegacyType(type):
    """The class of these classes. Calling one makes a tensor, and `isinstance` looks where a tensor
    is."""

    dtype: torch.dtype
    is_cuda = True

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        """Sizes make a tensor without values; a list or an array makes a copy of it."""
        state.check_index(device)
        source = args[0] if args else ()
        if isinstance(source, int | torch.Size) or not args:
            return torch.empty(*args, dtype=cls.dtype, device="cuda") if args else cls(0)
        if isinstance(source, torch.Tensor):
            if not isinstance(source, cls):
                raise TypeError(f"expected {cls.__module__}.{cls.__name__} (got {source.type()})")
            return source.view_as(source)
        return torch.tensor(source, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype is cls.dtype


def legacy_types(names: Iterable[str]) -> dict[str, LegacyType]:
    """A class for each of PyTorch's among the names."""
    return {
        name: LegacyType(
            name, (), {"__module__": "torch.cuda", "dtype": getattr(torch, name).dtype}
        )
        for name in names
        if name.endswith("Tensor") and hasattr(torch, name)
    }


def set_default_tensor_type(kind: Any) -> None:
    """`torch.set_default_tensor_type`: the default dtype and device."""
    if isinstance(kind, str):
        kind = import_dotted_name(kind)
    torch.set_default_dtype(kind.dtype)
    torch.set_default_device("cuda" if kind.is_cuda else None)
