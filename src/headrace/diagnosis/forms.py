"""The forms in which code makes the host wait, and what to write instead.

`forms.toml` lists them, and by what each is recognized: functions of PyTorch between the line and
the wait, the call that the line was making, or the operation on the device. `form_of` is the
matcher.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import NamedTuple

_IN_LIBRARY = "The line is in {0}: look for an option of {0} that avoids it, or call it less often."


@dataclass(frozen=True, slots=True)
class Form:
    """One way to make the host wait: its name, how it looks, and what to write instead.
    `forms.toml` says what the other fields are."""

    name: str
    title: str
    advice: str
    calls: str = ""
    functions: str = ""
    operations: Sequence[str] = ()


_TEXT = Path(__file__).with_name("forms.toml").read_text(encoding="utf-8")
FORMS = {name: Form(name, **fields) for name, fields in tomllib.loads(_TEXT).items()}
_CALLS = {call: form.name for form in FORMS.values() for call in form.calls.split()}
_FUNCTIONS = {one: form.name for form in FORMS.values() for one in form.functions.split()}
_OPERATIONS = {one: form.name for form in FORMS.values() for one in form.operations}
#: Functions of `torch` that make a tensor.
_MAKING = (
    *("zeros", "ones", "full", "empty", "eye", "arange", "linspace", "logspace", "normal"),
    *("rand", "randn", "randint", "randperm", "zeros_like", "ones_like", "full_like", "randn_like"),
    *("tensor", "as_tensor", "from_numpy", "Tensor", "FloatTensor", "LongTensor", "IntTensor"),
)
_FINITE = ("isnan", "isinf", "isfinite")
#: Calls that wait themselves, also in a test.
_READING = ("item", "bool", "float", "int", "equal", "allclose", "is_nonzero", "tolist", "cpu")
#: Iterators that test each item when it is drawn.
_TESTING_ITEMS = ("filter", "filterfalse", "takewhile", "dropwhile")
#: Operators that other functions use, too: `torch.cov` tests its input with `equal`.
_READS_VALUE = ("aten::_local_scalar_dense", "aten::equal")
#: What a form is, if the device was asked for this.
_REFINED = (
    (("to", "pageable copy", "new tensor"), ("copy to pageable memory",), "cpu"),
    (("cpu",), ("copy from pageable memory",), "pageable copy"),
    (("to", "pageable copy"), ("blocking copy",), "pinned copy"),
    (("to", "pinned copy", "pageable copy"), ("copy of a strided view",), "strided copy"),
    (
        ("mask", "mask assignment", "index assignment"),
        ("aten::_local_scalar_dense", "index from host memory"),
        "index",  # it is the index that is waited for, not what it selects
    ),
    (("new tensor",), ("aten::_local_scalar_dense",), "list of tensors"),
)
_LOGGERS = ("lightning", "pytorch_lightning", "transformers", "tqdm", "wandb", "tensorboard")
#: What loggers do with values on the device.
_READ_FOR_LOGS = ("item", "number", "tolist", "print", "format", "cpu", "numpy", "other")
#: Forms whose advice helps also if the line is in a library.
_IN_USERS_HANDS = (
    *("to", "pinned copy", "pageable copy", "strided copy", "accelerate copy", "progress bar"),
    *("metric", "nan filter", "in backward"),
)
#: In the names of functions in which TorchMetrics tests values.
_CHECKING = ("validation", "nan_check")
_LOGGING = ("log", "progress", "callback", "print", "metric")


def form_of(
    operation: str,
    functions: Sequence[tuple[str, str]],
    expression: Expression | None,
    libraries: Sequence[tuple[str, str]] = (),
) -> Form:
    """The form of a wait. `functions` are PyTorch's between the line and the wait, as (file's stem,
    name); `libraries` are the files and functions of installed packages from the line to the
    user's own, if the line is in one."""
    if operation.endswith(".synchronize"):  # what the user asked for, wherever it is called
        return FORMS[_OPERATIONS[operation]]
    for stem, function in functions:
        for key in (f"{stem}.{function}", f"{stem}.", f".{function}"):
            if key in _FUNCTIONS:
                return FORMS[_in_logger(_FUNCTIONS[key], libraries)]
    found = expression.form() if expression is not None else None
    for forms, operations, refined in _REFINED:
        if found in forms and operation in operations:
            found = refined
            break
    if found is None and any(stem != "_tensor" for stem, _ in functions):
        found = "inside PyTorch"
    if found is None and operation in _READS_VALUE and expression is not None:
        found = "other"  # the line says what reads the value, and it is not `.item()`
    found = found or _OPERATIONS.get(operation, "other")
    packages = [_package(file)[0] for file, _ in libraries]
    package = packages[0].removesuffix(".py") if packages else ""
    if found == "finite check" and package == "transformers":
        found = "nan filter"
    elif found in ("to", "pinned copy") and "accelerate" in packages:
        found = "accelerate copy"
    elif package == "torchmetrics" and any(word in libraries[0][1] for word in _CHECKING):
        found = "metric"
    if found == "inside PyTorch":
        return replace(FORMS[found], title=_title(functions))
    form = FORMS[_in_logger(found, libraries)]
    if package and form.name not in _IN_USERS_HANDS:
        return replace(form, advice=_IN_LIBRARY.format(package))
    return form


