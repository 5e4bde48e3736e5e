"""Which call made the host wait, by the user's own line.

On CUDA, PyTorch says itself when an operation synchronizes (`set_sync_debug_mode`), in whichever
thread; the frames are walked at that moment. It is silent about explicit synchronization, about
asynchronous copies from memory that is not pinned, and about code of Thrust's, so those calls are
replaced by ones that report it. The fake device reports its hidden waits itself.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from headrace import main_program
from headrace.device import Device, cuda_namespace
from headrace.diagnosis.forms import (
    FORMS,
    Expression,
    Form,
    form_of,
    line_number,
    running_expression,
    waiting_instruction,
)
from headrace.records import LineRecord
from headrace.replacing import replaced, replaced_in_c
from headrace.source_lines import HEADRACE, TORCH, is_generated, is_user_code, variables_of

_RUNNER = main_program.__file__
#: Packages whose waits are Headrace's own. A user's function that they call is the user's.
_OURS = tuple(f"{HEADRACE / package}{os.sep}" for package in ("engine", "data", "checkpoint"))
#: Files of PyTorch through which it calls functions: they say nothing about what waits.
_MACHINERY = ("_compile", "eval_frame", "_device", "overrides", "_python_dispatch", "_contextlib")
_MASKS = (torch.bool, torch.uint8)
_SYNCHRONISING = "called a synchronizing CUDA operation"
#: Why the fake device says that it waits, and the call that made it wait.
_FAKE_REASONS = {
    "torch.cuda.synchronize": "torch.cuda.synchronize",
    "torch.accelerator.synchronize": "torch.cuda.synchronize",
    "stream.synchronize": "Stream.synchronize",
    "event.synchronize": "Event.synchronize",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """One time that the host waited for the device.

    `line` is the innermost line outside PyTorch and the standard library; None if no Python code of
    the thread is known. If that line is in an installed package or in generated code, `called_from`
    is the user's own line that led there. `in_other_thread` says that it was not the training that
    waited.
    """

    form: Form
    line: LineRecord | None
    called_from: LineRecord | None = None
    operation: str = ""
    in_other_thread: bool = False


def wait_at(frame: FrameType | None, operation: str = "", fake: Device | None = None) -> Wait:
    """The wait that the code in `frame` has caused, with its line and form. `fake` is the fake
    device, which alone knows which tensors it holds."""
    innermost, own = users_frames(frame)
    functions: list[tuple[str, str]] = []
    is_ours = False
    while frame is not None and frame is not innermost and frame.f_code.co_filename != _RUNNER:
        file = frame.f_code.co_filename
        is_ours = is_ours or file.startswith(_OURS)
        is_wrapper = "<locals>" in frame.f_code.co_qualname
        if file.startswith(str(TORCH)) and not is_wrapper and Path(file).stem not in _MACHINERY:
            functions.append((Path(file).stem, frame.f_code.co_name))
        frame = frame.f_back
    if innermost is None:
        form = form_of(operation, functions, None)
        # A thread of autograd's that runs no Python code.
        form = FORMS["anomaly detection"] if _tests_gradients() else form
        return Wait(form, None, None, operation)
    expression = _expression(innermost, fake)
    if expression is None and own is not None and is_generated(innermost.f_code.co_filename):
        # `one == other` of two dataclasses says what waits; a call may be of anything.
        around = _expression(own, fake)
        expression = None if around is not None and isinstance(around.node, ast.Call) else around
    form = form_of(operation, functions, expression, _libraries(innermost, own))
    if form.name == "in backward" and _tests_gradients():
        form = FORMS["anomaly detection"]
    if is_ours:
        form = FORMS["headrace"]
    called_from = _line(own) if own is not None and own is not innermost else None
    return Wait(form, _line(innermost), called_from, operation)


def _tests_gradients() -> bool:
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _libraries(innermost: FrameType, own: FrameType | None) -> list[tuple[str, str]]:
    """The files and functions of installed packages from the innermost frame to the user's own."""
    found: list[tuple[str, str]] = []
    frame: FrameType | None = innermost
    while frame is not None and frame is not own:
        file = frame.f_code.co_filename
        if file == _RUNNER:
            break
        if is_user_code(file):
            found.append((file, frame.f_code.co_name))
        frame = frame.f_back
    return found


