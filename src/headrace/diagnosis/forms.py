"""The forms in which code makes the host wait, and what to write instead.

A form is recognised by the call that waited: by the functions of PyTorch between it and the user's
line, and by the expression in the line that was running.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import NamedTuple

_READ_LATER = (
    "Keep the value on the device (`total += loss.detach()`) and read it every 50 steps, or read "
    "it one step late with `headrace.DeferredScalars`."
)
_IN_LIBRARY = "The line is in {0}: look for an option of {0} that avoids it, or call it less often."
_ON_DEVICE = (
    "Create the tensor once, before the loop, or directly on the device (`torch.full`, "
    "`torch.arange`, `torch.randn` and such with `device=`). If its data changes, copy it from "
    "pinned memory with `non_blocking=True`."
)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to make the host wait: its name, how it looks, and what to write instead."""

    name: str
    title: str
    advice: str


_FORMS = (
    Form("item", ".item()", _READ_LATER),
    Form("number", "float(t), int(t)", _READ_LATER),
    Form("tolist", ".tolist()", _READ_LATER),
    Form("print", "print(t), repr(t)", "Print every 50 steps instead of every step."),
    Form(
        "format",
        "a tensor in an f-string or format()",
        "Read the value every 50 steps, and format it only then.",
    ),
    Form(
        "branch",
        "if t:, while t:, assert t",
        "Choose between values on the device with `torch.where`, or test every 50 steps.",
    ),
    Form(
        "finite check",
        "a test for NaN",
        "Count on the device (`bad += ~loss.isfinite()`) and read the count every 50 steps.",
    ),
    Form(
        "compare",
        "max(), sorted(), any() or in with tensors",
        "Compare on the device: `torch.maximum`, `torch.sort`, `x.eq(y).any()`.",
    ),
    Form(
        "cpu",
        ".cpu(), .to('cpu')",
        "Copy into pinned memory with `non_blocking=True`, record an event, and read the copy once "
        "the event has passed.",
    ),
    Form("numpy", ".numpy()", "Work on the tensor, or convert it after the loop."),
    Form(
        "to",
        ".to(device)",
        "Pin the source (`pin_memory=True` in the DataLoader) and pass `non_blocking=True`; "
        "`headrace.prefetch(loader, device)` does both ahead of time.",
    ),
    Form(
        "pinned copy",
        ".to(device) of pinned memory",
        "Pass `non_blocking=True`: the source is pinned already.",
    ),
    Form(
        "strided copy",
        ".to(device) of a part of pinned memory",
        "The source is pinned, but not contiguous: PyTorch first copies it to memory that is not. "
        "Copy the whole batch with `non_blocking=True`, and slice or expand it on the device.",
    ),
    Form(
        "accelerate copy",
        "Accelerate's copy of a batch",
        "Pass `pin_memory=True` to the DataLoader and `DataLoaderConfiguration(non_blocking=True)` "
        "to `Accelerator`. The Trainer has `dataloader_pin_memory=True` and "
        "`accelerator_config={'non_blocking': True}`.",
    ),
    Form(
        "pageable copy",
        "a copy from memory that is not pinned",
        "Pin the source (`pin_memory=True` in the DataLoader, elsewhere `tensor.pin_memory()`) and "
        "pass `non_blocking=True`: either alone still blocks.",
    ),
    Form(
        "scatter",
        "nn.DataParallel's copy of a batch",
        "Pass `pin_memory=True` to the DataLoader. One process per GPU with "
        "`DistributedDataParallel` is faster still.",
    ),
    Form("new tensor", "torch.tensor(…, device=…)", _ON_DEVICE),
    Form("made on the host", ".to(device) of a new tensor", _ON_DEVICE),
    Form(
        "list of tensors",
        "torch.tensor([t, …])",
        "Use `torch.stack`: it stays on the device and reads nothing back.",
    ),
    Form(
        "mask",
        "x[mask]",
        "Keep the shape: `torch.where(mask, x, 0)`, or weight the loss with the mask.",
    ),
    Form(
        "mask assignment",
        "x[mask] = values",
        "Use `torch.where(mask, values, x)` or `masked_scatter_`.",
    ),
    Form(
        "index assignment",
        "x[i] = number",
        "Use `x.index_fill_(0, i, number)`, or assign a tensor that is on the device: PyTorch "
        "copies a number there first.",
    ),
    Form(
        "index",
        "x[i] with a tensor or array i",
        "Use `x.index_select` or `x.gather` with an index that is on the device; keep a single "
        "number on the host.",
    ),
    Form("slice", "x[:n] with a tensor n", "Keep n a Python number, or use a mask of fixed size."),
    Form(
        "nonzero",
        "nonzero(), argwhere(), where(mask)",
        "Use a mask, or `torch.nonzero_static(x, size=…)`.",
    ),
    Form(
        "combinations",
        "combinations()",
        "Compute the indices once, before the loop: they depend on the length of the input only.",
    ),
    Form("masked_select", "masked_select()", "Keep the shape: `torch.where(mask, x, 0)`."),
    Form(
        "unique",
        "unique()",
        "Compute it on the host before the copy, or sort on the device and compare neighbours.",
    ),
    Form("repeat_interleave", "repeat_interleave(n)", "Pass `output_size=`."),
    Form(
        "bincount",
        "bincount()",
        "Use `torch.zeros(n, device=x.device).scatter_add_(0, x, …)` with a known n.",
    ),
    Form("histc", "histc()", "Pass `min=` and `max=`."),
    Form("one_hot", "one_hot()", "Pass `num_classes=`."),
    Form(
        "equal", "torch.equal(), allclose()", "Use `.eq().all()` and keep the result on the device."
    ),
    Form("range", "range(t), arange(t)", "Pass a Python number: keep it on the host."),
    Form("size", "a tensor as a size or a number", "Pass a Python number: keep it on the host."),
    Form(
        "masked_fill",
        "masked_fill(mask, t)",
        "Pass a Python number, or write `torch.where(mask, t, x)`.",
    ),
    Form(
        "linalg",
        "a factorisation that checks its input",
        "Use the `_ex` function, such as `torch.linalg.cholesky_ex`.",
    ),
    Form(
        "decomposition",
        "a decomposition that checks its result",
        "It has no version that does not wait: compute it every few steps.",
    ),
    Form("distribution", "a distribution that checks its arguments", "Pass `validate_args=False`."),
    Form(
        "normal", "torch.normal(), Normal.sample()", "Write `mean + std * torch.randn_like(std)`."
    ),
    Form("sparse", "to_sparse(), coalesce()", "Build the sparse tensor from known indices."),
    Form(
        "clip_grad_norm_",
        "clip_grad_norm_(error_if_nonfinite=True)",
        "Leave `error_if_nonfinite` out, and look at the norm every 50 steps.",
    ),
    Form(
        "causal mask",
        "a mask given to nn.Transformer",
        "Pass `is_causal=` (`tgt_is_causal=`): without it PyTorch reads the mask back to see "
        "whether it is causal.",
    ),
    Form(
        "grad scaler",
        "GradScaler",
        "Use a fused optimizer (`fused=True`): it keeps `found_inf` on the device. bf16 needs no "
        "scaler.",
    ),
    Form(
        "scale",
        "GradScaler.get_scale()",
        "It copies the scale to the host: call it every 50 steps.",
    ),
    Form(
        "lbfgs",
        "LBFGS",
        "It reads values back in each iteration: lower `history_size` and `max_iter`, or use "
        "another optimizer.",
    ),
    Form("save", "torch.save", "Save less often, or clone on the device and write from a thread."),
    Form(
        "device synchronize",
        "torch.cuda.synchronize()",
        "Remove it. To measure time, record events and read them later.",
    ),
    Form(
        "stream synchronize",
        "stream.synchronize()",
        "Let the stream that needs the result wait: `stream.wait_stream(…)`.",
    ),
    Form(
        "event synchronize",
        "event.synchronize()",
        "Let a stream wait: `stream.wait_event(event)`; or ask `event.query()`.",
    ),
    Form(
        "empty_cache",
        "torch.cuda.empty_cache()",
        "Remove it: the next step allocates the same memory again.",
    ),
    Form("barrier", "barrier()", "Collectives already order the ranks: remove it."),
    Form(
        "progress bar",
        "a progress bar or logger",
        "Log every 50 steps (in the Trainer of Hugging Face: `logging_steps=50`). To Lightning's "
        "`self.log`, pass tensors, without `prog_bar=True`.",
    ),
    Form(
        "metric",
        "a metric of TorchMetrics that checks its input",
        "Pass `validate_args=False` to the metric, or `nan_strategy='disable'` to one such as "
        "`MeanMetric`.",
    ),
    Form(
        "nan filter",
        "the Trainer's test for NaN",
        "Pass `logging_nan_inf_filter=False` to `TrainingArguments`.",
    ),
    Form(
        "in backward",
        "an operation in backward",
        "A mask or an index in the forward pass makes its backward wait: replace it there.",
    ),
    Form(
        "anomaly detection",
        "torch.autograd.set_detect_anomaly(True)",
        "Turn it off unless you look for a NaN: it reads every gradient back to test it.",
    ),
    Form(
        "headrace",
        "a wait of Headrace's",
        "It waits where the plan says: to limit how far the host is ahead, for losses or for a "
        "copy. `result.waits.table()` shows the reasons, `headrace plan` which plans wait less.",
    ),
    Form(
        "inside PyTorch",
        "a function of PyTorch",
        "The line calls it, and it reads a value back: look for an argument that avoids it, or "
        "call it less often.",
    ),
    Form(
        "other",
        "another operation",
        "An operation in this line needs a value on the host: keep the value on the device, or "
        "read it every 50 steps.",
    ),
)
FORMS = {form.name: form for form in _FORMS}

