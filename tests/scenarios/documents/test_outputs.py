"""Blocks of output in docs/: each is what the commands and the code of this version print.

A block of output follows a line that says where it comes from: `<!-- output: … -->` or
`<!-- bench: RESULT.json -->`. Those that are not tested here are in test_pages.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

import headrace as hr
from headrace.cli import app
from headrace.diagnosis.ranks import of_ranks
from headrace.diagnosis.text import text_of
from headrace.fake import Costs, FakeDevice
from headrace.plan import load_plan
from headrace.records import (
    DiagnosedLine,
    DiagnosisResult,
    HostLine,
    LineRecord,
    RankFigures,
    TimeParts,
)
from support.diagnosis.trace_files import (
    calls_and_work,
    loading,
    profiler_steps,
    reads,
    recorded,
    write_trace,
)
from support.documents import blocks, output
from support.paths import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
#: Pages whose blocks without a language are drawings, which no program prints.
DRAWINGS = ("docs/architecture.md", "docs/checkpoints.md")
needs_cpu_torch = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch has CUDA here")
#: What `train.py` is in the pages on `diagnose` and `run`.
TRAIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"


def log(loss):
    print(f"loss {loss.item():.3f}")


torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 32), torch.randint(4, (512,)))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_of = nn.CrossEntropyLoss()

for epoch in range(1):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        x, y = x.to(device), y.to(device)
        loss = loss_of(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        log(loss)
        if torch.isnan(loss):
            break
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path


def shown(page: str, source: str) -> list[str]:
    """The lines of a block of output, without the command above them."""
    return [line for line in output(page, source).lines if not line.startswith("$ ")]


def without_figures(lines: list[str]) -> list[str]:
    """The lines, comparable where times and counts may differ."""
    return [re.sub(r"\d[\d.,]*", "#", line) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_each_output_says_where_it_comes_from(page: str) -> None:
    for block in blocks(page):
        lines = block.text.replace("\\\n", " ").splitlines()
        is_output = not block.language and page not in DRAWINGS and not lines[0].startswith("%")
        if block.language == "console":
            is_output = any(line and not line.startswith(("$ ", "#")) for line in lines)
        if is_output:
            assert block.source.partition(":")[0] in ("output", "bench"), block.text


@needs_cpu_torch
def test_diagnose_on_the_fake_device(here: Path) -> None:
    ended = CliRunner().invoke(app, ["diagnose", "--fake", "train.py"])
    assert shown("docs/diagnose.md", "diagnose --fake") == ended.stderr.splitlines()[:-1]


@needs_cpu_torch
def test_run_on_the_fake_device(here: Path) -> None:
    fused = TRAIN.replace("lr=1e-3", "lr=1e-3, fused=True")
    (here / "train.py").write_text(fused, encoding="utf-8")
    ended = CliRunner().invoke(app, ["run", "--fake", "train.py"])
    expected = shown("docs/run.md", "run --fake")
    assert without_figures(expected) == without_figures(ended.stderr.splitlines())


def test_diagnose_from_a_trace(here: Path) -> None:
    """Four steps of `pageable` in benchmarks/inputs/slow_scripts.py, as an H200 ran them."""
    trace = recorded("pageable")
    path = write_trace(
        here / "trace.json.gz",
        calls_and_work(trace),
        profiler_steps(trace),
        loading(trace),
        reads(trace, "train.py(24): train"),
    )
    ended = CliRunner().invoke(app, ["diagnose", path.name])
    printed = iter(ended.output.splitlines())
    for line in shown("docs/diagnose-traces.md", "trace"):
        assert line == "…" or line in printed  # in order: `in` reads on from the line before


def test_two_diagnoses_compared(here: Path) -> None:
    def line(number: int, text: str, waits: float, idle_ms: float) -> DiagnosedLine:
        where = LineRecord("train.py", number, "main", text)
        return DiagnosedLine("item", ".item()", "", where, per_step=waits, idle_ms=idle_ms)

    before = DiagnosisResult(
        step_ms=10.0,
        noise_ms=0.1,
        parts=TimeParts(computing=8.0, synchronization=1.0, launch=1.0),
        waits_per_step=2.0,
        lines=(line(20, "loss.item()", 1.0, 0.5), line(30, "print(norm)", 1.0, 0.5)),
    )
    after = replace(
        before,
        step_ms=12.0,
        parts=TimeParts(computing=8.0, synchronization=1.0, launch=1.2, input=1.8),
        waits_per_step=3.0,
        lines=(line(22, "loss.item()", 1.0, 0.5), line(31, "acc.item()", 2.0, 0.3)),
    )
    for name, result in (("before", before), ("after", after)):
        Path(f"{name}.json").write_text(json.dumps(result.to_dict()), encoding="utf-8")
    ended = CliRunner().invoke(
        app, ["diagnose", "--compare", "--fail-on", "slower>3%", "before.json", "after.json"]
    )
    assert shown("docs/diagnose-traces.md", "comparison") == ended.output.splitlines()


def test_the_slowest_of_two_ranks() -> None:
    sleeps = LineRecord("train.py", 11, "main", "time.sleep(0.03)")

    def rank(number: int, step_ms: float, waits_ms: float, line_ms: float) -> DiagnosisResult:
        lines = (HostLine(sleeps, line_ms),)
        figures = RankFigures(number, "vm", step_ms, None, waits_ms, lines)
        return DiagnosisResult(step_ms=step_ms, verdict=(), ranks=(figures,))

    result = of_ranks([rank(0, 37.04, 32.28, 0.9), rank(1, 37.09, 0.62, 30.2)])
    assert shown("docs/diagnose.md", "ranks") == text_of(result).splitlines()


def train_on_a_fake_device(model: nn.Module, steps: int, **options: Any) -> list[str]:
    """What `report()` says after some steps."""
    with FakeDevice(costs=Costs(kernel_us=1.0, launch_us=20.0)) as device:
        model = model.to(device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with hr.speed_up(model, optimizer, device=device, **options) as handle:
            for _ in range(steps):
                model(torch.randn(6, 4, device=device.torch_device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return str(handle.report()).splitlines()


class Encoder(nn.Sequential):
    pass


#: As the page has it, with layers.
DETECTOR = """
@hr.eager
def match(scores, boxes):
    return scores + boxes

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        self.head = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))

    def forward(self, x):
        features = self.backbone(x)
        return self.head(match(features, x))
