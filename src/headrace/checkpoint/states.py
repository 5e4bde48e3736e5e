"""Encodes a state as JSON and named tensors, and decodes it again.

Values that JSON has are stored as they are. Any other is an object whose first key begins with "$":

    {"$tensor": "optimizer/state/[0]/exp_avg"}     the tensor of that name; a tensor that is in two
                                                   places has the same name in both
    {"$tuple": […]}   {"$float": "nan"}   {"$int": "0x…"}   {"$str": "…"}
    {"$dict": [[key, value], …]}                   if a key is not a string, or begins with "$"
    {"$OrderedDict": …}   {"$Counter": …}          pairs, as for $dict
    {"$ranks": 0}                                  the first value that differs from rank to rank,
                                                   in checkpoints of several ranks
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.checkpoint import tensor_file
from headrace.checkpoint.tensor_names import StatePath, is_unicode, tensor_name
from headrace.errors import CheckpointError

_MAX_DEPTH = 200
_EXPECTED = "expected dict, list, tuple, str, int, float, bool, None or a plain dense tensor"
# A module's state_dict is an OrderedDict; MultiStepLR keeps a Counter.
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$OrderedDict", Counter: "$Counter"}
_LARGEST_PLAIN_INT = 2**63


@dataclass(frozen=True)
class PerRank:
    """A value that differs from rank to rank: `own` is this rank's, to be saved; `all` has every
    rank's, after loading."""

    own: Any = None
    all: tuple[Any, ...] = ()


def encode(state: object) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state as a document for `json.dumps`, and its tensors by name, not copied.

    Raises `CheckpointError` with the path and type of a value that cannot be stored.
    """
    encoder = Encoder()
    return encoder.encode(state, ()), encoder.tensors


def decode(
    document: Any, tensors: Mapping[str, torch.Tensor], own: Sequence[Sequence[Any]] = ()
) -> Any:
    """The state that `encode` got. `own` has the values that differ from rank to rank."""
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
    if not isinstance(tensor, torch.Tensor):  # a StoredTensor
        tensor = tensor.whole()
    dtype = getattr(torch, document["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"unknown dtype {document['dtype']!r} of a tensor")
    result: torch.Tensor = tensor.view(dtype).view(document["shape"])
    return result


def expression(path: StatePath) -> str:
    """The path as Python code: `state['model'][0]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class Encoder:
    """Encodes values, and collects their tensors in `tensors`."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[object, ...], str] = {}

    def encode(self, value: object, path: StatePath) -> Any:
        if len(path) > _MAX_DEPTH:
            raise CheckpointError(
                f"{expression(path[:6])}… is nested more than {_MAX_DEPTH} levels deep: does it "
                "contain itself?"
            )
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        # Exact types only: a subclass (a numpy number, a named tuple) would be decoded as its base.
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
        raise CheckpointError(f"{expression(path)} is a {_type_name(kind)}: {_EXPECTED}")

    def _dict(self, values: dict[Any, object], path: StatePath) -> Any:
        for key in values:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"{expression(path)} has the key {key!r}, a {_type_name(type(key))}: "
                    "expected str or int"
                )
        plain = type(values) is dict and all(map(_is_plain_key, values))
        if plain:
            return {key: self.encode(value, (*path, key)) for key, value in values.items()}
        pairs = [
            [self.encode(key, path), self.encode(value, (*path, key))]
            for key, value in values.items()
        ]
        return {_DICTS[type(values)]: pairs}

    def _tensor(self, tensor: torch.Tensor, path: StatePath) -> dict[str, Any]:
        require_plain(tensor, expression(path))
        name = self._name(tensor, path)
        if tensor.dtype in tensor_file.DTYPE_NAMES:
            return {"$tensor": name}
        # safetensors lacks this dtype: the file has the bytes.
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"$tensor": name, "dtype": dtype, "shape": list(tensor.shape)}

    def _name(self, tensor: torch.Tensor, path: StatePath) -> str:
        """The tensor's name in the file. A tensor that is in two places has one name."""
        key = _memory(tensor)
        # Tensors without elements may have the same address, but share nothing.
        name = self._known.get(key) if tensor.numel() else None
        if name is None:
            name = self._known[key] = tensor_name(path)
            self.tensors[name] = tensor
        return name


def require_plain(tensor: torch.Tensor, what: str) -> None:
    """Raise `CheckpointError` unless the tensor is dense, on a real device, and not of a subclass.
    `what` begins the message."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        found = _type_name(type(tensor))
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
    """A key that two tensors share if they are the same elements of the same memory."""
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
    # JSON would join two lone surrogates to one character.
    if is_unicode(text):
        return text
    return {"$str": text.encode("utf-8", "surrogatepass").hex()}


def _encode_number(number: int | float) -> Any:
    if isinstance(number, float):
        return number if math.isfinite(number) else {"$float": repr(number)}
    # Other JSON readers take 64 bits at most, and Python's own 4300 digits.
    return number if abs(number) < _LARGEST_PLAIN_INT else {"$int": hex(number)}


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str) and not key.startswith("$") and is_unicode(key)


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