def users_frames(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The innermost frame outside PyTorch and the standard library, and the innermost one that is
    neither in an installed package nor in generated code. None if there is none."""
    innermost: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _RUNNER:
            break
        if is_user_code(file):
            innermost = innermost or frame
            if not _is_installed(file) and not is_generated(file):
                return innermost, frame
        frame = frame.f_back
    return innermost, None


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def line_record(code: CodeType, line: int, names: dict[str, Any] | None = None) -> LineRecord:
    """The line with its text. `names` are the module's globals, which may know the source."""
    text = linecache.getline(code.co_filename, line, names).strip()
    if text.endswith("("):  # the next line says what is called, or tested
        text += linecache.getline(code.co_filename, line + 1, names).strip()
    # A comprehension or a lambda is a part of the function that it stands in.
    named = [name for name in code.co_qualname.split(".") if not name.startswith("<")]
    is_named = code.co_name != "<module>" and bool(named)
    return LineRecord(code.co_filename, line, named[-1] if is_named else "", text)


def _line(frame: FrameType) -> LineRecord:
    at = waiting_instruction(frame.f_code, frame.f_lasti)
    line = line_number(frame.f_code, at.offset) if at.is_tested else None
    return line_record(frame.f_code, line or frame.f_lineno, frame.f_globals)


def _expression(frame: FrameType, fake: Device | None) -> Expression | None:
    found = running_expression(frame.f_code, waiting_instruction(frame.f_code, frame.f_lasti))
    if found is None or found.is_tested:
        return found
    node: Any = found.node
    if hasattr(node, "slice"):
        index = _value(node.slice, frame)
        is_number = isinstance(index, torch.Tensor) and index.dtype not in _MASKS
        assigned = found.parent.value if isinstance(found.parent, ast.Assign) else None
        assigns_number = isinstance(node.ctx, ast.Store) and _is_number(assigned, frame)
        # `x[n] = 1.0` with a tensor n of one number reads that number.
        is_one = isinstance(index, torch.Tensor) and index.dim() == 0
        return replace(found, by_number=is_number, assigns_number=assigns_number and not is_one)
    if hasattr(node, "args") and node.args and _is_list_of_tensors(node.args[0], frame):
        return replace(found, of_tensors=True)
    value = _value(getattr(getattr(found.node, "func", None), "value", None), frame)
    if isinstance(value, torch.Tensor):
        source = _value(node.args[0], frame) if node.func.attr == "copy_" and node.args else value
        return replace(found, on_device=_is_on_device(value), is_pinned=_is_pinned(source, fake))
    return found


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _is_pinned(source: object, fake: Device | None) -> bool:
    if not isinstance(source, torch.Tensor) or _is_on_device(source):
        return False
    return fake.is_pinned(source) if fake is not None else source.is_pinned()


def _is_list_of_tensors(node: Any, frame: FrameType) -> bool:
    items = getattr(node, "elts", None)
    values = _value(node, frame) if items is None else [_value(item, frame) for item in items]
    return isinstance(values, list | tuple) and any(
        isinstance(value, torch.Tensor) for value in values
    )


def _is_number(node: ast.AST | None, frame: FrameType) -> bool:
    if isinstance(node, ast.UnaryOp):  # `-1`
        node = node.operand
    value = node.value if isinstance(node, ast.Constant) else _value(node, frame)
    return isinstance(value, int | float)


def _value(node: ast.AST | None, frame: FrameType) -> object:
    """What `x` or `self.x` is in a frame, without running any code; None if that is not known."""
    if isinstance(node, ast.Name):
        return variables_of(frame).get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    return None


# --- watching -------------------------------------------------------------------------------------


@contextmanager
def watch_waits(device: Device, on_wait: Callable[[Wait], object]) -> Iterator[None]:
    """Call `on_wait` for each host wait inside the block, in the thread that waits."""
    with ExitStack() as stack:
        if hasattr(device, "on_hidden_wait"):
            stack.enter_context(_fake_waits(device, on_wait))
        else:
            in_call = threading.local()
            telling = partial(_telling, on_wait=on_wait, in_call=in_call)
            stack.enter_context(_explicit_waits(telling))
            stack.enter_context(_cuda_waits(lambda frame: on_wait(wait_at(frame)), in_call))
            stack.enter_context(_pageable_copies(on_wait))
            stack.enter_context(_thrust_waits(on_wait))
        yield


@contextmanager
def watch_moments(
    begins: Callable[[], object], ends: Callable[[], object], after_hidden: Callable[[], object]
) -> Iterator[None]:
    """Call `begins` and `ends` around each explicit host wait inside the block, and `after_hidden`
    after each one inside an operation, in the thread that waits. Lines are not looked for."""
    in_call = threading.local()

    def around(original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begins()
            in_call.waits = True
            try:
                return original(*args, **kwargs)
            finally:
                in_call.waits = False
                ends()

        return call

    with _explicit_waits(around), _cuda_waits(lambda frame: after_hidden(), in_call):
        yield


@contextmanager
def _explicit_waits(
    telling: Callable[[Callable[..., Any], str], Callable[..., Any]],
) -> Iterator[None]:
    """Calls that say that they wait, replaced by what `telling` makes of each, given its name.
    Functions are replaced below `torch.cuda`, since a script may have imported its functions by
    name."""
    cuda: Any = cuda_namespace()
    driver: Any = torch._C
    with ExitStack() as stack:
        for owner, name, operation in (
            (driver, "_cuda_synchronize", "torch.cuda.synchronize"),
            (driver, "_accelerator_synchronizeDevice", "torch.cuda.synchronize"),
            (driver, "_cuda_emptyCache", "torch.cuda.empty_cache"),
            (driver, "_accelerator_emptyCache", "torch.cuda.empty_cache"),
            (cuda.Stream, "synchronize", "Stream.synchronize"),
            (cuda.Event, "synchronize", "Event.synchronize"),
        ):
            if hasattr(owner, name):  # PyTorch for the CPU lacks some
                call = telling(getattr(owner, name), operation)
                stack.enter_context(replaced(owner, name, call))
        generic: Any = torch.Event  # whatever the device; it is written in C
        call = telling(generic.synchronize, "Event.synchronize")
        stack.enter_context(replaced_in_c(generic, "synchronize", call))
        yield


def _telling(
    original: Callable[..., Any],
    operation: str,
    on_wait: Callable[[Wait], object],
    in_call: threading.local,
) -> Callable[..., Any]:
    """The function, which also tells that it waits. `in_call.waits` is True inside it: PyTorch may
    report the same wait."""

    def call(*args: Any, **kwargs: Any) -> Any:
        in_call.waits = True
        try:
            result = original(*args, **kwargs)
        finally:
            in_call.waits = False
        on_wait(wait_at(sys._getframe(1), operation))
        return result

    return call


@contextmanager
def _fake_waits(device: Device, on_wait: Callable[[Wait], object]) -> Iterator[None]:
    """Call `on_wait` for each wait on the fake device inside the block. The device reports hidden
    waits itself; for explicit ones, its methods are replaced."""
    fake: Any = device
    cuda: Any = cuda_namespace()
    synchronize, wait, empty_cache = fake.synchronize, fake.wait, cuda.empty_cache

    def tell(operation: str) -> None:
        on_wait(wait_at(sys._getframe(1), operation, fake))

    def synchronized(reason: str, *args: Any) -> None:
        synchronize(reason, *args)
        if reason in _FAKE_REASONS:
            tell(_FAKE_REASONS[reason])

    def waited(event: Any, reason: str) -> None:
        wait(event, reason)
        if reason in _FAKE_REASONS:
            tell(_FAKE_REASONS[reason])

    def emptied() -> None:
        empty_cache()
        tell("torch.cuda.empty_cache")

    with ExitStack() as stack:
        for owner, name, value in (
            (fake, "on_hidden_wait", tell),
            (fake, "synchronize", synchronized),
            (fake, "wait", waited),
            (cuda, "empty_cache", emptied),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


@contextmanager
def _cuda_waits(on_wait: Callable[[FrameType], object], in_call: threading.local) -> Iterator[None]:
    """Operations that PyTorch reports: when they wait, it keeps a warning until the call of Python
    that they are part of returns. The warning is taken out of the way of the user's filters and
    handlers; every other warning goes its usual way."""
    cuda: Any = cuda_namespace()
    module: Any = warnings
    original, mode = module._showwarnmsg, cuda.get_sync_debug_mode()
    add_filter = module.filterwarnings

    def show(message: Any) -> None:
        if _SYNCHRONISING in str(message.message):
            if not getattr(in_call, "waits", False):
                on_wait(sys._getframe(1))
        else:
            original(message)

    def put_first() -> None:
        add_filter("always", message=_SYNCHRONISING)

    def keeping_ours(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> None:
            change(*args, **kwargs)
            put_first()

        return changed

    with ExitStack() as stack:
        for name in ("simplefilter", "filterwarnings"):
            changed = keeping_ours(getattr(module, name))
            stack.enter_context(replaced(module, name, changed))
        stack.enter_context(replaced(module, "_showwarnmsg", show))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cuda.set_sync_debug_mode("warn")  # which warns that it is a prototype
        put_first()
        try:
            yield
        finally:
            cuda.set_sync_debug_mode(mode)
            module.filters[:] = [one for one in module.filters if not _is_ours(one[1])]
            module._filters_mutated()


def _is_ours(message: Any) -> bool:
    return bool(getattr(message, "pattern", message) == _SYNCHRONISING)


@contextmanager
def _thrust_waits(on_wait: Callable[[Wait], object]) -> Iterator[None]:
    """`unique` with `dim`, and `coalesce`: they run code of Thrust's, whose waits PyTorch does not
    see."""
    with ExitStack() as stack:
        for owner, name, operation in (
            (torch, "unique", "aten::unique_dim"),
            (torch, "unique_consecutive", "aten::unique_dim"),
            (torch.Tensor, "coalesce", "aten::_coalesce"),
        ):
            stack.enter_context(_telling_of_thrust(owner, name, operation, on_wait))
        yield


def _telling_of_thrust(
    owner: Any, name: str, operation: str, on_wait: Callable[[Wait], object]
) -> AbstractContextManager[None]:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        source: Any = args[0] if args else kwargs.get("input")
        is_cuda = getattr(source, "is_cuda", False)
        if name == "coalesce":
            waits = is_cuda and not source.is_coalesced()
        else:
            waits = is_cuda and kwargs.get("dim") is not None
        result = original(*args, **kwargs)
        if waits:
            on_wait(wait_at(sys._getframe(1), operation))
        return result

    return replaced(owner, name, call)


@contextmanager
def _pageable_copies(on_wait: Callable[[Wait], object]) -> Iterator[None]:
    """Copies with `non_blocking=True` from and to memory that is not pinned: the driver blocks, and
    PyTorch does not say so."""
    with ExitStack() as stack:
        for name in ("to", "cuda", "copy_"):
            stack.enter_context(_telling_if_pageable(name, on_wait))
        stack.enter_context(_telling_if_any_pageable(on_wait))
        if hasattr(torch._C, "_scatter"):  # PyTorch for the CPU lacks it
            stack.enter_context(_telling_if_scattered(on_wait))
        yield


def _telling_if_pageable(
    name: str, on_wait: Callable[[Wait], object]
) -> AbstractContextManager[None]:
    original = getattr(torch.Tensor, name)

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        source, target = (args[0], self) if name == "copy_" and args else (self, result)
        if _is_asynchronous(args, kwargs):
            copy = _pageable_copy(source, target)
            if copy is not None:
                on_wait(wait_at(sys._getframe(1), copy))
        return result

    return replaced(torch.Tensor, name, call)


def _telling_if_any_pageable(on_wait: Callable[[Wait], object]) -> AbstractContextManager[None]:
    """`torch._foreach_copy_(targets, sources, non_blocking=True)`: a wait for each such copy."""
    original = torch._foreach_copy_

    def call(targets: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(targets, sources, *args, **kwargs)
        if _is_asynchronous((sources, *args), kwargs):
            for source, target in zip(sources, targets, strict=True):
                copy = _pageable_copy(source, target)
                if copy is not None:
                    on_wait(wait_at(sys._getframe(1), copy))
        return result

    return replaced(torch, "_foreach_copy_", call)


def _telling_if_scattered(on_wait: Callable[[Wait], object]) -> AbstractContextManager[None]:
    """The copies to the GPUs of `nn.DataParallel`, which C++ makes."""
    driver: Any = torch._C
    original = driver._scatter

    def call(source: torch.Tensor, *args: Any) -> Any:
        parts = original(source, *args)
        for part in parts:
            copy = _pageable_copy(source, part)
            if copy is not None:
                on_wait(wait_at(sys._getframe(1), copy))
        return parts

    return replaced(driver, "_scatter", call)


def _pageable_copy(source: object, target: object) -> str | None:
    """What to call a copy between the device and memory that is not pinned; None if it is another
    copy."""
    if not (isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if source.is_cpu and target.is_cuda and source.dim() > 0:
        if not source.is_pinned():
            return "copy from pageable memory"
        return "copy of a strided view" if _is_rearranged(source, target) else None
    if source.is_cuda and target.is_cpu and not target.is_pinned():
        return "copy to pageable memory"
    return None


def _is_rearranged(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the target has the elements in another order than the source, or without its gaps:
    then PyTorch makes a contiguous copy of the source first, which is not pinned."""
    if source.is_contiguous():
        return False
    return source.dtype != target.dtype or source.stride() != target.stride()


def _is_asynchronous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return any(one is True for one in args[1:])
