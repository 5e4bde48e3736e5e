"""No cycles between files, one file names `torch.cuda`, no host wait hides outside the seam,
and tensors name their device.

The order of the rooms and their faces are import-linter's (pyproject.toml, `make check`). Files,
classes and methods that CONTRIBUTING.md names are there.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import headrace
from support.paths import ROOT

PACKAGE = Path(headrace.__file__).parent


def modules() -> list[tuple[str, Path]]:
    """(top-level name, file) of every module but the package's own `__init__`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative != Path("__init__.py"):
            found.append((relative.parts[0].removesuffix(".py"), path))
    return found


def test_no_cycles_between_files() -> None:
    edges: dict[str, set[str]] = {}
    for _, path in modules():
        name = ".".join(("headrace", *path.relative_to(PACKAGE).with_suffix("").parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        edges[name.removesuffix(".__init__")] = {
            target
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module is not None
            # `from package import module` is an import of the module.
            for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }
    for targets in edges.values():
        for package in {target.rpartition(".")[0] for target in targets if target in edges}:
            targets.discard(package)
    seen: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in edges and name not in seen:
            for target in edges[name]:
                visit(target, (*trail, name))
            seen.add(name)

    for name in edges:
        visit(name, ())


def test_only_one_file_names_torch_cuda() -> None:
    naming = [
        path.relative_to(PACKAGE).as_posix()
        for _, path in modules()
        if any(
            isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    imitation = ["fake/cuda/namespace.py", "fake/cuda/streams.py", "fake/graphs.py"]
    assert naming == ["device/cuda.py", *imitation]


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for file in re.findall(r"`([\w/]+/\w+\.py)`", text):
        assert any((folder / file).is_file() for folder in (PACKAGE, ROOT)), file
    methods: dict[str, set[str]] = {}
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
                methods.setdefault(node.name, set()).update(own)
    for name, method in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", text):
        assert name in methods, name
        assert not method or method in methods[name], f"{name}.{method}"


# Fields of PyTorch's and NumPy's objects.
TENSOR_FIELDS = {"grad", "data", "state", "_warned_capturable_if_run_uncaptured"}
GRAPH_PATH = ["capture/*.py", *(f"engine/{name}.py" for name in ("step", "group", "update"))]
GRAPH_PATH += [
    f"engine/{name}.py" for name in ("step_graphs", "graphed_function", "halving", "ladder")
]
GRAPH_PATH += ["engine/graph_*.py", "engine/carry.py", "engine/build.py"]


def foreign_fields(code: str) -> list[str]:
    """Fields that some code assigns to, of objects whose class is defined elsewhere."""
    nodes = list(ast.walk(ast.parse(code)))
    assigned = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and ast.unparse(node.value) != "ctx"  # of an autograd function, for its own values
    ]
    own = {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own |= {node.attr for node in assigned if ast.unparse(node.value) == "self"}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}  # properties
    return [ast.unparse(node) for node in assigned if node.attr not in own | TENSOR_FIELDS]


def test_no_stage_writes_anothers_fields_on_the_graph_path() -> None:
    paths = [path for pattern in GRAPH_PATH for path in PACKAGE.glob(pattern)]
    assert len(paths) > 25
    for path in paths:
        found = foreign_fields(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("self.a = 1", []),
        ("group.phase = 1", ["group.phase"]),
        ("self.parts.update.rates = None", ["self.parts.update.rates"]),
        ("group.count += 1", ["group.count"]),
        ("a, group.count = 1, 2", ["group.count"]),
        ("del group.count", ["group.count"]),
        ("parameter.grad = None", []),
    ],
)
def test_what_a_foreign_field_is(code: str, found: list[str]) -> None:
    assert foreign_fields(code) == found


def test_one_place_runs_forward_and_backward() -> None:
    """Of a batch: `EagerStep`."""
    calling = {
        path.name
        for path in PACKAGE.glob("engine/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parts.backward")
    }
    assert calling == {"step.py"}


def is_host_wait(call: ast.Call) -> bool:
    """Whether it reads from the device or waits for it; the seam's own waits have a reason."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    if name == "synchronize":
        reason = call.args[0] if call.args else None
        has_reason = isinstance(reason, ast.Constant) or ast.unparse(call).endswith("(reason)")
        return not has_reason and not owner.startswith("self")
    return name in ("item", "cpu", "tolist") and not call.args and owner != "self.device"


def test_host_waits_only_in_the_seam_and_the_ledger() -> None:
    for name, path in modules():
        if name in ("device", "fake", "races"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            waits = isinstance(node, ast.Call) and is_host_wait(node)
            assert not waits, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_what_is_made_names_its_device() -> None:
    """Else it is made on the default device, which may be a GPU (`torch.set_default_device`)."""
    makers = {maker.__name__ for maker in _device_constructors()} | {"Generator"}
    for _, path in modules():
        if path.name == "model.py":  # a model is made on the default device, as any module is
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                makes = ast.unparse(node.func.value) == "torch" and node.func.attr in makers
                named = {keyword.arg for keyword in node.keywords} & {"device", None}
                assert named or not makes, f"{path}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("loss.item()", True),
        ("x.grad.tolist()", True),
        ("stream.synchronize()", True),
        ("device.synchronize('bench')", False),
        ("print('without .item()')", False),
    ],
)
def test_what_a_host_wait_is(code: str, waits: bool) -> None:
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert any(map(is_host_wait, calls)) is waits
