"""Code that makes the host wait, in every form, alone and nested.

Each form is one line, put into functions of a module that is written to a file: the line must be
found, in whichever way it is reached. The table serves the fake device and CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HEADER = """\
import array, asyncio, contextlib, copy, functools, heapq, io, itertools, logging, math
import operator, random, struct, threading
import torch
from torch.cuda import synchronize
from torch.nn import functional as F


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper


LOG = logging.Logger("waits")
LOG.addHandler(logging.StreamHandler(io.StringIO()))
"""

#: The form's name in `diagnosis.forms`, and the code.
FORMS = [
    ("item", "a.loss.item()"),
    ("item", "max(a.loss.item(), math.isnan(0.0))"),
    ("item", "total = 0.0; total += a.loss.item()"),
    ("number", "float(a.loss)"),
    ("number", "int(a.n)"),
    ("number", "math.sqrt(a.loss)"),
    ("number", "list(map(float, a.x))"),
    ("number", "[*map(int, a.x)]"),
    ("number", "for _ in map(float, a.x): break"),
    ("number", "struct.pack('f', a.loss)"),
    ("number", "array.array('f', [a.loss])"),
    ("branch", "list(filter(None, a.x))"),
    ("branch", "next(filter(None, a.x))"),
    ("branch", "list(itertools.takewhile(bool, a.x))"),
    ("branch", "operator.truth(a.loss)"),
    ("branch", "bool(a.loss)"),
    ("branch", "if a.loss > 0: pass"),
    ("branch", "while a.loss < 0: pass"),
    ("branch", "assert a.loss == a.loss"),
    ("branch", "1 if a.loss > 0 else 0"),
    ("branch", "a.loss and 1"),
    ("branch", "not a.loss"),
    ("branch", "0 < a.loss < 9"),
    ("branch", "[x for x in a.x if x > 0]"),
    ("finite check", "if torch.isnan(a.loss): pass"),
    ("finite check", "if a.x.isinf().any(): pass"),
    ("finite check", "torch.isfinite(a.x).all().item()"),
    ("finite check", "math.isnan(a.loss)"),
    ("finite check", "if a.loss is not None and a.loss.isnan(): pass"),
    ("finite check", "[1 for _ in range(2) if a.loss.isnan()]"),
    ("finite check", "math.isfinite(a.loss.item())"),
    ("finite check", "bool(a.x.isfinite().all())"),
    ("finite check", "any(x.isnan() for x in a.x)"),
    ("print", "print(a.loss, file=io.StringIO())"),
    ("print", "str(a.x)"),
    ("print", "repr(a.x)"),
    ("format", "f'{a.loss:.3f}'"),
    ("format", "'{:.3f}'.format(a.loss)"),
    ("format", "'%.3f' % a.loss"),
    ("format", "('%s ' * 2 + '%.3f') % (1, 2, *a.x[:1])"),
    ("format", "LOG.info('loss %.3f', a.loss)"),
    ("tolist", "a.x.tolist()"),
    ("cpu", "a.x.cpu()"),
    ("cpu", "a.x.to('cpu')"),
    ("cpu", "a.x.detach().to(device='cpu')"),
    ("cpu", "a.x.cpu().numpy()"),
    ("cpu", "torch.as_tensor(a.x, device='cpu')"),
    ("cpu", "torch.asarray(a.x, device='cpu')"),
    ("cpu", "a.host.copy_(a.x)"),
    ("cpu", "a.host.copy_(a.x, non_blocking=True)"),
    ("to", "a.host.to(a.device)"),
    ("to", "a.host.cuda()"),
    ("pinned copy", "a.pinned.to(a.device)"),
    ("pinned copy", "a.x.copy_(a.pinned)"),
    ("strided copy", "a.pinned[::2].to(a.device, non_blocking=True)"),
    ("cpu", "a.pinned.copy_(a.x)"),
    ("to", "a.host.to(a.device, non_blocking=True)"),
    ("pageable copy", "a.x.copy_(a.host)"),
    ("pageable copy", "torch._foreach_copy_([a.x], [a.host], non_blocking=True)"),
    ("made on the host", "torch.zeros(3).double().to(a.device)"),
    ("made on the host", "torch.tensor([1.0]).cuda()"),
    ("new tensor", "torch.tensor([1.0, 2.0], device=a.device)"),
    ("new tensor", "torch.cuda.FloatTensor([1.0, 2.0])"),
    ("new tensor", "torch.as_tensor([1.0], device=a.device)"),
    ("new tensor", "a.x.new_tensor([1.0, 2.0])"),
    ("new tensor", "torch.asarray([1.0], device=a.device)"),
    ("new tensor", "torch.distributions.Normal(a.x, 1.0, validate_args=False)"),
    ("scatter", "a.parallel(a.host)"),
    ("list of tensors", "torch.tensor([a.loss, a.loss])"),
    ("list of tensors", "torch.as_tensor(a.losses)"),
    ("mask", "a.x[a.mask]"),
    ("index", "a.x[a.host_index]"),
    ("index", "a.x[a.n]"),
    ("index", "[0, 1, 2][a.n]"),
    ("mask assignment", "a.x[a.mask] = a.three"),
    ("index assignment", "a.x[a.i] = -1.0"),
    ("index assignment", "a.x[a.i[:2]] = 0"),
    ("index", "a.x[a.n] = 1.0"),
    ("slice", "a.x[: a.n]"),
    ("nonzero", "a.x.nonzero()"),
    ("nonzero", "torch.argwhere(a.x)"),
    ("nonzero", "torch.where(a.mask)"),
    ("masked_select", "a.x.masked_select(a.mask)"),
    ("unique", "a.i.unique()"),
    ("unique", "torch.unique(a.i, return_counts=True)"),
    ("unique", "torch.unique(a.matrix, dim=0)"),
    ("unique", "a.matrix.unique(dim=0)"),
    ("unique", "a.i.unique_consecutive()"),
    ("repeat_interleave", "a.x.repeat_interleave(a.i)"),
    ("bincount", "a.i.bincount()"),
    ("histc", "a.x.histc(4)"),
    ("one_hot", "F.one_hot(a.i)"),
    ("equal", "torch.equal(a.x, a.y)"),
    ("equal", "torch.allclose(a.x, a.x)"),
    ("range", "range(a.n)"),
    ("range", "torch.arange(a.n)"),
    ("combinations", "torch.combinations(a.i)"),
    ("size", "torch.zeros(a.n)"),
    ("size", "a.x.view(a.n, -1)"),
    ("size", "torch.full_like(a.x, a.loss)"),
    ("size", "torch.randint(a.n, (2,))"),
    ("size", "a.x.add(a.x, alpha=a.loss)"),
    ("size", "a.x.index_fill(0, a.i, a.loss)"),
    ("size", "[0] * a.n"),
    ("masked_fill", "a.x.masked_fill(a.mask, a.loss)"),
    ("numpy", "a.x.numpy(force=True)"),
    ("normal", "torch.normal(a.x, a.x.abs())"),
    ("normal", "torch.distributions.Normal(a.x, a.y.abs(), validate_args=False).sample()"),
    ("decomposition", "torch.linalg.eigh(a.matrix)"),
    ("decomposition", "torch.linalg.lstsq(a.matrix, a.matrix)"),
    ("decomposition", "torch.linalg.pinv(a.matrix)"),
    ("compare", "max(a.x[0], a.x[1])"),
    ("compare", "a.loss in [a.n, a.loss]"),
    ("compare", "[a.loss] == [a.y[0]]"),
    ("compare", "[a.loss].count(a.y[0])"),
    ("compare", "for _ in iter(lambda: a.mask[0], True): break"),
    ("other", "random.choices('abcd', weights=a.x.abs())"),
    ("compare", "heapq.nlargest(1, list(a.x))"),
    ("compare", "heapq.heappushpop([a.x[0]], a.x[1])"),
    ("linalg", "torch.linalg.cholesky(a.matrix)"),
    ("linalg", "torch.linalg.inv(a.matrix)"),
    ("distribution", "torch.distributions.Normal(a.x, a.x.abs() + 1, validate_args=True)"),
    ("sparse", "a.x.to_sparse()"),
    ("sparse", "(a.sparse + a.sparse).coalesce()"),
    ("inside PyTorch", "F.ctc_loss(a.speech, a.i[None] + 1, a.n[None], a.n[None])"),
    ("save", "torch.save(a.x, io.BytesIO())"),
    ("clip_grad_norm_", "torch.nn.utils.clip_grad_norm_([a.w], 1.0, error_if_nonfinite=True)"),
    ("device synchronize", "torch.cuda.synchronize()"),
    ("device synchronize", "synchronize()"),
    ("device synchronize", "torch.accelerator.synchronize()"),
    ("stream synchronize", "torch.cuda.current_stream().synchronize()"),
    ("stream synchronize", "torch.accelerator.current_stream().synchronize()"),
    ("event synchronize", "a.event.synchronize()"),
    ("event synchronize", "a.generic_event.synchronize()"),
    ("empty_cache", "torch.cuda.empty_cache()"),
]
NESTINGS = (
    *("alone", "function", "decorator", "comprehension", "thread", "backward hook"),
    *("generator", "lambda", "coroutine", "context manager", "property", "missing attribute"),
    *("key of sorted", "partial", "map", "forward hook", "custom backward", "over several lines"),
)
#: Nestings that hold an expression only.
_EXPRESSIONS = ("comprehension", "lambda", "over several lines")
_STATEMENTS = (
    "if ",
    "for ",
    "while ",
    "assert ",
    "total ",
    "a.x[a.mask] =",
    "a.x[a.i",
    "a.x[a.n] =",
)


@dataclass(frozen=True)
class Case:
    """`function` of the module waits at `line`."""

    form: str
    code: str
    nesting: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.code} ({self.nesting})"


class Inputs:
    """What the code uses."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cuda")
        self.x = torch.tensor([0.5, 1.5, -2.0, 3.0], device="cpu").to(self.device)
        self.y = self.x + 0  # a tensor equals itself without a look at its values
        self.loss = self.x.sum()
        self.losses = [self.loss, self.loss]
        self.n = torch.tensor(2).to(self.device)
        self.i = torch.tensor([0, 1, 2, 2]).to(self.device)
        self.mask = torch.tensor([True, False, True, True]).to(self.device)
        self.three = torch.ones(3).to(self.device)
        self.matrix = (torch.eye(4) * 3 + 0.5).to(self.device)
        self.host = torch.ones(4)
        self.host_index = torch.tensor([0, 2])
        self.pinned = torch.ones(4).pin_memory()
        self.w = torch.ones(4).to(self.device).requires_grad_()
        self.w.grad = torch.ones_like(self.w)
        self.event, self.generic_event = torch.cuda.Event(), torch.Event("cuda")
        self.event.record()
        self.generic_event.record()
        self.parallel = torch.nn.DataParallel(torch.nn.Identity(), [0])
        self.sparse = torch.sparse_coo_tensor(self.i[None], self.x, (4,), check_invariants=False)
        self.speech = torch.zeros(4, 1, 4).log_softmax(2).to(self.device)