def _in_logger(form: str, libraries: Sequence[tuple[str, str]]) -> str:
    """What a logger does with values is logging, in whatever form."""
    is_logged = form in _READ_FOR_LOGS and any(_is_logger(*one) for one in libraries)
    return "progress bar" if is_logged else form


def _title(functions: Sequence[tuple[str, str]]) -> str:
    """The PyTorch function that the line calls, in words: the outermost public one, if any."""
    public = [one for one in functions if not one[1].startswith("_")]
    stem, function = public[-1] if public else functions[-1]
    return f"{function}() in PyTorch's {stem}.py"


def _package(file: str) -> list[str]:
    """The path of an installed package's file, from the package on. For other files, an empty
    name."""
    _, installed, path = file.replace("\\", "/").rpartition("-packages/")
    return path.split("/") if installed else [""]


def _is_logger(file: str, function: str) -> bool:
    parts = _package(file)
    if parts[0] not in _LOGGERS:
        return False
    names = [*parts[1:], function]
    return parts[0] == "tqdm" or any(word in name for name in names for word in _LOGGING)


@dataclass(frozen=True, slots=True)
class Expression:
    """The part of a line that was running: its syntax, and what contains it."""

    node: ast.AST
    parent: ast.AST | None
    #: For `x.to(…)` and `x.copy_(…)`: whether x lay on the device (None: not known), or in pinned
    #: memory.
    on_device: bool | None = None
    is_pinned: bool = False
    #: For `x[i]`: whether i is a tensor of numbers, not a mask; and whether a number is assigned.
    by_number: bool = False
    assigns_number: bool = False
    #: For a call: whether its first argument is a list with tensors in it.
    of_tensors: bool = False
    #: Whether its value was being tested, as in `if t:`.
    is_tested: bool = False

    def form(self) -> str | None:
        node = self.node
        if self.is_tested:
            names = {_called(one) for one in ast.walk(node)}
            return "finite check" if names & set(_FINITE) else "branch"
        if isinstance(node, ast.Call):
            return self._call_form(node)
        if isinstance(node, ast.Subscript):
            if self.assigns_number:
                return "index assignment"
            if self.by_number:
                return "index"
            if isinstance(node.ctx, ast.Store):
                return "mask assignment"
            return "slice" if isinstance(node.slice, ast.Slice) else "mask"
        if isinstance(node, ast.FormattedValue | ast.JoinedStr):
            return "format"
        if isinstance(node, ast.List | ast.Tuple | ast.Set):  # `[*map(int, t)]`
            return _CALLS.get(_drawn_from(*node.elts))
        if isinstance(node, ast.Compare):  # of lists, whose items it compares; or `in`
            return "compare"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # `[0] * t`
            return "size"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # `"loss %.3f" % t`
            return "format"
        return None

    def _call_form(self, node: ast.Call) -> str | None:
        name = _called(node)
        around = [self.parent] if self.parent is not None else []  # `math.isnan(loss.item())`
        inside = [*ast.walk(node.func), *around] if name in _READING else []
        if name in ("bool", "any", "all"):  # `any(grad.isnan().any() for grad in gradients)`
            inside += [one for argument in node.args for one in ast.walk(argument)]
        if any(_called(one) in _FINITE for one in inside):
            return "finite check"
        if _owner(node) == "math":
            return "finite check" if name in _FINITE else "number"
        if _owner(node) in ("array", "struct"):
            return "number"
        if name == "array" and not _owner(node):  # of NumPy, or of Python's `array`
            return None
        found = _CALLS.get(name) or _CALLS.get(_drawn_from(node, *node.args))
        if name == "asarray" and _owner(node) == "torch":
            found = "new tensor"
        if found == "new tensor" and self.of_tensors:
            return "list of tensors"
        if found == "new tensor" and _names_cpu(node):
            return "cpu"
        if found == "to" and (self.on_device or _names_cpu(node)):
            return "cpu"
        if found == "pageable copy" and self.on_device is False:
            return "cpu"  # `host.copy_(x)`
        if found in ("to", "pageable copy") and self.is_pinned:
            return "pinned copy"
        if found == "to" and _is_made_here(node):
            return "made on the host"
        return found


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_made_here(node: ast.Call) -> bool:
    """`torch.zeros(3).float().to(device)`."""
    source: ast.AST = node.func
    while isinstance(source, ast.Attribute | ast.Call):
        if isinstance(source, ast.Call) and _owner(source) == "torch":
            return _called(source) in _MAKING
        source = source.value if isinstance(source, ast.Attribute) else source.func
    return False


