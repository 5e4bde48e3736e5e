"""`headrace translate`: its input, and what it says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import HeadraceError
from support.saved_runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def translate(run: Path, *sentences: str, stdin: bytes | None = None) -> Any:
    arguments = ["translate", str(run), "--device", "cpu", "--beam", "1", *sentences]
    return CliRunner().invoke(app, arguments, input=stdin)


def test_cut_sentences_and_empty_lines_are_counted(run: Path, tmp_path: Path) -> None:
    found = translate(run, "one and two", "zero " * 300, " ")
    assert found.exit_code == 0, found.output
    assert len(found.stdout.splitlines()) == 3
    assert found.stderr.splitlines() == [
        "warning: 1 of 3 sentences will be cut at 256 tokens, the model's maximum; split long "
        "lines into sentences",
        "warning: 1 of 3 sentences without text; each gets an empty line",
    ]
    assert translate(run, "one and two").stderr == ""


def test_stdin_is_utf8_whatever_the_locale(run: Path) -> None:
    text = "one\nfünf und 六\n"
    found = translate(run, stdin=text.encode())
    assert found.stdout == translate(run, "one", "fünf und 六").stdout
    assert re.fullmatch(
        r"2 sentences translated in [\d.]+ s, after a start-up of [\d.]+ s\n", found.stderr
    )
    # An argument's bytes that the locale's encoding does not know.
    assert translate(run, "one", "fünf und 六".encode().decode("ascii", "surrogateescape")).stdout
    wrong = translate(run, stdin=b"one\ntw\xff\n").exception
    assert isinstance(wrong, HeadraceError)
    assert str(wrong).startswith("stdin:2: is not UTF-8 text")


def test_a_wrong_run_is_said_before_stdin_is_read(tmp_path: Path) -> None:
    wrong = translate(tmp_path / "none", stdin=b"\xff").exception
    assert "does not exist" in str(wrong)