def _nested(name: str, code: str, nesting: str) -> tuple[list[str], int]:
    """The text of a function, and the number of the waiting line in it, from 0."""
    inner = [f"def {name}_inner(a):", f"    {code}"]
    if nesting == "alone":
        return [f"def {name}(a):", f"    {code}"], 1
    if nesting == "function":
        return [
            *inner,
            f"def {name}(a):",
            "    def again():",
            f"        {name}_inner(a)",
            "    again()",
        ], 1
    if nesting == "decorator":
        return ["@decorated", f"def {name}(a):", f"    {code}"], 2
    if nesting == "comprehension":
        return [
            f"def {name}(a):",
            "    return [",
            f"        {code}",
            "        for _ in range(2)",
            "    ]",
        ], 2
    if nesting == "thread":
        lines = [
            f"    thread = threading.Thread(target={name}_inner, args=(a,))",
            "    thread.start()",
        ]
        return [*inner, f"def {name}(a):", *lines, "    thread.join()"], 1
    if nesting == "backward hook":
        lines = ["    y = (a.w * 2).sum()", f"    y.register_hook(lambda grad: {name}_inner(a))"]
        return [*inner, f"def {name}(a):", *lines, "    y.backward()"], 1
    if nesting == "generator":
        lines = [f"def {name}_items(a):", f"    {code}", "    yield 1"]
        return [*lines, f"def {name}(a):", f"    return list({name}_items(a))"], 1
    if nesting == "lambda":
        return [
            f"def {name}(a):",
            "    read = lambda: (",
            f"        {code}",
            "    )",
            "    read()",
        ], 2
    if nesting == "coroutine":
        lines = [f"async def {name}_inner(a):", f"    {code}"]
        return [*lines, f"def {name}(a):", f"    asyncio.run({name}_inner(a))"], 1
    if nesting == "context manager":
        lines = ["@contextlib.contextmanager", f"def {name}_block(a):", f"    {code}", "    yield"]
        return [*lines, f"def {name}(a):", f"    with {name}_block(a):", "        pass"], 2
    if nesting == "property":
        lines = [f"class {name}_Owner:", "    a = None", "    @property", "    def value(self):"]
        lines += ["        a = self.a", f"        {code}", f"def {name}(a):"]
        return [*lines, f"    owner = {name}_Owner()", "    owner.a = a", "    owner.value"], 5
    if nesting == "missing attribute":
        lines = [f"class {name}_Owner:", "    a = None", "    def __getattr__(self, name):"]
        lines += ["        a = self.a", f"        {code}", f"def {name}(a):"]
        return [*lines, f"    owner = {name}_Owner()", "    owner.a = a", "    owner.value"], 4
    if nesting == "key of sorted":
        lines = [f"    return sorted([2, 1], key=lambda one: ({name}_inner(a), one)[1])"]
        return [*inner, f"def {name}(a):", *lines], 1
    if nesting == "partial":
        return [*inner, f"def {name}(a):", f"    functools.partial({name}_inner, a)()"], 1
    if nesting == "map":
        return [*inner, f"def {name}(a):", f"    list(map({name}_inner, [a]))"], 1
    if nesting == "forward hook":
        lines = ["    layer = torch.nn.Identity()"]
        lines += [f"    layer.register_forward_hook(lambda *_: {name}_inner(a))", "    layer(a.x)"]
        return [*inner, f"def {name}(a):", *lines], 1
    if nesting == "custom backward":
        lines = [f"class {name}_Function(torch.autograd.Function):", "    @staticmethod"]
        lines += ["    def forward(ctx, x, a):", "        ctx.a = a", "        return x * 2"]
        lines += ["    @staticmethod", "    def backward(ctx, grad):", "        a = ctx.a"]
        lines += [f"        {code}", "        return grad, None", f"def {name}(a):"]
        return [*lines, f"    {name}_Function.apply(a.w, a).sum().backward()"], 8
    assert nesting == "over several lines"
    return [
        f"def {name}(a):",
        "    x = [",
        "        1,",
        f"        {code},",
        "        2,",
        "    ]",
    ], 3