def _drawn_from(*nodes: ast.AST) -> str:
    """`float` of `list(map(float, values))`, which waits in `list`; `filter` of
    `list(filter(test, values))`."""
    for node in nodes:
        one = node.value if isinstance(node, ast.Starred) else node
        if isinstance(one, ast.Call) and _called(one) == "map" and one.args:
            return getattr(one.args[0], "id", "")
        if _called(one) in _TESTING_ITEMS:
            return _called(one)
    return ""


def _owner(node: ast.Call) -> str:
    """`torch` of `torch.asarray(…)`."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


def _names_cpu(node: ast.Call) -> bool:
    given = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "device")]
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in given)


# --- from an instruction to its syntax ------------------------------------------------------------

#: Instructions that ask whether a value is true, and those that may come between it and them.
_TESTING = frozenset(
    number
    for name, number in dis.opmap.items()
    if ("_IF_" in name and "NONE" not in name) or name in ("UNARY_NOT", "TO_BOOL")
)
_BETWEEN = frozenset(
    dis.opmap[name]
    for name in ("CACHE", "COPY", "EXTENDED_ARG", "NOP", "TO_BOOL", "STORE_FAST", "STORE_NAME")
    if name in dis.opmap
)
_COMPARE, _AND_TEST = dis.opmap["COMPARE_OP"], 0x10 if sys.version_info >= (3, 13) else 0


class WaitingInstruction(NamedTuple):
    """Where a line was: the offset of the instruction that computes what it waits for, and whether
    that value is being tested."""

    offset: int
    is_tested: bool


@lru_cache(maxsize=4096)
def waiting_instruction(code: CodeType, offset: int) -> WaitingInstruction:
    """The instruction at an offset; if it tests a value, the one before it, which has computed the
    value. Python 3.11 gives the tests of `a or b` the place of `a`, or of the whole statement."""
    content = code.co_code
    if content[offset] == _COMPARE and content[offset + 1] & _AND_TEST:
        return WaitingInstruction(offset, is_tested=True)
    if content[offset] not in _TESTING:
        return WaitingInstruction(offset, is_tested=False)
    before = offset - 2
    while before > 0 and content[before] in _BETWEEN:
        before -= 2
    return WaitingInstruction(before, is_tested=True)


def line_number(code: CodeType, offset: int) -> int | None:
    """The line of an instruction; None if Python does not know it."""
    place = next(islice(code.co_positions(), offset // 2, None), None)
    return None if place is None else place[0]


@lru_cache(maxsize=64)
def _nodes(file: str) -> dict[tuple[int, int, int, int], tuple[ast.AST, ast.AST | None]]:
    """The outermost node at each place of a file, with its parent."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[int, int, int, int], tuple[ast.AST, ast.AST | None]] = {}
    pending: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
    while pending:
        node, parent = pending.pop()
        if isinstance(node, ast.For | ast.AsyncFor):
            # Python 3.11 draws the next item at the place of the statement, later versions at that
            # of the iterator.
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            found.setdefault(place, (node.iter, node))
        if isinstance(node, ast.expr):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            found.setdefault(place, (node, parent))
            method = getattr(node, "func", None)
            if isinstance(method, ast.Attribute) and method.end_lineno != node.lineno:
                # For `.item()` on a line of its own, Python gives the place from `item` on.
                line, end = method.end_lineno or 0, method.end_col_offset or 0
                place = line, node.end_lineno, end - len(method.attr), node.end_col_offset
                found.setdefault(place, (node, parent))
        pending += [(child, node) for child in ast.iter_child_nodes(node)]
    return found


@lru_cache(maxsize=4096)
def running_expression(code: CodeType, instruction: WaitingInstruction) -> Expression | None:
    """What an instruction computes; None if there is no source, or Python keeps no positions."""
    place = next(islice(code.co_positions(), instruction.offset // 2, None), None)
    if place is None or None in place:
        return None
    line, end_line, column, end_column = place
    found = _nodes(code.co_filename).get((line, end_line, column, end_column))  # type: ignore[arg-type]
    return None if found is None else Expression(*found, is_tested=instruction.is_tested)
