"""What PyTorch's operators read, write and wait for, as far as their schemas do not say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch

# Operators that allocate without writing, and operators that use a tensor's shape only.
_ALLOCATE_ONLY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_SHAPE_ONLY = ("_like", "new_full", "new_zeros", "new_ones", *_ALLOCATE_ONLY)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Operators that may mix host and device tensors. For all others that is an error, except with
# 0-dim tensors. Those from the second line on take lengths from the host.
MAY_MIX = (
    *("copy_", "_foreach_copy_"),
    *("_pack_padded_sequence", "_pack_padded_sequence_backward", "_pad_packed_sequence"),
    *("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss", "_use_cudnn_ctc_loss"),
)
# The position of a result that lies on the host although the operator runs on the device.
HOST_RESULTS = {"_pack_padded_sequence": 1}
# Operators that launch no kernel: they change or ask for the tensor's view of its memory only.
METADATA_ONLY = (
    *("unsqueeze_", "squeeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_"),
    *("detach_", "set_", "resize_", "resize_as_", "rename_", "is_pinned"),
)
# Those of them that allocate memory if the tensor has too little.
RESIZING = ("resize_", "resize_as_")
# Arguments that an operator writes although its schema does not say so.
_UNDECLARED_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    ("running_mean", "running_var"),
)
# Operators that make the host wait on CUDA: it has to read the size or value of their result, or
# checks their arguments.
_HOST_READS = (
    *("_local_scalar_dense", "is_nonzero", "equal", "allclose"),
    *("nonzero", "masked_select", "_to_sparse", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_eigvals"),
    *("cholesky", "linalg_lstsq", "linalg_pinv", "linalg_matrix_exp"),
    *("_coalesce", "_to_sparse_csr"),
)
_OnDevice = Callable[[torch.Tensor], bool]


def _repeats(operation: Operation, on_device: _OnDevice) -> bool:
    repeats_at = 0 if operation.func._schema.overload_name == "Tensor" else 1
    repeats = operation.argument(repeats_at, "repeats")
    return isinstance(repeats, torch.Tensor) and operation.named("output_size") is None


def _has_no_range(operation: Operation, on_device: _OnDevice) -> bool:
    return bool(operation.named("min") == operation.named("max"))


def _checks_deviation(operation: Operation, on_device: _OnDevice) -> bool:
    return isinstance(operation.named("std"), torch.Tensor)


def _sorts(operation: Operation, on_device: _OnDevice) -> bool:
    """`isin` compares with a few elements one by one, and else looks for the unique ones."""
    if operation.func._schema.overload_name != "Tensor_Tensor" or operation.named("assume_unique"):
        return False
    elements, tested = operation.args[:2]
    return bool(tested.numel() >= int(10 * elements.numel() ** 0.145))


def _takes_number_from(*names: str) -> Callable[[Operation, _OnDevice], bool]:
    """For operators whose kernel takes a number: the host reads it if it is a device tensor."""

    def reads(operation: Operation, on_device: _OnDevice) -> bool:
        values = [operation.named(name) for name in names]
        return any(isinstance(value, torch.Tensor) and on_device(value) for value in values)

    return reads


# Operators that make the host wait or not, depending on their arguments.
_MAY_READ_ON_HOST: dict[str, Callable[[Operation, _OnDevice], bool]] = {
    "repeat_interleave": _repeats,
    "histc": _has_no_range,
    "normal": _checks_deviation,
    "isin": _sorts,
    **dict.fromkeys(
        ("masked_fill", "masked_fill_", "index_fill", "index_fill_"), _takes_number_from("value")
    ),
    **dict.fromkeys(("linspace", "logspace"), _takes_number_from("start", "end")),
}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What holds for every call of one operator."""

    name: str
    short: str
    only_for_shape: bool
    #: Position and name of each argument that can hold tensors, and whether it is written; None:
    #: only aliased.
    arguments: tuple[tuple[int, str, bool | None], ...]
    reads_on_host: bool
    returns_alias: bool
    is_composite: bool
    draws: bool
    #: Calls the implementation of a custom operator that is written in Python.
    python_kernel: Callable[..., Any] | None


