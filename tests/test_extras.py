"""Optional packages: what installs them, and what is said where one is missing."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import MissingPackageError
from headrace.extras import EXTRAS, require
from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}  # where the import name is another


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def test_each_extra_installs_its_packages() -> None:
    optional = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(package, package) in names(optional[extra])
        assert DISTRIBUTIONS.get(package, package) not in names(PROJECT["dependencies"])


def test_all_has_every_extra_for_users() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"[\w]+", everything)) - {"headrace"} == set(EXTRAS.values())


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without any extra."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> object:
        return None if name in EXTRAS else find(name, package)

    monkeypatch.setattr("headrace.extras.find_spec", found)


@pytest.mark.usefixtures("bare")
def test_the_message_names_packages_and_extra() -> None:
    with pytest.raises(MissingPackageError) as caught:
        require("headrace train", "sentencepiece", "sacrebleu")
    assert str(caught.value) == (
        "headrace train needs sentencepiece and sacrebleu, which are not installed: "
        "pip install 'headrace[translate]'"
    )


def test_what_is_installed_is_no_error() -> None:
    require("this test", "typing", "pytest")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("command", "package"),
    [
        (["train"], "sentencepiece"),
        (["evaluate", "run"], "sacrebleu"),
        (["translate", "run"], "sentencepiece"),
        (["export", "run"], "ctranslate2"),
        (["prepare"], "sentencepiece"),
        (["report", "run"], "jinja2"),
        (["diagnose", "--html", "page.html", "train.py"], "jinja2"),
        (["races", "--html", "page.html", "train.py"], "jinja2"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_command_says_which_extra_it_needs(
    command: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    problem = CliRunner().invoke(app, command).exception
    assert isinstance(problem, MissingPackageError)
    assert f"headrace {command[0]} needs {package}" in str(problem).replace(" --html", "")
    assert f"pip install 'headrace[{EXTRAS[package]}" in str(problem)
