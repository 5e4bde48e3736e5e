"""Paths and lines as messages and reports show them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_packages_behind_a_symbolic_link_are_no_code_of_the_users(tmp_path: Path) -> None:
    """Such as those of a virtual environment in a home folder that is a link."""
    (tmp_path / "packages").symlink_to(source_lines.TORCH.parent)
    program = (
        "import torch\n"
        "from headrace.source_lines import is_user_code\n"
        "from headrace.testing.races import is_internal\n"
        "file = torch.nn.Linear.forward.__code__.co_filename\n"
        "print(file, is_user_code(file), is_internal(file))"
    )
    path = os.pathsep.join([str(tmp_path / "packages"), str(source_lines.HEADRACE.parent)])
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    file, *answers = run.stdout.split()
    assert file.startswith(str(tmp_path))
    assert answers == ["False", "True"]
