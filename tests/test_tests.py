"""The tests mirror the source tree, and none imports another.

src/headrace/<package>/<module>.py      tests/<package>/test_<module>.py
src/headrace/<ground file>.py        tests/test_<ground file>.py
more than one package                tests/scenarios/
helpers                              tests/support/
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headrace
from support.house_rules import TESTED_IN
from support.paths import TESTS

PACKAGE = Path(headrace.__file__).parent
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
# Test modules that are not named after a module, and what they test.
OTHERS = {
    "checkpoint/test_durability.py": "folders.py, when the process dies or the disk fails",
    "diagnosis/test_recorded_traces.py": "breakdown.py and what_if.py, on traces of a GPU",
    "engine/test_outputs.py": "engine.py: outputs, on_update and lr",
    "engine/graphs/test_step_graphs_changes.py": "step_graphs.py, where the user changes things",
    "fake/test_capture.py": "graphs.py: what a capture refuses",
    "races/test_cuda_programs.py": "the checker on the programs of support/races/cuda_programs.txt",
    "fake/test_fake_cuda.py": "cuda/: what PyTorch says and does inside `fake_cuda()`",
    "fake/test_fake_cuda_programs.py": "cuda/ and the checker on whole programs",
    "races/test_race_table.py": "checker.py, with the bugs of support/races/race_table.py",
    "races/test_oracle.py": "the checker against a brute-force oracle, on random programs",
    "fake/test_memory.py": "what lies on the fake device: both modes and the checker together",
    "test_exports.py": "the `__all__` of every package",
    "test_floor_plan.py": "benchmarks/tools/floor_plan.py",
    "test_learning.py": "benchmarks/measurements/learning.py",
    "test_layering.py": "rules for all of src/headrace",
    "test_tests.py": "rules for all of tests",
}


def mirrored() -> list[str]:
    """Every test module that must stand beside what it tests, by its path in `tests`."""
    paths = (path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    elsewhere = ("frameworks", "scenarios")
    return sorted(path.as_posix() for path in paths if path.parts[0] not in elsewhere)


def module_of(path: str) -> Path:
    """The module that a test module is named after."""
    place = PACKAGE / path
    return place.with_name(place.name.removeprefix("test_"))


@pytest.mark.parametrize("path", mirrored())
def test_a_test_stands_beside_its_module(path: str) -> None:
    assert module_of(path).is_file() or path in OTHERS, (
        f"tests/{path}: there is no {module_of(path)}. Name it after the module that it tests; "
        "if it tests several packages, move it to tests/scenarios; else list it in OTHERS."
    )


@pytest.mark.parametrize("path", OTHERS)
def test_what_is_listed_is_there_and_needs_to_be(path: str) -> None:
    assert (TESTS / path).is_file()
    assert not module_of(path).is_file()


def test_every_module_has_a_test() -> None:
    """Its twin, else the test module that `TESTED_IN` names, else one that imports it."""
    named = [module for group in TESTED_IN.values() for module in group]
    assert len(set(named)) == len(named)
    for test in TESTED_IN:
        assert (TESTS / test).is_file(), test
    imported: set[str] = set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                imported |= {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
    without = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE)
        dotted = ".".join(("headrace", *module.with_suffix("").parts))
        has_test = (TESTS / module.with_name(f"test_{path.name}")).is_file() or dotted in imported
        if has_test or path.name in ("__init__.py", "__main__.py"):
            assert module.as_posix() not in named, f"{module} has a test: remove it from TESTED_IN"
        elif module.as_posix() not in named:
            without.append(module.as_posix())
    assert not without, "write their tests, or say in TESTED_IN where they are tested"


def test_every_folder_has_its_purpose() -> None:
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert found <= PACKAGES | {"frameworks", "scenarios", "support"}


def imported_tests(code: str) -> list[str]:
    """The test modules and conftests that some code imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [
        name
        for name in names
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    ]


def test_no_test_imports_another() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        found = imported_tests(path.read_text(encoding="utf-8"))
        assert not found, f"{path} imports {', '.join(found)}: share it in tests/support"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import test_engine", ["test_engine"]),
        ("def f():\n    from engine.test_engine import data", ["engine.test_engine.data"]),
        ("from frameworks import conftest", ["frameworks.conftest"]),
        ("from headrace.fake import FakeDevice", []),
        ("from support.training.engines import data", []),
    ],
)
def test_what_an_import_of_a_test_is(code: str, found: list[str]) -> None:
    assert imported_tests(code) == found
