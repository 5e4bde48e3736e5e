"""Paths and lines as messages and reports show them."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import source_lines
from headrace.source_lines import is_generated, short_path, variables_of


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("src/train.py", "src/train.py"),
        ("/home/ada/train.py", "/home/ada/train.py"),
        ("/home/ada/.venv/lib/python3.12/site-packages/timm/data/loader.py", "timm/data/loader.py"),
        ("/usr/lib/python3/dist-packages/lightning/fabric.py", "lightning/fabric.py"),
    ],
)
def test_a_short_path_is_what_a_reader_knows(file: str, shown: str) -> None:
    assert short_path(file) == shown


def test_files_below_the_working_directory_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "project" / "train.py")) == "project/train.py"


def test_a_linked_environment_is_no_code_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames have the path by which Python found a file, whatever is behind it."""
    linked = tmp_path / "linked"
    linked.symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setattr(torch, "__file__", str(linked / "torch" / "__init__.py"))
    spec = importlib.util.spec_from_file_location("again", source_lines.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "again", again)
    spec.loader.exec_module(again)
    assert not again.is_user_code(str(linked / "torch" / "_tensor.py"))
    assert again.is_user_code(str(linked / "timm" / "loss.py"))


def test_generated_code_has_no_source_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("<attrs generated init cell.A>", "<eval_with_key>.0", "<ipython-input-7-cd>"):
        monkeypatch.setitem(linecache.cache, file, (5, None, ["pass\n"], file))
    assert is_generated("<attrs generated init cell.A>")
    assert is_generated("<eval_with_key>.0")
    assert is_generated("<string>")
    assert not is_generated("<ipython-input-7-cd>")
    assert not is_generated(__file__)


class _Object:
    pass


def test_looking_at_the_variables_of_a_function_keeps_none_alive() -> None:
    held = _Object()
    alive = weakref.ref(held)
    assert variables_of(inspect.currentframe())["held"] is held  # type: ignore[arg-type]
    del held
    assert alive() is None
    kept = locals()
    variables_of(inspect.currentframe())  # type: ignore[arg-type]
    assert kept["alive"] is alive  # what the program holds stays as it is
    module: dict[str, Any] = {"variables_of": variables_of, "inspect": inspect}
    exec("found = variables_of(inspect.currentframe())", module)
    assert module["found"]["inspect"] is module["inspect"]  # a module's variables are no copy
