"""Names of tensors and storages that C++ takes for the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from headrace.fake.cuda import state
from headrace.fake.cuda.legacy import legacy_types, set_default_tensor_type
from headrace.fake.cuda.streams import Stream
from headrace.fake.cuda.table import copy_of, names_of, refusing
from headrace.fake.cuda.tensors import is_cpu, is_cuda
from headrace.fake.patches import Replacement
from headrace.fake.raw_memory import unobserved


def tensor_names() -> Iterator[Replacement]:
    for name, read in {"is_cuda": is_cuda, "is_cpu": is_cpu}.items():
        yield Replacement(torch.Tensor, name, property(read), "C++ takes all for the host's")
    yield Replacement(
        torch.Tensor,
        "record_stream",
        _record_stream,
        "PyTorch's parser refuses a stream that is not its own",
    )
    yield Replacement(
        torch.UntypedStorage, "device", property(_storage_device), "torch.save stores where it is"
    )
    yield Replacement(
        torch.UntypedStorage,
        "__new__",
        staticmethod(_new_storage),
        "PyTorch cannot make one on cuda",
    )
    yield Replacement(
        torch.UntypedStorage,
        "_share_cuda_",
        refusing("a CUDA tensor in another process"),
        "no memory of a GPU to share",
    )
    why = "PyTorch's own need a CUDA device"
    yield from names_of(torch.cuda, why, **legacy_types(vars(torch.cuda)))
    yield from names_of(torch, why, set_default_tensor_type=set_default_tensor_type)
    yield Replacement(
        FakeTensor,
        "__new__",
        staticmethod(_planned(vars(FakeTensor)["__new__"].__func__)),
        "C++ ends the process if a shape without memory is on cuda",
    )
    base = torch.storage._StorageBase
    yield Replacement(base, "to", _storage_to(copy_of(base.to)), "torch.load(map_location='cuda')")


def _planned(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch plans ahead with tensors without memory: let it plan for the CPU, which computes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        named = {name: _where_it_computes(value) for name, value in kwargs.items()}
        return original(*map(_where_it_computes, args), **named)

    return make


def _where_it_computes(value: Any) -> Any:
    if isinstance(value, str | torch.device) and torch.device(value).type == "cuda":
        return torch.device("cpu")
    return value


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    state.device().record_stream(tensor, stream._fake)


def _as_bytes(storage: Any) -> torch.Tensor:
    with unobserved():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    make = torch._C.StorageBase.__new__
    if device is None or torch.device(device).type != "cuda":
        return make(cls, *args, **kwargs, **({} if device is None else {"device": device}))
    state.check_index(device)
    storage, cuda = make(cls, *args, **kwargs), state.device()
    cuda.operation(
        cuda.current_stream(), "allocation", "kernel", allocates=[_as_bytes(storage)], cost_ns=0
    )
    return storage


def _storage_device(storage: Any) -> torch.device:
    real: torch.device = torch._C.StorageBase.device.__get__(storage)  # type: ignore[attr-defined]
    if real.type == "cpu" and state.in_use() and state.device().holds(_as_bytes(storage)):
        return state.device().torch_device
    return real


def _storage_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        target = torch.device(device)
        if target.type != "cuda":
            return original(storage, device=device, non_blocking=non_blocking)
        moved = _as_bytes(storage).clone().to(target, non_blocking=non_blocking)
        return moved.untyped_storage()

    return to
