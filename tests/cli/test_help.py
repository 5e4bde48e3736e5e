"""What `--help` says, as a person at a terminal of 80 columns reads it."""

from __future__ import annotations

import re
import tomllib

import pytest
import typer
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from support.paths import ROOT

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "80"}).stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_it_fits_and_names_types_as_click_does(command: str) -> None:
    text = shown(*command.split())
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii() or not {"\N{NO-BREAK SPACE}", "\N{NON-BREAKING HYPHEN}"} & set(text)
    assert not re.findall(r"<\w+(?:\[\w+\])?>|\{\w+\}", text)
    assert "--version   Show" in text or re.search(r"-h, --help +Show this message", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_and_short_defaults_are_whole(command: str) -> None:
    for line in shown(command).splitlines():
        assert not re.search(r"(^| )--\w+-$", line), line
        opened = re.search(r"\[default: .*$", line)
        if opened is not None and "]" not in opened[0]:
            rest = shown(command).partition(opened[0])[2].partition("]")[0]
            assert len(opened[0] + rest) > 40


def test_the_commands_for_everybody_come_first() -> None:
    text = shown()
    assert next(iter(COMMANDS)) == "diagnose"
    assert text.index("\n  diagnose ") < text.index("\n  doctor ") < text.index("\n  train ")
    for command in COMMANDS:
        (line,) = re.findall(rf"^  {command} +(.*)$", text, re.MULTILINE)
        assert line.endswith("."), "a summary that does not fit ends with dots"
        assert not line.endswith("..."), line


def test_arguments_are_in_capitals() -> None:
    assert "translate [OPTIONS] RUN [SENTENCES]...\n" in shown("translate")
    assert "diagnose [OPTIONS] PROGRAM [ARGS]...\n" in shown("diagnose")
    assert re.search(r"^  RUN {8}Run folder", shown("translate"), re.MULTILINE)


def test_examples_stand_as_they_are_typed() -> None:
    assert '\n  $ headrace diagnose --fake --fail-on "waits>2" train.py\n' in shown("diagnose")


def test_everything_says_the_same_about_the_project() -> None:
    about, *_ = (headrace.__doc__ or "").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["description"] == about
    assert f"  {about}\n" in shown()
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nabstract: {about}\n" in citation
    assert f"\nversion: {headrace.__version__}\n" in citation
