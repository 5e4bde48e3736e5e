"""What was measured on a GPU and is kept in the project can be read, is what its page says, and
holds what the README claims of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.records import BenchResult
from headrace.report import render, write_perfetto
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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_speak_of_the_project_alone(path: Path) -> None:
    """No path of the machine that it was measured on."""
    assert not re.findall(r"(?<=[\s\"'=])/\w[^\s\"']*", path.read_text(encoding="utf-8"))