#: By function of PyTorch on the way from the line to the wait: (file's stem or "", function).
_FUNCTIONS = {
    ("clip_grad", ""): "clip_grad_norm_",
    ("grad_scaler", ""): "grad scaler",
    ("grad_scaler", "get_scale"): "scale",
    ("lbfgs", ""): "lbfgs",
    ("", "__format__"): "format",
    ("_tensor_str", ""): "print",
    ("", "__repr__"): "print",
    ("serialization", ""): "save",
    ("distribution", ""): "distribution",
    ("utils", "broadcast_all"): "new tensor",  # of a distribution with a Python number
    ("comm", "scatter"): "scatter",
    ("", "barrier"): "barrier",
    ("", "_detect_is_causal_mask"): "causal mask",
    ("normal", "sample"): "normal",
    ("_convert_np", ""): "progress bar",  # of SummaryWriter
}
#: By the function or method that the line calls.
_CALLS = {
    **dict.fromkeys(("float", "int", "complex"), "number"),
    "bool": "branch",
    "is_nonzero": "branch",
    **dict.fromkeys(("print", "str", "repr"), "print"),
    "format": "format",
    **dict.fromkeys(("filter", "filterfalse", "takewhile", "dropwhile", "truth"), "branch"),
    "iter": "compare",  # `for x in iter(function, value)`
    **dict.fromkeys(("debug", "info", "warning", "error", "log"), "format"),  # of a logger
    **dict.fromkeys(("max", "min", "sorted", "sort", "index", "any", "all"), "compare"),
    **dict.fromkeys(("count", "remove", "nlargest", "nsmallest"), "compare"),
    **dict.fromkeys(("heappush", "heappop", "heappushpop", "heapreplace", "heapify"), "compare"),
    **dict.fromkeys(("bisect", "bisect_left", "bisect_right", "insort", "median"), "compare"),
    **dict.fromkeys(("numpy", "asarray", "array"), "numpy"),
    **dict.fromkeys(("tensor", "as_tensor", "new_tensor", "from_numpy"), "new tensor"),
    **dict.fromkeys(("Tensor", "FloatTensor", "HalfTensor", "DoubleTensor"), "new tensor"),
    **dict.fromkeys(("LongTensor", "IntTensor", "ByteTensor", "BoolTensor"), "new tensor"),
    **dict.fromkeys(("to", "cuda", "type"), "to"),
    **dict.fromkeys(("copy_", "_foreach_copy_"), "pageable copy"),
    **dict.fromkeys(("nonzero", "argwhere", "where", "flatnonzero"), "nonzero"),
    **dict.fromkeys(("unique", "unique_consecutive"), "unique"),
    **dict.fromkeys(("equal", "allclose"), "equal"),
    **dict.fromkeys(("range", "arange"), "range"),
    **dict.fromkeys(("zeros", "ones", "empty", "full", "rand", "randn", "linspace"), "size"),
    **dict.fromkeys(("eye", "randint", "randperm", "full_like"), "size"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), "size"),
    **dict.fromkeys(("view", "reshape", "expand", "repeat", "narrow", "split", "topk"), "size"),
    **dict.fromkeys(("chunk", "roll", "unsqueeze", "clamp", "clamp_"), "size"),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "addcmul", "addcdiv"), "size"),
    **dict.fromkeys(("index_fill", "index_fill_"), "size"),
    **dict.fromkeys(("masked_fill", "masked_fill_"), "masked_fill"),
    **dict.fromkeys(("cholesky", "inv", "inverse", "solve", "lu_factor", "ldl_factor"), "linalg"),
    **dict.fromkeys(("eigh", "svd", "eig", "lu", "eigvals", "eigvalsh"), "decomposition"),
    **dict.fromkeys(("matrix_rank", "pinv", "pinverse", "lstsq", "matrix_exp"), "decomposition"),
    **dict.fromkeys(("Normal", "Categorical", "Bernoulli", "log_prob"), "distribution"),
    "synchronize": "stream synchronize",  # of those, PyTorch reports streams only
    "normal": "normal",
    **dict.fromkeys(("to_sparse", "to_sparse_csr", "coalesce"), "sparse"),
    "save": "save",
    "clip_grad_norm_": "clip_grad_norm_",
    "barrier": "barrier",
    "backward": "in backward",
    "grad": "in backward",
    "__setitem__": "mask assignment",
    **{name: name for name in ("item", "tolist", "cpu", "masked_select", "repeat_interleave")},
    **{name: name for name in ("bincount", "histc", "one_hot", "empty_cache", "combinations")},
}
#: By the operation, where the device names it.
_OPERATIONS = {
    "torch.cuda.synchronize": "device synchronize",
    "Stream.synchronize": "stream synchronize",
    "Event.synchronize": "event synchronize",
    "torch.cuda.empty_cache": "empty_cache",
    "copy from pageable memory": "pageable copy",
    "copy of a strided view": "strided copy",
    "copy to pageable memory": "cpu",
    "blocking copy": "pinned copy",
    "index from host memory": "index",
    "aten::_local_scalar_dense": "item",
    "aten::is_nonzero": "branch",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::index": "mask",
    "aten::index_put_": "mask assignment",
    "aten::_index_put_impl_": "mask assignment",
    "aten::equal": "equal",
    "aten::bincount": "bincount",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::repeat_interleave": "repeat_interleave",
    "aten::_linalg_check_errors": "linalg",
    "aten::_to_sparse": "sparse",
    "aten::_coalesce": "sparse",
    "aten::normal": "normal",
    **dict.fromkeys(("aten::_linalg_svd", "aten::_linalg_eigh"), "decomposition"),
    **dict.fromkeys(("aten::linalg_eig", "aten::_linalg_eigvals"), "decomposition"),
    "tolist": "tolist",
    "repr": "print",
    "format": "format",
    "pickle": "save",
    "barrier": "barrier",
}
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
_INDEXING = ("mask", "mask assignment", "index assignment")
#: Operators that other functions use, too: `torch.cov` tests its input with `equal`.
_READS_VALUE = ("aten::_local_scalar_dense", "aten::equal")
#: What waits for an index, not for what it selects.
_READS_INDEX = ("aten::_local_scalar_dense", "index from host memory")
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
    if operation in ("torch.cuda.synchronize", "Stream.synchronize", "Event.synchronize"):
        return FORMS[_OPERATIONS[operation]]
    for stem, function in functions:
        for key in ((stem, function), (stem, ""), ("", function)):
            if key in _FUNCTIONS:
                return FORMS[_in_logger(_FUNCTIONS[key], libraries)]
    found = expression.form() if expression is not None else None
    if found in ("to", "pageable copy", "new tensor") and operation == "copy to pageable memory":
        found = "cpu"
    elif found == "pageable copy" and operation in ("", "blocking copy") and expression:
        if expression.on_device is False:
            found = "cpu"  # `host.copy_(x)`
        elif expression.is_pinned or operation:
            found = "pinned copy"
    elif found == "to" and operation == "blocking copy":
        found = "pinned copy"
    elif found in ("to", "pinned copy", "pageable copy") and operation == "copy of a strided view":
        found = "strided copy"
    elif found in _INDEXING and operation in _READS_INDEX:
        found = "index"
    elif found == "new tensor" and operation == "aten::_local_scalar_dense":
        found = "list of tensors"
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
        if found == "to" and self.is_pinned:
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


