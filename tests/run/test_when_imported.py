"""A call right after a program has imported a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from headrace.run.when_imported import when_imported


def test_the_call_comes_once_after_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_package.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found: list[int] = []
    before = list(sys.meta_path)
    with when_imported("late_package", lambda: found.append(sys.modules["late_package"].value)):
        assert not found
        module = importlib.import_module("late_package")
        assert found == [1]
        assert sys.meta_path == before
        importlib.reload(module)
    assert found == [1]
    with when_imported("late_package", lambda: found.append(2)):  # it is there already
        assert found == [1, 2]
    del sys.modules["late_package"]


def test_nothing_stays_if_it_is_never_imported() -> None:
    before = list(sys.meta_path)
    with when_imported("no_such_package", lambda: None), pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")
    with when_imported("no_such_package", lambda: None):
        pass
    assert sys.meta_path == before
