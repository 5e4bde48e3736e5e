"""`__all__` is the truth, in every package that has one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import headrace


@pytest.mark.parametrize(
    "name", ["headrace", "headrace.device", "headrace.report", "headrace.testing"]
)
def test_all_names_exist_and_are_sorted(name: str) -> None:
    module = importlib.import_module(name)
    for export in module.__all__:
        assert getattr(module, export) is not None
    assert len(set(module.__all__)) == len(module.__all__)


def test_all_lists_every_public_name() -> None:
    # The lazy names, and nothing that an import left lying about.
    assert set(headrace.__all__) == {*headrace._HOMES, "__version__"}
    assert dir(headrace) == sorted(headrace.__all__)


@pytest.mark.parametrize("name", ["headrace.device", "headrace.testing"])
def test_all_lists_every_name_defined_there(name: str) -> None:
    module = importlib.import_module(name)
    defined = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "").startswith(name)
    }
    internal = {"CpuDevice"}  # reached through open_device
    assert defined - internal == set(module.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = headrace.Enigne


def test_import_loads_neither_torch_nor_a_gpu() -> None:
    program = (
        "import sys, headrace; assert 'torch' not in sys.modules; "
        "headrace.Plan, headrace.StreamManager; import torch; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_pytest_plugin_does_not_load_torch() -> None:
    program = "import sys, headrace.pytest_plugin as p; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
