"""`headrace watch`: says where, and opens the browser there."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.report import LiveServer


def test_the_address_is_told_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(LiveServer, "wait", lambda self: None)
    ended = CliRunner().invoke(app, ["watch", str(tmp_path), "--open"])
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("http://127.0.0.1:")
    assert opened == [ended.stdout.strip()]


def test_no_such_run_is_a_usage_error(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["watch", str(tmp_path / "none")])
    assert ended.exit_code != 0
    assert "no such run" in str(ended.exception)
