"""`__all__` is the truth, in every package that has one."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

PACKAGES = [
    "bench",
    "capture",
    "checkpoint",
    "cli",
    "data",
    "device",
    "diagnosis",
    "engine",
    "fake",
]
PACKAGES += ["lifecycle", "machine", "parallel", "progress", "races", "records", "report"]
PACKAGES += ["run", "translation"]


@pytest.mark.parametrize("name", ["headrace", *(f"headrace.{package}" for package in PACKAGES)])
def test_all_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    for export in module.__all__:
        assert getattr(module, export) is not None
    assert len(set(module.__all__)) == len(module.__all__)


def test_all_lists_every_public_name() -> None:
    # The lazy names, and nothing that an import left lying about.
    assert {"Engine", "Plan", "__version__"} <= set(headrace.__all__)
    assert dir(headrace) == sorted(headrace.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_api_exports_all_that_it_imports(package: str) -> None:
    module = importlib.import_module(f"headrace.{package}")
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "headrace.lazy")
        for alias in node.names
    }
    assert set(module.__all__) == imported


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = headrace.Enigne


def test_import_loads_neither_torch_nor_a_gpu_nor_frameworks() -> None:
    program = (
        "import sys, headrace; assert 'torch' not in sys.modules; "
        "headrace.Plan, headrace.StreamManager, headrace.speed_up; import torch; "
        "assert not torch.cuda.is_initialized(); import headrace.integrations; "
        "assert not {'lightning', 'transformers', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_pytest_plugin_does_not_load_torch() -> None:
    program = "import sys, headrace.fake.pytest_plugin as p; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
