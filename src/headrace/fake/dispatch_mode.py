"""The mode below autograd: it sees every operation that really runs, also those of backward, and
tells the device what each reads, writes and allocates."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.device import host_copy, torch_draw
from headrace.fake import autograd, collectives, patches
from headrace.races import operators
from headrace.races.indexing import touched_parts
from headrace.races.layout import Layout
from headrace.races.operators import HigherOrderOperation, Operation, tensors
from headrace.races.storages import memory_key

if TYPE_CHECKING:
    from headrace.fake.device import FakeDevice
    from headrace.fake.streams import FakeStream


# Operators that copy a tensor to the device that they name.
_MOVES = (torch.ops.aten.to, torch.ops.aten._to_copy)


class DispatchMode(TorchDispatchMode):
    #: Operators that take functions come here, too.
    supports_higher_order_operators = True

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        # Quicker than `device.holds`, which turns PyTorch's function modes off at each call: here
        # they are already off.
        self._holds = device.checker.on_device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(HigherOrderOperation(func, args, kwargs or {}))
        is_fake = FakeTensor in types  # a shape without memory, by which PyTorch plans ahead
        if types and not is_fake and any(map(operators.dispatches_itself, types)):
            return NotImplemented  # its own handler calls operators that come here
        named = kwargs.get("device") if kwargs else None
        if named is not None and not is_fake and func.overloadpacket in _MOVES:
            here, there = self._holds(args[0]), self._device.is_named_by(named)
            # C++ names the host for whatever it takes to be there. It is meant if a tensor is moved
            # there that this one is a part of.
            if there and not here:
                return self._move_to(args[0], "to device", kwargs)
            if here and not there and self._device.call.moving == "to host":
                return self._move_to(args[0], "to host", kwargs)
        if operators.is_composite(func) and not operators.is_nested(args):
            # Autograd takes it apart before this mode sees it, but it is off in inference mode and
            # in the implementation of a custom operator.
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        if self._device.is_named_by(named):
            with self._device.call.changed(named="device"):
                kwargs = {**kwargs, "device": torch.device("cpu")}
                return self.__torch_dispatch__(func, types, args, kwargs)
        if is_fake:
            return func(*args, **(kwargs or {}))
        operation = Operation(func, args, kwargs or {})
        with torch._C.DisableTorchFunction():
            inputs = operation.inputs()
            on_device = self._device.checker.held(inputs)
            self._refuse_mixed(operation, inputs, on_device)
            autograd.notice(operation.short, on_device)
            kernel = operation.python_kernel()
            if kernel is not None and on_device:
                with torch._C._EnableTorchFunction(), self, self._device.user_callback():
                    return kernel(*args, **(kwargs or {}))
            if on_device and operators.is_collective(operation.name):
                return collectives.run(self._device, operation)
            if operation.launches_nothing():
                result = operation.run()
                if on_device and operation.short in operators.RESIZING:
                    self._device.resized(on_device[0])
                return result
            if operation.short in ("copy_", "_foreach_copy_"):
                return self._copies(operation)
            if operation.short == "_to_copy" and self._device.call.moving is not None:
                return self._move(operation)
            if operation.short == "_to_copy" and on_device and self._moves_elsewhere():
                self._to_other_device(on_device[0])
                return operation.run()
            if self._runs_on_device(operation, inputs, on_device):
                return self._on_stream(operation, inputs, mixed=len(on_device) < len(inputs))
            self._on_host(operation, inputs)
            return operation.run()

    def _higher_order(self, operation: HigherOrderOperation) -> Any:
        with torch._C.DisableTorchFunction():
            inputs = operation.inputs()
            on_device = self._device.checker.held(inputs)
            if not on_device:
                return operation.run()
            return self._on_stream(operation, inputs, mixed=len(on_device) < len(inputs))

    def _runs_on_device(
        self, operation: Operation, inputs: list[torch.Tensor], on_device: list[torch.Tensor]
    ) -> bool:
        if inputs and not operation.only_for_shape():
            return bool(on_device)
        # A factory runs where `device=` says, else where the tensor lies whose shape it takes; else
        # on the device if it was called inside a device call or a backward node.
        call = self._device.call
        if call.named is not None:
            return call.named == "device"
        if inputs:
            return bool(on_device)
        return autograd.in_node() if call.inside is None else call.inside == "device"

    def _on_stream(self, operation: Operation, inputs: list[torch.Tensor], mixed: bool) -> Any:
        device, stream = self._device, self._device.current_stream()
        reads, writes = operation.reads_and_writes()
        if mixed:
            self._take_from_host(stream, operation, [t for t in reads if not self._holds(t)])
            reads = device.checker.held(reads)
        if stream.tape is not None:
            stream.tape.before_operation(operation, writes)
        with device.drawing() if operation.draws() else nullcontext():
            result = operation.run()
        known = {memory_key(tensor) for tensor in inputs}
        outputs = tensors(result)
        keys = [memory_key(tensor) for tensor in outputs]
        aliases = known.intersection(keys)
        on_host = operators.HOST_RESULTS.get(operation.short)
        fresh = [
            tensor
            for position, (tensor, key) in enumerate(zip(outputs, keys, strict=True))
            if key not in known and position != on_host
        ]
        if aliases and not writes:
            # A view, even if the schema does not say so: no kernel runs.
            reads = [tensor for tensor in reads if memory_key(tensor) not in aliases]
        written = [] if operators.only_allocates(operation.short) else fresh
        if reads or writes or fresh:
            touched = writes
            if stream.tape is None:  # a graph may find other row numbers at each replay
                reads, touched = (touched_parts(operation, one) for one in (reads, writes))
            device.operation(
                stream,
                operation.name,
                "kernel",
                reads=reads,
                writes=[*touched, *written],
                allocates=fresh,
                cost_ns=None if reads or writes or written else 0,
            )
            if stream.tape is not None and (writes or written):
                stream.tape.after_operation(operation, result, written)
        stores_number = device.call.storing_number
        if operation.makes_the_host_wait(self._holds, stores_number=stores_number):
            device.hidden_wait(stream, operation.name)
        return result

    def _take_from_host(
        self, stream: FakeStream, operation: Operation, operands: list[torch.Tensor]
    ) -> None:
        """The host reads scalars and lengths when it launches the kernel. It copies indices to the
        device first, and waits for that."""
        if any(self._device.is_pinned(tensor) for tensor in operands):
            self._device.operation(None, operation.name, "host", reads=operands)
        if any(not self._holds(index) for index in operation.indices()):
            self._device.hidden_wait(stream, "index from host memory")

    def _on_host(self, operation: Operation, inputs: list[torch.Tensor]) -> None:
        """Only pinned memory can be shared with a stream: other host memory needs no check."""
        if operation.draws():
            self._device.note_obstacle(torch_draw)
        if any(self._device.is_pinned(tensor) for tensor in inputs):
            reads, writes = operation.reads_and_writes()
            if writes or not operation.returns_alias():
                reads, writes = (touched_parts(operation, one) for one in (reads, writes))
                self._device.operation(None, operation.name, "host", reads=reads, writes=writes)

    # --- copies -----------------------------------------------------------------------------------

    def _copies(self, operation: Operation) -> Any:
        into, source = tensors(operation.args[0]), tensors(operation.args[1])
        pairs, holds = list(zip(into, source, strict=False)), self._holds
        tape = self._device.current_stream().tape
        if tape is not None:
            tape.save_before_write([one for one, other in pairs if holds(one) or holds(other)])
        result = operation.run()
        non_blocking = bool(operation.argument(2, "non_blocking"))
        for one, other in pairs:
            self._copy(one, other, non_blocking)
        return result

    def _copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        device = self._device
        to_device, from_device = self._holds(into), self._holds(source)
        stream = device.current_stream()
        if stream.tape is not None and (to_device or from_device):
            stream.tape.copied(into, source)
        if to_device and from_device:
            device.operation(stream, "copy d2d", "kernel", reads=[source], writes=[into])
        elif from_device and self._is_elsewhere(into):
            self._to_other_device(source)
        elif to_device:
            self._host_to_device(stream, into, source, non_blocking)
        elif from_device:
            self._device_to_host(stream, into, source, non_blocking)
        else:
            device.operation(None, "aten::copy_", "host", reads=[source], writes=[into])

    def _move_to(self, source: torch.Tensor, way: str, options: dict[str, Any]) -> Any:
        """`.to(device=…)` in code that PyTorch runs inside a call: the function mode is off."""
        kept = {name: options[name] for name in ("dtype", "memory_format") if options.get(name)}
        non_blocking = bool(options.get("non_blocking"))
        moving = self._device.call.changed(moving=way, non_blocking=non_blocking)
        with torch._C.DisableTorchFunction(), moving:
            return self._move(Operation(torch.ops.aten._to_copy.default, (source,), kept))

    def _move(self, operation: Operation) -> Any:
        """`.to(device)` and `.cpu()`: an allocation and a copy."""
        device, stream, source = self._device, self._device.current_stream(), operation.args[0]
        non_blocking = device.call.non_blocking
        result = operation.run()
        if device.call.moving == "to device":
            device.operation(stream, "allocation", "kernel", allocates=tensors(result), cost_ns=0)
            self._host_to_device(stream, result, source, non_blocking)
        else:
            if non_blocking:
                device.mark_pinned(result)  # as PyTorch does, so that the copy can be asynchronous
            self._device_to_host(stream, result, source, non_blocking)
        if stream.tape is not None:
            stream.tape.allocated(tensors(result))
            stream.tape.copied(result, source)
        for tensor in tensors(result):
            device.made(tensor)
        return result

    def _host_to_device(
        self, stream: FakeStream, into: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> None:
        if not source.numel():
            return  # PyTorch copies nothing, and nobody waits
        device, pinned = self._device, self._device.is_pinned(source)
        slow_copy = "copy from pageable memory"
        if self._is_elsewhere(source):
            device.operation(stream, "copy d2d", "kernel", writes=tensors(into))
            return
        if pinned and not _is_bytewise(into, source) and not source.expand_as(into).is_contiguous():
            device.operation(None, "aten::copy_", "host", reads=[source])
            # PyTorch copies from a contiguous copy of it, which is not pinned.
            pinned, slow_copy = False, "copy of a strided view"
        if pinned:
            device.operation(stream, "copy h2d", "copy", reads=[source], writes=[into])
        else:
            device.operation(stream, "copy h2d", "copy", writes=tensors(into))
        if device.call.storing_number:
            return  # a GPU writes the number with a kernel
        device.note_obstacle(host_copy)
        if not pinned:
            # The driver has read the bytes when the call returns. With non_blocking they need not
            # have arrived: the host has waited, and still nothing is ordered.
            device.hidden_wait(stream, slow_copy, orders=not non_blocking)
        elif not non_blocking:
            device.hidden_wait(stream, "blocking copy")

    def _device_to_host(
        self, stream: FakeStream, into: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> None:
        if not source.numel():
            return
        device, pinned = self._device, self._device.is_pinned(into)
        # Else PyTorch copies to new memory, which is not pinned, and from there on the host.
        directly = pinned and (_is_bytewise(into, source) or into.is_contiguous())
        writes = [into] if directly else []
        device.operation(stream, "copy d2h", "copy", reads=tensors(source), writes=writes)
        if not directly or not non_blocking:
            device.hidden_wait(stream, "blocking copy" if directly else "copy to pageable memory")
        if pinned and not directly:
            device.operation(None, "aten::copy_", "host", writes=[into])

    def _to_other_device(self, source: torch.Tensor) -> None:
        self._device.operation(
            self._device.current_stream(), "copy d2d", "kernel", reads=tensors(source)
        )

    def _moves_elsewhere(self) -> bool:
        return any(other.call.moving == "to device" for other in self._others())

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on another fake device."""
        return any(other.checker.on_device(tensor) for other in self._others())

    def _others(self) -> list[FakeDevice]:
        if len(patches.devices) == 1:
            return []
        return [other for other in patches.devices if other is not self._device]

    # --- mixing -----------------------------------------------------------------------------------

    def _refuse_mixed(
        self, operation: Operation, inputs: list[torch.Tensor], on_device: list[torch.Tensor]
    ) -> None:
        if not on_device or len(on_device) == len(inputs) or operation.short in operators.MAY_MIX:
            return
        if operation.short in operators.INDEXING:
            if not any(self._holds(tensor) for tensor in tensors(operation.args[0])):
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    f"(cpu): aten::{operation.short} was given an index on {self._device}"
                )
            inputs = tensors((operation.args[0], operation.args[2:]))  # indices may come from both
        strays = [t for t in inputs if t.dim() > 0 and not self._holds(t)]
        if strays and not operation.only_for_shape():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{self._device} and cpu: {operation.name} was given a host tensor of shape "
                f"{tuple(strays[0].shape)} ({self._device.how_to_move})"
            )


def _is_bytewise(into: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both have the same elements in the same order, in one piece of memory."""
    if into.is_nested or source.is_nested:
        return True
    if into.dtype != source.dtype or into.shape != source.shape:
        return False
    strides = zip(into.shape, into.stride(), source.stride(), strict=True)
    if any(one != other for size, one, other in strides if size > 1):
        return False
    return Layout.of(into).piece_bytes == into.numel() * into.element_size()
