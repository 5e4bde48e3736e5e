"""Imports point down only, one file names `torch.cuda`, and no host wait hides outside the seam."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headrace

PACKAGE = Path(headrace.__file__).parent

# Which room each module is in: it may import from its own room or one below.
# (device/, testing/ and the others are one room each, whatever they hold.)
ROOMS = {
    "errors": 0,
    "sites": 0,
    "records": 0,
    "caches": 0,
    "tables": 0,
    "timeline": 0,
    "hostmeter": 0,
    "plan": 0,
    "ledger": 0,
    "device": 0,
    "streams": 1,
    "ranks": 1,
    "wrapped": 1,
    "accelerated": 1,
    "shares": 1,
    "testing": 1,
    "batches": 1,
    "batchcache": 1,
    "loading": 1,
    "randomstates": 1,
    "sending": 1,
    "prefetcher": 1,
    "deferred": 1,
    "runahead": 1,
    "numerics": 1,
    "buckets": 1,
    "graphs": 1,
    "pytest_plugin": 2,
    "probe": 2,
    "ema": 2,
    "nonfinite": 2,
    "outofmemory": 2,
    "halving": 2,
    "resuming": 2,
    "watchdog": 2,
    "launch": 2,
    "groupweight": 2,
    "buffers": 2,
    "lossparts": 2,
    "schedules": 2,
    "lossfunction": 2,
    "losswatch": 2,
    "clipping": 2,
    "spent": 2,
    "step": 2,
    "capturing": 2,
    "capturable": 2,
    "python_state": 2,
    "step_trace": 2,
    "trial": 2,
    "rates": 2,
    "engine_state": 2,
    "checkpoint": 2,
    "rundir": 2,
    "metrics": 2,
    "monitor": 2,
    "busy": 2,
    "runmonitor": 2,
    "progress": 2,
    "stopping": 2,
    "translation": 3,
    "bench": 3,
    "tune": 3,
    "compiling": 2,
    "results": 2,
    "lanes": 2,
    "loop": 2,
    "onebatch": 2,
    "engine": 2,
    "report": 3,
    "doctor": 3,
    "cli_translation": 4,
    "cli_bench": 4,
    "cli_output": 4,
    "cli_tune": 4,
    "cli_report": 4,
    "cli": 4,
    "__main__": 5,
}
# Within room 0 there is an order too: the ledger knows no device, plan and errors know nobody.
GROUND_FLOOR = [
    "errors",
    "sites",
    "records",
    "caches",
    "tables",
    "timeline",
    "plan",
    "ledger",
    "device",
]


def modules() -> list[tuple[str, Path]]:
    """(top-level name, file) of every module but the package's own `__init__`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative != Path("__init__.py"):
            found.append((relative.parts[0].removesuffix(".py"), path))
    return found


def imported(path: Path) -> set[str]:
    """The top-level Headrace modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "headrace":
                names |= {alias.name for alias in node.names}
            elif node.module.startswith("headrace."):
                names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("headrace.")}
    return names


def test_every_module_has_a_room() -> None:
    assert {name for name, _ in modules()} == set(ROOMS)


def test_imports_point_down() -> None:
    for name, path in modules():
        for target in imported(path) - {name}:
            assert ROOMS[target] <= ROOMS[name], f"{path} imports {target}, which lies above"


def test_the_ground_floor_is_in_order() -> None:
    for name, path in modules():
        if name in GROUND_FLOOR:
            below = set(GROUND_FLOOR[: GROUND_FLOOR.index(name)])
            assert imported(path) - {name} <= below, path


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
    assert naming == ["device/cuda.py"]


def is_host_wait(call: ast.Call) -> bool:
    """Whether it reads from the device or waits for it; the seam's own waits have a reason."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    if name == "synchronize":
        reason = call.args[0] if call.args else None
        told = isinstance(reason, ast.Constant) or ast.unparse(call).endswith("(reason)")
        return not told and not owner.startswith("self")
    return name in ("item", "cpu", "tolist") and not call.args and owner != "self.device"


def test_host_waits_only_in_the_seam_and_the_ledger() -> None:
    for name, path in modules():
        if name in ("device", "ledger", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            waits = isinstance(node, ast.Call) and is_host_wait(node)
            assert not waits, f"{path}:{node.lineno}: {ast.unparse(node)}"


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
