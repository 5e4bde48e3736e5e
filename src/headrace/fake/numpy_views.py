"""`tensor.numpy()` of pinned memory: an array whose reads and writes the checker sees.

A loader that refills a staging buffer through numpy races with the copy from it like one that does
so through PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.fake import patches
from headrace.fake.patches import Replacement
from headrace.fake.raw_memory import unobserved

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice

# Methods that read or write all elements. Most others go through a ufunc.
_READ = (
    *("tolist", "copy", "astype", "tobytes", "flatten", "nonzero", "take", "dot", "compress"),
    *("sum", "mean", "min", "max", "any", "all", "std", "var", "prod", "round", "cumsum", "trace"),
    *("argmax", "argmin", "argsort", "searchsorted", "repeat", "dump", "dumps", "tofile"),
    *("__str__", "__repr__", "__format__", "__float__", "__int__", "__bool__", "__contains__"),
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
)
_WRITTEN = ("fill", "sort", "partition", "put", "itemset", "byteswap")
# Functions that write their first argument.
_WRITING_FUNCTIONS = ("copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis")
_ASKING_FUNCTIONS = ("shape", "ndim", "size", "shares_memory", "may_share_memory", "result_type")


class WatchedArray(np.ndarray):
    """A numpy view of pinned memory."""

    _device: FakeDevice | None = None
    _memory: torch.Tensor | None = None

    def __array_finalize__(self, parent: Any) -> None:
        self._device = getattr(parent, "_device", None)
        self._memory = getattr(parent, "_memory", None)

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if not isinstance(part, np.ndarray):
            _touch(self._single(index), reads=True)
        elif not np.may_share_memory(part, self):  # a list or mask as index copies
            _touch(self, reads=True)
            return part.view(np.ndarray)
        return part

    def __setitem__(self, index: Any, value: Any) -> None:
        for part in _watched(value):
            _touch(part, reads=True)
        part = super().__getitem__(index)
        if not isinstance(part, np.ndarray):
            part = self._single(index)
        shared = np.may_share_memory(part, self)
        super().__setitem__(index, _plain(value))
        _touch(part if shared else self, reads=False)

    def _single(self, index: Any) -> Any:
        """One element, as a view."""
        return super().__getitem__((*index, ...) if isinstance(index, tuple) else (index, ...))

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        written = list(_watched(out))
        if method == "at":
            written += _watched(inputs[:1])
        for one in _watched([inputs, kwargs.get("where")]):
            _touch(one, reads=True)
        if out:
            kwargs["out"] = _plain(out)
        result = getattr(ufunc, method)(*_plain(inputs), **{**kwargs, **_where(kwargs)})
        for one in written:
            _touch(one, reads=False)
        return out[0] if len(out) == 1 else out or result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*_plain(args), **_plain(kwargs))
        if func.__name__ in _ASKING_FUNCTIONS:
            return result
        watched = list(_watched([args, kwargs]))
        out = _output(func, args, kwargs)
        written = list(_watched(args[:1])) if func.__name__ in _WRITING_FUNCTIONS else []
        written += _watched(out)
        viewed = None if written else _viewed(result, watched)
        if viewed is not None:
            view = result.view(WatchedArray)
            view._device, view._memory = viewed._device, viewed._memory
            return view
        for one in watched:
            _touch(one, reads=not any(one is other for other in written))
        return result if out is None else out

    def item(self, *args: Any) -> Any:
        value = self.view(np.ndarray).item(*args)
        index = args[0] if len(args) == 1 and isinstance(args[0], tuple) else args
        if len(index) == 1:  # counts the elements of all dimensions
            index = np.unravel_index(index[0] % self.size, self.shape)
        _touch(self._single(index), reads=True)
        return value

    @property
    def ctypes(self) -> Any:
        """The address of the elements, for C code that will read them."""
        _touch(self, reads=True)
        return self.view(np.ndarray).ctypes

    def __bytes__(self) -> bytes:
        return bytes(self.tobytes())

    @property
    def flat(self) -> Any:
        _touch(self, reads=True)
        return self.view(np.ndarray).flat

    @flat.setter
    def flat(self, values: Any) -> None:
        self.view(np.ndarray).flat = _plain(values)  # type: ignore[misc]
        _touch(self, reads=False)


def _output(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument `out` of a function of numpy's; None if there is none."""
    if "out" in kwargs or len(args) < 2:
        return kwargs.get("out")
    try:
        return inspect.signature(func).bind_partial(*args).arguments.get("out")
    except ValueError:  # an older numpy does not know the signatures of its C functions
        return None


