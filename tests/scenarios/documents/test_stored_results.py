"""What was measured on a GPU and is kept in the project can be read, is what its page says, and
holds what the README claims of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.records import BenchResult
from headrace.report import render, write_perfetto
from support.documents import read
from support.paths import BENCHMARKS

RESULTS = BENCHMARKS / "results"
BENCHES = sorted(RESULTS.glob("*-h200-bench-*.json"))


def named(path: Path) -> str:
    return path.stem.partition("h200-")[2]


def test_there_are_some() -> None:
    assert {named(path) for path in BENCHES} >= {
        *("bench-30x60-tf32", "bench-30x60-bf16", "bench-256x64-bf16", "bench-resnet-bf16")
    }


@pytest.mark.parametrize("path", BENCHES, ids=named)
def test_the_page_beside_it_is_its_own(path: Path) -> None:
    """Also: whoever changes the pages renders these anew (`headrace report RESULT.json`)."""
    assert path.with_suffix(".html").read_text(encoding="utf-8") == render(path)


@pytest.mark.parametrize("path", BENCHES, ids=named)
def test_a_bench_has_every_plan_equal_losses_and_little_noise(path: Path) -> None:
    result = BenchResult.read(path)
    assert not result.failed
    assert result.noise is not None
    assert result.noise.difference_share < 0.03
    measured = {row.plan for row in result.rows if row.ms_per_step is not None}
    assert measured >= {
        *("baseline", "interval", "event", "streams4", "pipeline", "graph", "graph#2", "max"),
        *("lightning", "accelerate"),
    }
    for row in result.rows:
        assert row.agrees
        assert row.gpu is not None
        assert row.timeline is not None
        spans = row.timeline.spans
        assert all(0 <= span.start_ns <= span.end_ns for span in spans)
        # No plan's lanes end long before what the host does: the page would show an idle device.
        last_ns = max(span.end_ns for span in spans if span.kind in ("kernel", "copy"))
        assert max(span.end_ns for span in spans) < 1.1 * last_ns
    for plan in ("interval", "event", "streams4", "pipeline", "graph"):
        assert result.row(plan).equal.verdict == "identical"


@pytest.mark.parametrize("path", BENCHES, ids=named)
def test_its_timelines_become_perfetto_files(path: Path, tmp_path: Path) -> None:
    files = write_perfetto(path, tmp_path)
    assert len(files) == len(json.loads(path.read_text(encoding="utf-8"))["rows"])
    for file in files:
        assert json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The figures of each row of the first table after a heading."""
    table = read(page).partition(heading)[2].partition("| --- ")[2].partition("\n\n")[0]
    rows = (row.partition(" | ")[2] for row in table.splitlines()[1:])
    return [re.findall(r"−?\d+(?:\.\d+)?", row) for row in rows]


def test_the_table_of_auto_is_that_of_its_result() -> None:
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*-auto.json")]
    expected = []
    for work in (one for result in stored for one in result["works"].values()):
        row = [f"{work[f'{way} ms']:.1f}" for way in ("by hand", "pipeline", "graph", "auto")]
        row += [str(work["after steps"]), f"{work['1,000 steps, %']:.0f}".replace("-", "−")]
        expected.append(row)
        assert work["chose"] == "whole step"
    assert sorted(rows_of("docs/measured.md", "## What auto chooses")) == sorted(expected)


def test_the_table_of_examples_is_that_of_its_result() -> None:
    stored = json.loads((RESULTS / "2026-11-19-h200-examples.json").read_text(encoding="utf-8"))
    rows = rows_of("examples/README.md", "# Examples")
    for row, example in zip(rows, stored["rows"].values(), strict=True):
        (plain,), (fast,) = example["plain_ms"], example["sped_up_ms"]
        assert row[-3:-1] == [f"{plain:.1f}", f"{fast:.1f}"]
        assert float(row[-1]) == pytest.approx(plain / fast, rel=0.04)
        assert example["equal"]
    gains = sorted(float(row[-1]) for row in rows)
    assert f"{gains[0]:.1f} to {gains[-1]} ×" in read("README.md")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_speak_of_the_project_alone(path: Path) -> None:
    """No path of the machine that it was measured on."""
    assert not re.findall(r"(?<=[\s\"'=])/\w[^\s\"']*", path.read_text(encoding="utf-8"))


def test_each_script_and_result_is_in_the_list() -> None:
    listed = read("benchmarks/README.md")
    scripts = (p for name in ("measurements", "proofs") for p in (BENCHMARKS / name).glob("*.py"))
    assert [path.name for path in scripts if f"`{path.name}`" not in listed] == []
    stored = {path.name for path in RESULTS.iterdir() if path.suffix in (".json", ".txt")}
    assert set(re.findall(r"\(results/(2026[^)]*)\)", listed)) == stored
    commands = read("benchmarks/results/README.md")
    assert [name for name in stored if name.rpartition(".")[0] not in commands] == []


def test_the_cells_of_the_list_are_short() -> None:
    rows = [row for row in read("benchmarks/README.md").splitlines() if row.startswith("| ")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in row.split(" | ")]
    assert max(map(len, cells)) <= 110
