"""`headrace translate`: its input, and what it says of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.translate import translate as translate_command
from headrace.errors import HeadraceError
from support.storage.full_disk import FullDisk
from support.storage.saved_runs import write_run


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


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_lines_typed_on_a_terminal_are_translated_one_by_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = translate(run, "one", "", "zero " * 300).stdout
    keyboard, terminal = os.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(keyboard, "wb") as typed:
        monkeypatch.setattr(sys, "stdin", stdin)
        typed.write(b"one\n\n" + b"zero " * 300 + b"\n\x04")
        typed.flush()
        translate_command(run, beam=1, device="cpu")
    found = capsys.readouterr()
    assert found.out == expected
    hint, warning = found.err.splitlines()
    assert hint == "Type a sentence and press Enter; Ctrl-D ends."
    assert warning.startswith("warning: 1 of 1 sentences will be cut")


def test_a_translation_that_cannot_be_written_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(HeadraceError, match=r"written to stdout \(No space left on device\)"):
        translate_command(run, ["one"], beam=1, device="cpu")


def test_a_closed_stdin_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(HeadraceError, match="stdin is closed: expected sentences") as wrong:
        translate_command(run, device="cpu")
    assert wrong.value.exit_code == 2