def _viewed(result: Any, watched: Sequence[WatchedArray]) -> WatchedArray | None:
    """The array that a result shows the memory of; None if it has its own."""
    if isinstance(result, np.ndarray):
        for one in watched:
            if np.may_share_memory(result, one):
                return one
    return None


def _method(name: str, reads: bool) -> Callable[..., Any]:
    original = getattr(np.ndarray, name)

    def call(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        result = original(self.view(np.ndarray), *_plain(args), **_plain(kwargs))
        _touch(self, reads=reads)
        for out in _watched(kwargs.get("out")):
            _touch(out, reads=False)
        return result

    return call


for _names, _reads in ((_READ, True), (_WRITTEN, False)):
    for _name in _names:
        if hasattr(np.ndarray, _name):
            setattr(WatchedArray, _name, _method(_name, _reads))


def watch(device: FakeDevice, tensor: torch.Tensor, array: Any) -> Any:
    """`array`, which is `tensor.numpy()`, with its accesses watched."""
    view = array.view(WatchedArray)
    view._device, view._memory = device, tensor.detach()
    return view


def _as_array(*args: Any, **kwargs: Any) -> Any:
    """Replaces `np.ctypeslib.as_array`, by which safetensors reads the memory of a tensor."""
    array = patches.originals["as_array"](*args, **kwargs)
    if array.nbytes and array.flags.writeable and not array.dtype.hasobject:
        with unobserved():
            memory = torch.from_numpy(array.reshape(-1).view(np.uint8))
        for device in patches.devices:
            device.shares(memory)
            if device.is_pinned(memory):
                return watch(device, memory, array)
    return array


def replacements() -> Iterator[Replacement]:
    yield Replacement(np.ctypeslib, "as_array", _as_array)


def _touch(array: Any, *, reads: bool) -> None:
    device, memory = array._device, array._memory
    if device is None or memory is None or array.size == 0:
        return
    with unobserved():
        part = _as_tensor(array, memory)
    access = {"reads": [part]} if reads else {"writes": [part]}
    device.operation(None, "numpy", "host", **access)


def _as_tensor(array: Any, memory: torch.Tensor) -> torch.Tensor:
    """The part of `memory` that an array covers; if no tensor can, all of it."""
    storage, size = memory.untyped_storage(), memory.element_size()
    offset = array.__array_interface__["data"][0] - storage.data_ptr()
    if array.itemsize != size or offset % size or any(stride % size for stride in array.strides):
        return memory
    if any(stride < 0 for stride in array.strides):
        return memory
    strides = [stride // size for stride in array.strides]
    empty = torch.empty(0, dtype=memory.dtype, device="cpu")
    return empty.set_(storage, offset // size, array.shape, strides)


def _watched(values: Any) -> Iterator[WatchedArray]:
    if isinstance(values, WatchedArray):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _watched(value)
    elif isinstance(values, dict):
        yield from _watched(list(values.values()))


def _plain(values: Any) -> Any:
    """The same values with ordinary arrays of the same memory."""
    if isinstance(values, WatchedArray):
        return values.view(np.ndarray)
    if isinstance(values, (tuple, list)):
        return type(values)(_plain(value) for value in values)
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return values


def _where(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"where": _plain(kwargs["where"])} if "where" in kwargs else {}