# How the names of collectives begin, and of all operators that are not custom.
_COLLECTIVE = ("c10d::", "_c10d_functional::")
_COMPILED = ("aten::", "prim::", "prims::", *_COLLECTIVE)
# By id, with the operator to keep it alive: hashing an operator is slow.
_known_facts: dict[int, tuple[Any, _Facts]] = {}


def _facts(func: Any) -> _Facts:
    known = _known_facts.get(id(func))
    if known is None:
        known = _known_facts[id(func)] = func, _new_facts(func)
    return known[1]


def _new_facts(func: Any) -> _Facts:
    schema = func._schema
    short = str(schema.name).removeprefix("aten::")
    arguments = []
    for position, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type):
            alias = argument.alias_info
            writes = False if alias is None else (True if alias.is_write else None)
            arguments.append((position, argument.name, writes))
    return _Facts(
        name=str(schema.name),
        short=short,
        only_for_shape=short.endswith(_SHAPE_ONLY),
        arguments=tuple(arguments),
        reads_on_host=short in _HOST_READS,
        returns_alias=any(value.alias_info is not None for value in schema.returns),
        is_composite=_is_composite(func, str(schema.name)),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        python_kernel=_python_kernel(func, str(schema.name)),
    )


def _is_composite(func: Any, name: str) -> bool:
    if name.startswith("prim::"):  # of which the dispatcher does not know
        return False
    keys, has_kernel = torch._C.DispatchKey, func.has_kernel_for_dispatch_key
    # Some have a kernel besides (silu_backward), which is what runs.
    return has_kernel(keys.CompositeImplicitAutograd) and not has_kernel(keys.CPU)


def is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVE)


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others, on every device, and has no kernel of its own."""
    return _facts(func).is_composite


def is_nested(args: tuple[Any, ...]) -> bool:
    """Whether an operator's first argument is a nested tensor, for which it may have a kernel of
    its own."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_nested


def _python_kernel(func: Any, name: str) -> Callable[..., Any] | None:
    """The implementation of a custom operator for CUDA, or else for the CPU, if it is Python."""
    find = getattr(torch.library, "get_kernel", None)  # PyTorch 2.9 has none
    if find is None or name.startswith(_COMPILED):
        return None
    for key in ("CUDA", "CPU"):
        try:
            kernel = find(func, key)
        except RuntimeError:  # it has none for this device
            continue
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        return partial(kernel.call_boxed, keys) if ".py:" in repr(kernel) else None
    return None


class Operation:
    """One call of an operator, as the dispatch mode sees it."""

    __slots__ = ("_facts", "args", "func", "kwargs", "name", "short")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self._facts = facts = _facts(func)
        self.name, self.short = facts.name, facts.short

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self._facts.draws

    def python_kernel(self) -> Callable[..., Any] | None:
        """The implementation of a custom operator that is written in Python."""
        return self._facts.python_kernel

    def argument(self, position: int, name: str) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)

    def named(self, name: str) -> Any:
        """An argument by name, or its default."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value)
        return None

    def inputs(self) -> list[torch.Tensor]:
        return tensors((self.args, self.kwargs)) if self.kwargs else tensors(self.args)

    def only_for_shape(self) -> bool:
        """Whether it uses only the shape and dtype of its tensors."""
        return self._facts.only_for_shape

    def reads_and_writes(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors it reads and those it writes in place."""
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        if self._facts.only_for_shape:
            return reads, writes
        undeclared = self._undeclared_writes()
        for position, name, written in self._facts.arguments:
            value = self.argument(position, name)
            if value is None:
                continue
            if written or name in undeclared:
                writes += tensors(value)
            elif written is False:
                reads += tensors(value)
        return reads, writes

    def _undeclared_writes(self) -> tuple[str, ...]:
        names = _UNDECLARED_WRITES.get(self.short, ())
        if names:
            for position, argument in enumerate(self.func._schema.arguments):
                if argument.name == "training" and not self.argument(position, "training"):
                    return ()  # in evaluation, running statistics are only read
        return names

    def indices(self) -> list[torch.Tensor]:
        """The index tensors of `x[…]`."""
        return tensors(self.args[1]) if self.short in INDEXING else []

    def launches_nothing(self) -> bool:
        """Whether it only changes or asks for a tensor's view of its memory. `equal` knows its
        answer if it is given the same view twice, or two shapes."""
        if self.short in METADATA_ONLY:
            return True
        if self.short != "equal":
            return False
        one, other = self.args
        return one.shape != other.shape or not one.numel() or _is_same_view(one, other)

    def makes_the_host_wait(self, on_device: _OnDevice, *, stores_number: bool) -> bool:
        """Whether the host waits on CUDA. For `x[mask]` it does: the size depends on data. For
        `x[index] = number` it does, too: it copies the number to the device. `x[mask] = number` is
        a fill. `stores_number`: the user wrote a number."""
        if self._facts.reads_on_host:
            return True
        depends = _MAY_READ_ON_HOST.get(self.short)
        if depends is not None:
            return depends(self, on_device)
        indices = self.indices()
        if not indices:
            return False
        masks = [at for at in indices if at.dtype in (torch.bool, torch.uint8)]
        if self.short not in INDEXING[1:4]:
            return bool(masks)
        # On CUDA a number is a host tensor.
        value = self.args[2]
        if value.numel() == 1 and (stores_number or not on_device(value)):
            return not (len(masks) == len(indices) == 1 and not self.named("accumulate"))
        return bool(masks)

    def returns_alias(self) -> bool:
        return self._facts.returns_alias


