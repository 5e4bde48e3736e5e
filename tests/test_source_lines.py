"""Paths and lines as messages and reports show them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from headrace import source_lines
from headrace.source_lines import short_path


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