def write_module(path: Path) -> tuple[ModuleType, list[Case]]:
    """Write the module, and load it."""
    cases = []
    lines = HEADER.splitlines()
    for number, (form, code) in enumerate(FORMS):
        for nesting in NESTINGS:
            if nesting in _EXPRESSIONS and code.startswith(_STATEMENTS):
                continue
            function = f"case_{number}_{nesting.replace(' ', '_')}"
            text, at = _nested(function, code, nesting)
            cases.append(Case(form, code, nesting, function, len(lines) + 2 + at + 1))
            lines += ["", "", *text]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, cases


#: Lines that do not make the host wait.
SILENT = """
a.x + 1
a.x * a.loss
a.x[1:3]
a.x[a.i]
torch.where(a.mask, a.x, -a.x)
a.pinned.to(a.device, non_blocking=True)
a.pinned[:2].to(a.device, non_blocking=True)
a.x.clone()
torch.zeros(3, device=a.device)
a.x.isnan().any()
F.one_hot(a.i, num_classes=3)
torch.nn.utils.clip_grad_norm_([a.w], 1.0)
torch.cuda.current_stream().wait_event(a.event)
a.generic_event.wait()
a.x.to('cpu', non_blocking=True)
torch.as_tensor(a.x)
copy.copy(a.x)
copy.deepcopy(a.x)
a.x.clamp(max=a.loss)
a.x.fill_(a.loss)
a.x[a.mask] = 0.0
a.x[a.i] = a.y
torch.cuda.FloatTensor(2, 3).fill_(1.0)
a.x.histc(4, 0, 1)
torch.multinomial(a.x.abs(), 2)
a.parallel(a.x)
[a.loss] == [a.loss]
""".strip().splitlines()


def silent_functions(path: Path) -> Iterator[tuple[str, object]]:
    text = [f"def silent_{number}(a): {code}" for number, code in enumerate(SILENT)]
    scope: dict[str, object] = {}
    path.write_text("\n".join(text), encoding="utf-8")
    exec(compile(HEADER + "\n".join(text), str(path), "exec"), scope)
    for number, code in enumerate(SILENT):
        yield code, scope[f"silent_{number}"]