class HigherOrderOperation(Operation):
    """A call of an operator that takes functions, such as `flex_attention`.

    It counts as one kernel, as which it runs when it is compiled. The kernel reads all tensors that
    it is given, and all that the functions have captured.
    """

    __slots__ = ()

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = torch._C.DispatchKey.CompositeExplicitAutograd
        self.func = partial(_with_function_modes, func.py_kernels.get(key, func))
        self.args, self.kwargs = args, kwargs
        self.name = self.short = func.name()

    def inputs(self) -> list[torch.Tensor]:
        given = (self.args, self.kwargs)
        return tensors((given, [_captured(function) for function in _functions(given)]))

    def draws(self) -> bool:
        return True  # its functions may

    def reads_and_writes(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.inputs(), []

    def makes_the_host_wait(self, on_device: _OnDevice, *, stores_number: bool) -> bool:
        """Outside of a compiled program, the host decides which function runs."""
        return self.short in ("cond", "while_loop")


def _with_function_modes(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C._EnableTorchFunction():  # `flex_attention` indexes with the help of a mode
        return kernel(*args, **kwargs)


def _functions(values: Any) -> list[Any]:
    """All functions in nested tuples, lists and dicts."""
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return [function for value in values for function in _functions(value)]
    return [values] if isinstance(values, FunctionType) else []


def _captured(function: FunctionType) -> list[torch.Tensor]:
    """The tensors that a function uses without being given them."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [function.__globals__.get(name) for name in function.__code__.co_names]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    )


def tensors(values: Any) -> list[torch.Tensor]:
    """All tensors with memory of their own in nested tuples, lists and dicts. A sparse tensor gives
    its indices and values."""
    found: list[torch.Tensor] = []
    _collect((values,), found)
    return found


def _collect(values: Sequence[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) in _PLAIN and _has_memory(value):
                found.append(value)
            else:
                found += memory_of(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(tuple(value.values()), found)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself; a sparse one's indices and values; nothing inside `vmap` and for a wrapper
    around other tensors."""
    if _has_memory(tensor) and not dispatches_itself(type(tensor)):
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return []


def inner_tensors(wrapper: Any) -> list[torch.Tensor]:
    """The tensors that a wrapper such as `DTensor` is around; none if it does not say."""
    if not hasattr(wrapper, "__tensor_flatten__"):
        return []
    parts = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Meta tensors have none, and neither have the zeros of forward differentiation."""
    return torch._C._has_storage(tensor) and not tensor.is_meta and not tensor._is_zerotensor()


@cache
def dispatches_itself(kind: type) -> bool:
    """Whether it is a wrapper around other tensors, such as `DTensor`."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own not in (
        None,
        torch._C._disabled_torch_dispatch_impl,
        torch.Tensor.__torch_dispatch__,
    )


def only_allocates(short: str) -> bool:
    """Whether an operator leaves its new memory unwritten. With deterministic algorithms PyTorch
    fills it, with a kernel that no mode sees."""
    fills = (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )
    return short in _ALLOCATE_ONLY and not fills