class Instruction(NamedTuple):
    """Where a line was: the offset of the instruction that computes what it waits for, and whether
    that value is being tested."""

    offset: int
    is_tested: bool


@lru_cache(maxsize=4096)
def waiting_instruction(code: CodeType, offset: int) -> Instruction:
    """The instruction at an offset; if it tests a value, the one before it, which has computed the
    value. Python 3.11 gives the tests of `a or b` the place of `a`, or of the whole statement."""
    content = code.co_code
    if content[offset] == _COMPARE and content[offset + 1] & _AND_TEST:
        return Instruction(offset, is_tested=True)
    if content[offset] not in _TESTING:
        return Instruction(offset, is_tested=False)
    before = offset - 2
    while before > 0 and content[before] in _BETWEEN:
        before -= 2
    return Instruction(before, is_tested=True)


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
def running_expression(code: CodeType, instruction: Instruction) -> Expression | None:
    """What an instruction computes; None if there is no source, or Python keeps no positions."""
    place = next(islice(code.co_positions(), instruction.offset // 2, None), None)
    if place is None or None in place:
        return None
    line, end_line, column, end_column = place
    found = _nodes(code.co_filename).get((line, end_line, column, end_column))  # type: ignore[arg-type]
    return None if found is None else Expression(*found, is_tested=instruction.is_tested)
