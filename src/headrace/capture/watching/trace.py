"""A step's trace: its operations, their constants, and the tensors it read from elsewhere.

A graph repeats one run of a step. So two runs on batches of one shape are compared before the step
is captured: they must run the same operations, with the same constants, on the same tensors. Where
they differ, Python made a decision, and a graph would repeat the one it made at capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as Storage

from headrace.capture.watching.host_constants import HostConstants
from headrace.capture.watching.host_draws import HostDraws
from headrace.device import Device
from headrace.source_lines import Site

__all__ = ["OperationTrace", "Storage", "TensorRead", "TracedOperation", "storages"]


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation. `constants` are its arguments besides tensors, `shapes` are those of its
    tensors with their dtypes, `line` is the user's line that called it."""

    name: str
    constants: tuple[Any, ...]
    shapes: tuple[Any, ...]
    line: Site | None

    def same_as(self, other: TracedOperation) -> bool:
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

    operations: list[TracedOperation] = field(default_factory=list)
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

    def note_asked(self, asked: bool) -> None:
        self.asked = asked

    def note_nested(self, line: Site | None) -> None:
        """A nested tensor is used."""
        self.nested_at, self.is_nested = self.nested_at or line, True

    def note_returned(self, numbers: dict[str, float]) -> None:
        self.returned = numbers

    def note_constants(self, device: Device, tensors: Sequence[torch.Tensor]) -> None:
        """Note what the run copies from the host, and what it reads back of these tensors."""
        self.host_constants = HostConstants(device, tensors)

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
                "it copies another value from the host to the device in each call, or reads "
                "another back: make it on the device, or let the loader return it in the batch"
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


def _difference(now: TracedOperation, then: TracedOperation) -> str:
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


def storages(tensors: Iterable[torch.Tensor]) -> set[Storage]:
    """The storages (memory) of tensors."""
    return {
        Storage(tensor.untyped_storage()) for tensor in tensors if torch._C._has_storage(tensor)
    }
