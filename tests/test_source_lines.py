"""Paths and lines as messages and reports show them."""

from __future__ import annotations

from pathlib import Path

import pytest

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
