"""A state as JSON and named tensors, and back.

What JSON has, stands there as it is. The rest is an object whose first key begins with "$":

    {"$tensor": "optimizer/state/[0]/exp_avg"}     the tensor of that name; the same name twice
                                                   is one tensor in two places
    {"$tuple": […]}   {"$float": "nan"}   {"$int": "0x…"}   {"$str": "…"}
    {"$dict": [[key, value], …]}                   keys that are no strings, or begin with "$"
    {"$OrderedDict": …}   {"$Counter": …}          likewise
    {"$ranks": 0}                                  the first of the values that each rank has of
                                                   its own, in checkpoints of several ranks
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.checkpoint import tensor_file
from headrace.errors import CheckpointError

Path = tuple[str | int, ...]

_DEEPEST = 200
_EXPECTED = "expected dict, list, tuple, str, int, float, bool, None or a plain dense tensor"
# An OrderedDict is what a module's state_dict is, a Counter what MultiStepLR keeps.
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}
_LARGEST_PLAIN_INT = 2**63
# In a tensor's name "/" parts the keys and "[" begins a number; half a surrogate pair is no UTF-8.
_ESCAPED = re.compile("[~/\\[\ud800-\udfff]")


@dataclass(frozen=True)
class PerRank:
    """A value that each rank has one of: `own` to be written, all of them once it was read."""

    own: Any = None
    all: tuple[Any, ...] = ()


def encode(state: object) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state as something for `json.dumps`, and its tensors by name: the very ones, uncopied.

    Raises `CheckpointError` with the path and type of what cannot be kept.
    """
    encoder = Encoder()
    return encoder.encode(state, ()), encoder.tensors


def decode(
    document: Any, tensors: Mapping[str, torch.Tensor], own: Sequence[Sequence[Any]] = ()
) -> Any:
    """The state of which `encode` made this. `own` has each rank's own values."""
    if isinstance(document, list):
        return [decode(value, tensors, own) for value in document]
    if not isinstance(document, dict):
        return document
    tag = next(iter(document), "")
    if tag == "$tensor":
        return _decode_tensor(document, tensors)
    if tag == "$ranks":
        return PerRank(all=tuple(decode(values[document[tag]], tensors) for values in own))
    if tag in _DECODERS:
        return _DECODERS[tag](decode(document[tag], tensors, own))
    if tag.startswith("$"):
        raise CheckpointError(f"unknown kind of value {tag!r} in the state")
    return {key: decode(value, tensors, own) for key, value in document.items()}


def _counter(pairs: list[tuple[Any, Any]]) -> Counter[Any]:
    return Counter(dict(pairs))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": _counter,
    "$float": float,
    "$int": lambda digits: int(digits, 16),
    "$str": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
}


def _decode_tensor(document: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor: Any = tensors[document["$tensor"]]
    if "dtype" not in document:
        return tensor  # type: ignore[no-any-return]
    if not isinstance(tensor, torch.Tensor):  # of which a part may be asked for
        tensor = tensor.whole()
    dtype = getattr(torch, document["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"unknown type {document['dtype']!r} of a tensor")
    result: torch.Tensor = tensor.view(dtype).view(document["shape"])
    return result


def place(path: Path) -> str:
    """The path as one would type it."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[object, ...], str] = {}

    def encode(self, value: object, path: Path) -> Any:
        if len(path) > _DEEPEST:
            raise CheckpointError(
                f"{place(path[:6])}… is nested more than {_DEEPEST} deep: does it hold itself?"
            )
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        # Types are taken exactly: a subclass (a numpy number, a named tuple) would not come back.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _encode_text(str(value))
        if kind is int or kind is float:
            return _encode_number(value)  # type: ignore[arg-type]
        if kind is list or kind is tuple:
            items = [self.encode(item, (*path, at)) for at, item in enumerate(value)]  # type: ignore[arg-type,var-annotated]
            return items if kind is list else {"$tuple": items}
        if kind in _DICTS:
            return self._dict(value, path)  # type: ignore[arg-type]
        raise CheckpointError(f"{place(path)} is a {_name(kind)}: {_EXPECTED}")

    def _dict(self, values: dict[Any, object], path: Path) -> Any:
        for key in values:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"{place(path)} has the key {key!r}, a {_name(type(key))}: expected str or int"
                )
        plain = type(values) is dict and all(map(_is_plain_key, values))
        if plain:
            return {key: self.encode(value, (*path, key)) for key, value in values.items()}
        pairs = [
            [self.encode(key, path), self.encode(value, (*path, key))]
            for key, value in values.items()
        ]
        return {_DICTS[type(values)]: pairs}

    def _tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        require_plain(tensor, place(path))
        name = self._name(tensor, path)
        if tensor.dtype in tensor_file.DTYPE_NAMES:
            return {"$tensor": name}
        # The file has no name for this type: it holds the bytes.
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"$tensor": name, "dtype": dtype, "shape": list(tensor.shape)}

    def _name(self, tensor: torch.Tensor, path: Path) -> str:
        """The name that the tensor is kept under: the one it has already, if any."""
        key = _memory(tensor)
        # Tensors without elements share nothing, whatever their storage says.
        name = self._known.get(key) if tensor.numel() else None
        if name is None:
            name = self._known[key] = tensor_name(path)
            self.tensors[name] = tensor
        return name


def require_plain(tensor: torch.Tensor, what: str) -> None:
    """Raise unless all there is to the tensor is its elements."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        found = _name(type(tensor))
    elif tensor.is_quantized:
        found = "quantized tensor"
    elif tensor.layout is not torch.strided:
        found = f"tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_meta:
        found = "tensor on the meta device, which has no elements"
    else:
        return
    raise CheckpointError(f"{what} is a {found}: {_EXPECTED}")


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for two tensors that are the same elements of the same memory."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _encode_text(text: str) -> Any:
    # Two halves of a surrogate pair would come back from JSON as one character.
    if is_unicode(text):
        return text
    return {"$str": text.encode("utf-8", "surrogatepass").hex()}


def _encode_number(number: int | float) -> Any:
    if isinstance(number, float):
        return number if math.isfinite(number) else {"$float": repr(number)}
    # Other readers of JSON have 64 bits at most, and Python's own takes 4300 digits.
    return number if abs(number) < _LARGEST_PLAIN_INT else {"$int": hex(number)}


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str) and not key.startswith("$") and is_unicode(key)


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tensor_name(path: Path) -> str:
    """A name of its own for each path: `optimizer/state/[0]/exp_avg`."""
    parts = (f"[{key}]" if isinstance(key, int) else _escape(key) for key in path)
    name = "/".join(parts)
    return name if name != tensor_file.METADATA else f"~{ord(name[0]):x};{name[1:]}"


def _escape(key: str) -> str:
    return _ESCAPED.sub(lambda found: f"~{ord(found[0]):x};", key)


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
