"""Records one eager run of a step in an `OperationTrace`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.capture.watching.trace import OperationTrace, Storage, TensorRead, TracedOperation
from headrace.device import CaptureQuery, Device
from headrace.source_lines import Site, users_line_inside

_CONSTANT_TYPES = (
    *(int, float, complex, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


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
        self.trace.note_asked(self._query.asked)

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

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        constants = self.trace.host_constants
        return func(*args, **kwargs) if constants is None else constants.run(func, args, kwargs)

    def forward_ends(self, returned: dict[str, float]) -> None:
        """Call between forward and backward of a run, each traced in a block of its own. `returned`
        are the Python numbers that the loss function returned."""
        self.trace.note_returned(returned)
        self._in_backward = True

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
                self.trace.note_nested(line)
            elif isinstance(value, torch.Tensor):
                shapes.append((value.dtype, *value.shape))
                on_device |= self._record_read(value, line, constants)
            elif isinstance(value, _CONSTANT_TYPES):
                constants.append(value)
            else:  # the type alone: the text of a storage would be all of its content
                constants.append(type(value).__name__)
        name = str(func).removesuffix(".default").replace("aten.", "aten::")
        self.trace.operations.append(TracedOperation(name, tuple(constants), tuple(shapes), line))
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
