"""A step's trace: its operations, their constants, and the tensors it read from elsewhere.

A graph repeats one run of a step. So two runs on batches of one shape are compared before the step
is captured: they must run the same operations, with the same constants, on the same tensors. Where
they differ, Python made a decision, and a graph would repeat the one it made at capture.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as Storage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.capture.watching.host_constants import HostConstants
from headrace.capture.watching.host_draws import HostDraws
from headrace.device import CaptureQuery, Device
from headrace.source_lines import Site, users_line_inside

__all__ = ["OperationTrace", "StepTracer", "Storage", "TensorRead", "storages"]

_CONSTANT_TYPES = (
    *(int, float, complex, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True)
class _TracedOperation:
    """One operation. `constants` are its arguments besides tensors, `shapes` are those of its
    tensors with their dtypes, `line` is the user's line that called it."""

    name: str
    constants: tuple[Any, ...]
    shapes: tuple[Any, ...]
    line: Site | None

    def same_as(self, other: _TracedOperation) -> bool:
        return (
            self.name == other.name
            and self.shapes == other.shapes
            # As text: NaN equals NaN, and -0.0 differs from 0.0.
            and repr(self.constants) == repr(other.constants)
        )


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A tensor that a run read but did not make, and the first line that read it."""

    tensor: torch.Tensor
    line: Site | None


@dataclass(slots=True)
class OperationTrace:
    """One run of a step. `read` holds memory that it read but did not make, `made` memory that it
    made."""

    operations: list[_TracedOperation] = field(default_factory=list)
    read: dict[Storage, TensorRead] = field(default_factory=dict)
    made: set[Storage] = field(default_factory=set)
    #: All memory that an operation had as an argument, also where operations are not recorded.
    touched: set[Storage] = field(default_factory=set)
    #: The Python numbers that the loss function returned.
    returned: dict[str, float] = field(default_factory=dict)
    #: Whether the run asked if it was being captured, and the answer that it got.
    asked: bool = False
    as_captured: bool = False
    #: The first line that used a nested tensor, and whether one did.
    nested_at: Site | None = None
    is_nested: bool = False
    host_draws: HostDraws = field(default_factory=HostDraws)
    #: What it copied from the host; None if nobody asked.
    host_constants: HostConstants | None = None

    def difference(self, before: OperationTrace) -> str | None:
        """Why a graph of this run would be wrong for the run `before`; None if it would not."""
        for now, then in zip(self.operations, before.operations, strict=False):
            if not now.same_as(then):
                return _difference(now, then)
        if len(self.operations) != len(before.operations):
            longer, count = max(self.operations, before.operations, key=len), len(self.operations)
            extra = longer[min(count, len(before.operations))]
            return (
                f"{extra.name}{_at(extra.line)} is computed for some batches only: compute it for "
                "every batch, and choose with torch.where"
            )
        constants, others = self.host_constants, before.host_constants
        if constants is not None and others is not None and not constants.same_as(others):
            return (
                "it copies another value from the host to the device in each call: make it on the "
                "device, or let the loader return it in the batch"
            )
        for name, number in self.returned.items():
            if repr(before.returned.get(name)) != repr(number):
                return (
                    f"the loss function returned the Python number {number!r} as {name!r}, and "
                    f"{before.returned.get(name)!r} for the batch before: return it as a tensor on "
                    "the device"
                )
        for storage, read in self.read.items():
            if storage not in before.read:
                return (
                    f"another tensor is read for each batch{_at(read.line)}: keep one tensor and "
                    "write to it in place, with copy_()"
                )
        return None

    def leave_out(self, known: set[Storage]) -> None:
        """Forget reads of memory that other checks follow."""
        self.read = {storage: read for storage, read in self.read.items() if storage not in known}

    def forget_memory(self) -> None:
        """Keep only what later runs are compared with."""
        self.made, self.touched = set(), set()

    def survivors(self) -> set[Storage]:
        """The memory that this run made and that is still alive."""
        return {storage for storage in self.made if not storage.expired()}


def _difference(now: _TracedOperation, then: _TracedOperation) -> str:
    if now.name == then.name and now.shapes == then.shapes:
        pairs = zip(now.constants, then.constants, strict=False)
        new, old = next((one, two) for one, two in pairs if repr(one) != repr(two))
        return (
            f"{now.name}{_at(now.line)} is given {new!r}, and was given {old!r} for the batch "
            "before: make it a tensor on the device and write to it in place"
        )
    was = then.name if then.name != now.name else "the same on other shapes"
    return (
        f"{now.name}{_at(now.line)} is computed where the batch before, of the same shape, had "
        f"{was}{_at(then.line)}: run the same operations for every batch"
    )


def _at(line: Site | None) -> str:
    return "" if line is None else f" at {line}"


class StepTracer(TorchDispatchMode):
    """Inside the block, records operations in `trace`. `caller` is the code of the function that
    calls the user's code: frames outside it are not searched for the user's line. With
    `as_captured`, code that asks whether it is being captured gets the answer yes."""

    def __init__(self, device: Device, caller: CodeType, *, as_captured: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = OperationTrace(as_captured=as_captured)
        self._query = CaptureQuery(as_captured)
        self._answering: list[AbstractContextManager[None]] = []
        self._in_backward = False
        self._device = device
        self._caller = caller
        # Host tensors that device work returned, such as an attention's random seed and offset.
        self._returned_to_host: set[Storage] = set()

    def __enter__(self) -> StepTracer:
        self._answering.append(self._device.answering(self._query))
        self._answering[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._answering.pop().__exit__(None, None, None)
        self.trace.asked = self._query.asked

    @property
    def is_paused(self) -> bool:
        """True while code runs that is neither recorded nor told that it is captured: an
        optimizer's step."""
        return self._query.is_paused

    def pause(self) -> None:
        self._query.is_paused = True

    def resume(self) -> None:
        self._query.is_paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():
            on_device = self._record(func, args, kwargs) if self._is_recorded() else False
            for value in tree_iter((args, kwargs or {})):
                if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
                    self.trace.touched.add(Storage(value.untyped_storage()))
            result = self._run(func, args, kwargs or {})
            self.trace.host_draws.record(func, args, kwargs, result)
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._record_made(value, on_device)
        return result

    def note_constants(self) -> None:
        """Note what the block copies from the host."""
        self.trace.host_constants = HostConstants(self._device)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        constants = self.trace.host_constants
        if constants is not None and (source := constants.copied(func, args)) is not None:
            constants.note(source, result)
        return result

    def forward_ends(self, returned: dict[str, float]) -> None:
        """Call between forward and backward of a run, each traced in a block of its own. `returned`
        are the Python numbers that the loss function returned."""
        self.note_returned(returned)
        self._in_backward = True

    def note_returned(self, numbers: dict[str, float]) -> None:
        """The run has returned these Python numbers."""
        self.trace.returned = numbers

    def _is_recorded(self) -> bool:
        if self.is_paused:
            return False
        node = torch._C._current_autograd_node()
        if node is None:
            return not self._in_backward  # in backward, work outside any node is the engine's own
        # A group's first batch adds its gradients up by other operations than the later ones.
        return not node.name().endswith("AccumulateGrad")

    def _record(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Record an operation. Returns whether it works on the device."""
        line = users_line_inside(self._caller)
        constants: list[Any] = []
        shapes: list[Any] = []
        on_device = False
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and value.is_nested:
                self.trace.nested_at, self.trace.is_nested = self.trace.nested_at or line, True
            elif isinstance(value, torch.Tensor):
                shapes.append((value.dtype, *value.shape))
                on_device |= self._record_read(value, line, constants)
            elif isinstance(value, _CONSTANT_TYPES):
                constants.append(value)
            else:  # the type alone: the text of a storage would be all of its content
                constants.append(type(value).__name__)
        name = str(func).removesuffix(".default").replace("aten.", "aten::")
        self.trace.operations.append(_TracedOperation(name, tuple(constants), tuple(shapes), line))
        return on_device

    def _record_read(self, tensor: torch.Tensor, line: Site | None, constants: list[Any]) -> bool:
        """Record a tensor argument. Returns whether its values come from the device. Those of a
        single number on the host are added to `constants`."""
        if tensor.is_meta or not torch._C._has_storage(tensor):
            return False
        storage = Storage(tensor.untyped_storage())
        if self._device.holds(tensor):
            if storage not in self.trace.made and tensor.numel():
                self.trace.read.setdefault(storage, TensorRead(tensor.detach(), line))
            return True
        if storage in self._returned_to_host:
            return True
        if tensor.numel() == 1 and tensor not in self.trace.host_draws:
            # A captured kernel freezes a number that it takes from the host.
            with torch._C._DisableTorchDispatch():
                constants.append(repr(self._device.read_host(tensor.detach().reshape(1, 1))))
        return False

    def _record_made(self, tensor: torch.Tensor, on_device: bool) -> None:
        if tensor.is_meta or not torch._C._has_storage(tensor):
            return
        storage = Storage(tensor.untyped_storage())
        if self._device.holds(tensor):
            if storage not in self.trace.read:
                self.trace.made.add(storage)
        elif on_device:
            self._returned_to_host.add(storage)


def storages(tensors: Iterable[torch.Tensor]) -> set[Storage]:
    """The storages (memory) of tensors."""
    return {
        Storage(tensor.untyped_storage()) for tensor in tensors if torch._C._has_storage(tensor)
    }
