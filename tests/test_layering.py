"""No cycles between files, one seam to `torch.cuda`, no host wait hides outside the seam, tensors
name their device, and nobody writes another's fields.

The order of the packages and what they export are import-linter's (pyproject.toml, `make check`).
Files, classes and methods that CONTRIBUTING.md and docs/architecture.md name are there.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import headrace
from support.house_rules import (
    FIELDS_OF_LIBRARIES,
    FIELDS_OF_OTHERS,
    LONG,
    SET_AGAIN,
)
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


def names_torch_cuda(node: ast.AST) -> bool:
    """Whether it leads to `torch.cuda`, by its name or as the module of a device."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("torch.cuda", "torch.get_device_module")
    if isinstance(node, ast.ImportFrom):
        cuda = node.module == "torch" and any(alias.name == "cuda" for alias in node.names)
        return cuda or f"{node.module}.".startswith("torch.cuda.")
    return isinstance(node, ast.Import) and any("torch.cuda" in a.name for a in node.names)


def test_one_seam_to_torch_cuda() -> None:
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for _, path in modules()
        if any(map(names_torch_cuda, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    seam = {"device/cuda.py", "device/cuda_graphs.py", "device/accelerator.py", "device/opening.py"}
    emulation = {file for file in naming if file.startswith("fake/cuda/")}
    assert naming - emulation == seam


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("torch.cuda.Stream()", True),
        ("torch.get_device_module('cuda')", True),
        ("from torch import cuda", True),
        ("from torch.cuda import Stream", True),
        ("import torch.cuda.graphs", True),
        ("cuda_namespace().Stream", False),
    ],
)
def test_what_names_torch_cuda(code: str, names: bool) -> None:
    assert any(map(names_torch_cuda, ast.walk(ast.parse(code)))) is names


def test_what_the_pages_for_contributors_name_is_there() -> None:
    pages = ("CONTRIBUTING.md", "docs/architecture.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    for file in re.findall(r"`([\w/]+/\w+\.py)`", text):
        assert any((folder / file).is_file() for folder in (PACKAGE, ROOT)), file
    methods: dict[str, set[str]] = {}
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
                methods.setdefault(node.name, set()).update(own)
    for name, method in re.findall(r"`([A-Z][a-z]\w+)(?:\.(\w+))?`", text):
        assert name in methods, name
        assert not method or method in methods[name], f"{name}.{method}"


# Fields of PyTorch's and NumPy's objects.
TENSOR_FIELDS = {"grad", "data", "state", "_warned_capturable_if_run_uncaptured"}


def foreign_fields(code: str) -> set[str]:
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
    return {ast.unparse(node) for node in assigned if node.attr not in own | TENSOR_FIELDS}


def test_no_module_writes_anothers_fields() -> None:
    written = {
        path.relative_to(PACKAGE).as_posix(): foreign_fields(path.read_text(encoding="utf-8"))
        for _, path in modules()
    }
    found = {file: fields for file, fields in written.items() if fields}
    libraries = {file: set(fields) for file, fields in FIELDS_OF_LIBRARIES.items()}
    assert found.keys() >= libraries.keys(), "remove what is no longer written from the table"
    ours = {file: fields - libraries.get(file, set()) for file, fields in found.items()}
    expected = {file: set(fields) for file, fields in FIELDS_OF_OTHERS.items()}
    assert {file: fields for file, fields in ours.items() if fields} == expected, (
        "give the object a method that sets its field; the table only shrinks"
    )


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
    assert foreign_fields(code) == set(found)


def classes() -> list[tuple[str, ast.ClassDef]]:
    """(file, class) of every class."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def test_a_class_name_means_one_thing() -> None:
    files: dict[str, list[str]] = {}
    for file, node in classes():
        if not file.startswith("fake/cuda/"):  # whose classes have the names of PyTorch's
            files.setdefault(node.name, []).append(file)
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice


def set_again(node: ast.ClassDef) -> set[str]:
    """The fields that methods set, but for the constructor."""
    return {
        inner.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and method.name not in ("__init__", "__post_init__", "__new__")
        for inner in ast.walk(method)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and ast.unparse(inner.value) == "self"
    }


def test_few_fields_of_an_object_are_set_again() -> None:
    counts = {f"{file}: {node.name}": len(set_again(node)) for file, node in classes()}
    many = {name: count for name, count in counts.items() if count > 8}
    assert many.keys() == SET_AGAIN.keys(), "at most 8; the table only shrinks"
    for name, count in many.items():
        assert count <= SET_AGAIN[name], f"{name}: {count}, was {SET_AGAIN[name]}"


def test_a_module_has_at_most_240_lines() -> None:
    lengths = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for _, path in modules()
    }
    long = {file for file, length in lengths.items() if length > 240}
    assert long <= LONG, f"at most 240 lines: {sorted(long - LONG)}"
    assert long >= LONG, f"no longer long, remove from the table: {sorted(LONG - long)}"


def test_one_place_runs_forward_and_backward() -> None:
    """Of a batch: `EagerStep`."""
    calling = {
        path.name
        for path in PACKAGE.glob("engine/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parts.backward")
    }
    assert calling == {"eager.py"}


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