"""


def test_the_report_of_speed_up() -> None:
    model = Encoder(nn.Linear(4, 100_000), nn.ReLU(), nn.Linear(100_000, 2))
    found = train_on_a_fake_device(model, 60, plan="graph")
    assert without_figures(shown("docs/speed-up.md", "report")) == without_figures(found)


def test_the_report_of_a_model_in_pieces(here: Path) -> None:
    code = f"import headrace as hr\nfrom torch import nn\n\n{DETECTOR}"
    Path("model.py").write_text(code, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(code, "model.py", "exec"), names)
    found = train_on_a_fake_device(names["Detector"](), 60, plan="graph")
    expected = shown("docs/speed-up.md", "pieces")
    assert without_figures(expected) == without_figures(found)


def test_what_graphs_gain_is_said_in_one_line() -> None:
    *_, found = train_on_a_fake_device(Encoder(nn.Linear(4, 8), nn.Linear(8, 2)), 110)
    for page in ("speed-up.md", "plans.md", "run.md", "zh/run.md", "translation-batches.md"):
        assert without_figures(shown(f"docs/{page}", "gain")) == without_figures([found])


def test_why_a_step_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    code = """
def loss(model, batch):
    out, h = model(batch, state["h"])
    state["h"] = h.detach()
    return out.mean()
"""
    names: dict[str, Any] = {"state": {"h": torch.zeros(1, 6, 2)}}
    exec(compile("\n" * 27 + code, "train.py", "exec"), names)
    with FakeDevice() as device:
        names["state"]["h"] = names["state"]["h"].to(device.torch_device)
        model = nn.GRU(2, 2).to(device.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        engine = hr.Engine(model, optimizer, names["loss"], plan="graph", device=device)
        engine.epoch([torch.randn(3, 6, 2) for _ in range(6)])
    said = " ".join(shown("docs/graphs-limits.md", "why"))
    assert said in [record.getMessage() for record in caplog.records]


def test_the_variable_that_replaces_the_plan(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PLAN", "baseline")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hr.Engine(model, optimizer, lambda model, batch: model(batch).sum(), plan="graph", device="cpu")
    assert shown("docs/plans.md", "HEADRACE_PLAN") == [
        record.getMessage() for record in caplog.records
    ]


def test_the_plan_file_is_one(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("docs/plans.md") if block.language == "yaml")
    (tmp_path / "plan.yaml").write_text(block.text, encoding="utf-8")
    assert load_plan(tmp_path / "plan.yaml").plan.prefetch_depth == 4


def test_the_workflow_steps_are_yaml() -> None:
    (block,) = (b for b in blocks("docs/race-checking.md") if b.language == "yaml")
    assert all({"run"} == set(step) for step in yaml.safe_load(block.text))


def test_the_job_script_is_a_shell_script() -> None:
    (block,) = (block for block in blocks("docs/scaling.md") if block.language == "bash")
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
