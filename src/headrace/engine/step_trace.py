"""What a step computed: its operations with their numbers, and the tensors it read from elsewhere.

A graph repeats one run of a step. So two runs on batches of one shape are compared before it is
captured: the same operations, with the same numbers, on the same tensors. Where they differ, Python
decided so, and a graph would repeat what was decided at capture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as Storage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.device import Device
from headrace.source_lines import Site, users_line_inside

__all__ = ["Read", "StepTrace", "Storage", "Tracing", "storages"]

_NUMBERS = (
    *(int, float, complex, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation: its name, what it was given besides tensors, and the line that called it."""

    name: str
    numbers: tuple[Any, ...]
    shapes: tuple[Any, ...]
    line: Site | None

    def same_as(self, other: _Operation) -> bool:
        return (
            self.name == other.name
            and self.shapes == other.shapes
            # As text: NaN is the same as NaN, and -0.0 is not 0.0.
            and repr(self.numbers) == repr(other.numbers)
        )


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor that a run read and did not make, and the first line that did."""

    tensor: torch.Tensor
    line: Site | None


@dataclass(slots=True)
class StepTrace:
    """One run: its operations, what it read and did not make, and what it made."""

    operations: list[_Operation] = field(default_factory=list)
    read: dict[Storage, Read] = field(default_factory=dict)
    made: set[Storage] = field(default_factory=set)
    #: The Python numbers that the loss function returned.
    returned: dict[str, float] = field(default_factory=dict)

    def difference(self, before: StepTrace) -> str | None:
        """Why a graph of one of two runs would not do for the other; None if it would."""
        for now, then in zip(self.operations, before.operations, strict=False):
            if not now.same_as(then):
                return _difference(now, then)
        if len(self.operations) != len(before.operations):
            longer, count = max(self.operations, before.operations, key=len), len(self.operations)
            extra = longer[min(count, len(before.operations))]
            return f"{extra.name}{_at(extra.line)} is computed for some batches only"
        for name, number in self.returned.items():
            if repr(before.returned.get(name)) != repr(number):
                return (
                    f"the loss function returned {number!r} as {name!r}, and "
                    f"{before.returned.get(name)!r} for the batch before: a graph would repeat "
                    "that number. Return it as a tensor on the device"
                )
        for storage, read in self.read.items():
            if storage not in before.read:
                return (
                    f"another tensor is read for each batch{_at(read.line)}: keep one, and write "
                    "to it in place"
                )
        return None

    def survivors(self) -> set[Storage]:
        """Of what it made, what is still there."""
        return {storage for storage in self.made if not storage.expired()}


def _difference(now: _Operation, then: _Operation) -> str:
    if now.name == then.name and now.shapes == then.shapes:
        pairs = zip(now.numbers, then.numbers, strict=False)
        new, old = next((one, two) for one, two in pairs if repr(one) != repr(two))
        return (
            f"{now.name}{_at(now.line)} is given {new!r}, and was given {old!r} for the batch "
            "before: make that number a tensor on the device, and write to it in place"
        )
    was = then.name if then.name != now.name else "the same on other shapes"
    return (
        f"{now.name}{_at(now.line)} is computed where the batch before, of the same shape, had "
        f"{was}{_at(then.line)}"
    )


def _at(line: Site | None) -> str:
    return "" if line is None else f" at {line}"


class Tracing(TorchDispatchMode):
    """Inside the block, notes what runs in `trace`. `until` is the code of the function that calls
    the user's: lines are looked for no further out."""

    def __init__(self, device: Device, until: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = StepTrace()
        self._in_backward = False
        self._device = device
        self._until = until
        # Host tensors that device work returned: an attention's random seed and offset, say.
        self._returned: set[Storage] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():
            on_device = self._note(func, args, kwargs) if self._is_noted() else False
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._makes(value, on_device)
        return result

    def forward_ends(self, returned: dict[str, float]) -> None:
        """The next block is the backward of the same run; `returned` are the Python numbers that
        the loss function returned."""
        self.trace.returned = returned
        self._in_backward = True

    def _is_noted(self) -> bool:
        node = torch._C._current_autograd_node()
        if node is None:
            return not self._in_backward  # there, what no node runs is the engine's own
        # Gradients are added up differently by a group's first batch and by the others.
        return not node.name().endswith("AccumulateGrad")

    def _note(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Note an operation. Returns whether it works on the device."""
        line = users_line_inside(self._until)
        numbers: list[Any] = []
        shapes: list[Any] = []
        on_device = False
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor):
                shapes.append((value.dtype, *value.shape))
                on_device |= self._reads(value, line, numbers)
            elif isinstance(value, _NUMBERS):
                numbers.append(value)
            else:  # not its text: a storage's would be all of its numbers
                numbers.append(type(value).__name__)
        name = str(func).removesuffix(".default").replace("aten.", "aten::")
        self.trace.operations.append(_Operation(name, tuple(numbers), tuple(shapes), line))
        return on_device

    def _reads(self, tensor: torch.Tensor, line: Site | None, numbers: list[Any]) -> bool:
        """Note a tensor that an operation is given. Returns whether it comes from the device."""
        if tensor.is_meta or not torch._C._has_storage(tensor):
            return False
        storage = Storage(tensor.untyped_storage())
        if self._device.holds(tensor):
            if storage not in self.trace.made:
                self.trace.read.setdefault(storage, Read(tensor.detach(), line))
            return True
        if storage in self._returned:
            return True
        if tensor.numel() == 1:
            # A host number beside device tensors: the kernel that is captured keeps it.
            with torch._C._DisableTorchDispatch():
                numbers.append(repr(self._device.read_host(tensor.detach().reshape(1, 1))))
        return False

    def _makes(self, tensor: torch.Tensor, on_device: bool) -> None:
        if tensor.is_meta or not torch._C._has_storage(tensor):
            return
        storage = Storage(tensor.untyped_storage())
        if self._device.holds(tensor):
            if storage not in self.trace.read:
                self.trace.made.add(storage)
        elif on_device:
            self._returned.add(storage)


def storages(tensors: Iterable[torch.Tensor]) -> set[Storage]:
    """The storages of tensors."""
    return {Storage(tensor.untyped_storage()) for tensor in tensors}
