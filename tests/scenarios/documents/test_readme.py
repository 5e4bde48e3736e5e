"""Both READMEs: each block runs on the CPU, or is part of a committed result.

A block of output follows a line that says where it comes from: `<!-- output: … -->`. All other
blocks are commands or code.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

from headrace.cli import app
from headrace.diagnosis.text import text_of
from headrace.records import DiagnosisResult
from support.documents import blocks, only, output, read
from support.paths import ROOT

READMES = ("README.md", "README.zh-CN.md")


def commands(name: str) -> Iterator[str]:
    """Every `$ …` line, with its continuation and without its comment."""
    for block in blocks(name):
        if block.language == "console":
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    yield line[2:].partition(" #")[0].strip()


def without_comments(text: str) -> str:
    return re.sub(r" *#.*", "", text)


@pytest.fixture(params=READMES)
def readme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_each_block_is_of_a_kind_that_is_tested(readme: str) -> None:
    kinds = [(block.source.partition(":")[0], block.language) for block in blocks(readme)]
    assert set(kinds) == {("", "console"), ("", "python"), ("output", "")}
    assert kinds.count(("", "python")) == 1
    assert kinds.count(("output", "")) == 1


def test_it_is_short(readme: str) -> None:
    assert len(read(readme).splitlines()) <= 150


def test_both_have_the_same_blocks() -> None:
    english, chinese = ([without_comments(b.text) for b in blocks(name)] for name in READMES)
    assert english == chinese


def test_both_have_the_same_figures_in_their_tables() -> None:
    def figures(name: str) -> list[list[str]]:
        rows = (line for line in read(name).splitlines() if line.startswith("| "))
        return [sorted(re.findall(r"\d[\d,.]*\d|\d", row)) for row in rows]

    for english, chinese in itertools.zip_longest(*map(figures, READMES)):
        # Numbers that only one language writes as digits: "twelve", "two".
        words = {"1", "2", "4", "6", "11", "12"}
        assert set(english) - words == set(chinese) - words


def test_links_and_pictures_are_there(readme: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", read(readme))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_are_typed_right(
    readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed, with all their options, and not run."""
    for folder in ("corpus", "runs/train/exp", "runs/demo/exp", "runs/tune/exp"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    program = typer.main.get_command(app)
    for command in commands(readme):
        first, second, *rest = shlex.split(command)
        if first == "make":
            assert second in targets
        elif first == "pip":
            assert (second, rest) == ("install", ["."])
        else:
            assert first == "headrace"
            program.commands[second].make_context(second, rest)  # type: ignore[attr-defined]


def test_the_diagnosis_is_that_of_the_committed_result(readme: str) -> None:
    """In the words of this version."""
    stored = json.loads(read("benchmarks/results/2026-11-16-h200-framework-diagnosis.json"))
    result = DiagnosisResult.from_dict(stored["scripts"]["accelerate_loop"]["diagnosis"])
    printed = iter(text_of(result).splitlines())
    for line in output(readme, "diagnosis").lines:
        assert line == "…" or line in printed  # in order: `in` reads on from the line before


def test_the_table_of_scripts_is_that_of_the_committed_results(readme: str) -> None:
    first, second = (
        json.loads(read(f"benchmarks/results/{name}.json"))
        for name in ("2026-11-16-h200-works", "2026-11-18-h200-diagnosis-works")
    )
    expected = set()
    for name, work in ((n, w) for run in first["runs"] for n, w in run["works"].items()):
        plans, again = work["plans"], second["works"][name]["measured"]
        plain = sorted((plans["plain"]["ms"], again["plain"]["ms"]))
        graph = sorted((plans["graph"]["speed-up"][0], again["graph"]["speed-up"][0]))
        row = [f"{ms:.1f}" for ms in plain]
        row.append(f"{100 * plans['plain']['busy ms'] / plans['plain']['ms']:.0f}")
        row += [f"{times:.1f}" for times in graph]
        row += [f"{plans['max']['speed-up'][0]:.1f}"] if plans["max"]["compiled"] else []
        expected.add(tuple(row))
    rows = re.findall(r"^\| [^|]* (?=\| \d)(.*)\|$", read(readme), re.MULTILINE)
    assert {tuple(re.findall(r"\d+\.?\d*", row)) for row in rows} == expected


def test_the_table_of_frameworks_is_that_of_the_committed_result(readme: str) -> None:
    cases = json.loads(read("benchmarks/results/2026-11-19-h200-frameworks.json"))["cases"]
    for name in ("lightning", "trainer", "accelerate"):
        alone, fast = (
            sorted({f"{turn['ms']:.1f}" for turn in cases[f"bert in {name}"][way]})
            for way in ("alone", "sped up")
        )
        (row,) = (line for line in read(readme).splitlines() if f"→ {fast[0]} |" in line)
        assert re.findall(r"\d+\.\d", row) == alone + fast
        assert name in row.lower()


def test_the_line_is_one_line_before_a_plain_loop(readme: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(only(readme, "import headrace").text, {"model": model, "optimizer": optimizer})
