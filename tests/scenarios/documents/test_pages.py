"""Pages of docs/ whose blocks run on the CPU, or are part of a committed result.

A block of output follows a line that says where it comes from: `<!-- output: … -->` or
`<!-- bench: RESULT.json -->`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.fake import Costs, FakeDevice, fake_cuda
from headrace.races import race_report
from support.documents import blocks, only, output, read
from support.paths import BENCHMARKS, ROOT

DEMO = BENCHMARKS / "results" / "2026-11-16-cpu-demo.txt"
ENGINE, MEASURED, TESTING = "docs/engine.md", "docs/measured.md", "docs/testing.md"
TRANSLATOR = "docs/translation.md"


def test_scripts_that_are_named_are_there() -> None:
    named = set(re.findall(r"`python benchmarks/\w+/(\w+\.py)|`(\w+\.py)", read(MEASURED)))
    scripts = {path.name for path in BENCHMARKS.glob("*/*.py")}
    assert named
    assert [name for names in named for name in names if name and name not in scripts] == []


def test_the_bench_output_is_that_of_the_committed_results() -> None:
    """If this fails because the output has changed: `python docs/bench_output.py`."""
    spec = importlib.util.spec_from_file_location("bench_output", ROOT / "docs/bench_output.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for page in script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert script.BLOCK.search(text)
        assert script.with_bench_blocks(text) == text


def test_the_table_of_milliseconds_is_that_of_the_committed_results() -> None:
    (head,) = re.findall(r"^\| \S+ \| (`baseline` .*Accelerate) \|$", read(MEASURED), re.MULTILINE)
    plans = [plan.strip("` ").lower() for plan in head.split("|")]
    rows = re.findall(
        r"^\| .*\(\.\./(\S+bench\S+)\.html\).*?\| (\d.*) \|$", read(MEASURED), re.MULTILINE
    )
    assert len(rows) == 4
    for path, cells in rows:
        result = json.loads(read(f"{path}.json"))
        medians = {row["plan"]: row["ms_per_step"]["median"] for row in result["rows"]}
        for plan, cell in zip(plans, cells.split("|"), strict=True):
            assert abs(float(cell.strip("* ")) - medians[plan]) < 0.06, (path, plan)


def test_the_demo_printed_this() -> None:
    source = f"output: {DEMO.relative_to(ROOT).as_posix()}"
    for block in (block for block in blocks(TRANSLATOR) if block.source == source):
        printed = iter(DEMO.read_text(encoding="utf-8").splitlines())
        for line in block.lines:
            assert line == "…" or line in printed  # in order: `in` reads on from the line before


def test_the_demo_model_translated_so() -> None:
    (block,) = (
        b for b in blocks(TRANSLATOR) if b.text.startswith("$ headrace translate runs/demo")
    )
    command, answer = block.lines
    sentence = shlex.split(command)[-1]
    demo = DEMO.read_text(encoding="utf-8")
    assert f"  {sentence}\n= {answer}\n> {answer}\n" in demo


def test_the_changed_loop_trains_the_same_weights() -> None:
    (diff,) = (block for block in blocks(ENGINE) if block.language == "diff")
    before = "\n".join(line[1:] for line in diff.lines if line[0] in " -")
    after = "\n".join(line[1:] for line in diff.lines if line[0] in " +")

    def weights(code: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        names: dict[str, Any] = {
            "cross_entropy": torch.nn.functional.cross_entropy,
            "device": "cpu",
            "loader": [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(5)],
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }
        exec(code, names)
        return list(model.parameters())

    assert all(map(torch.equal, weights(before), weights(after)))


def test_the_waits_are_those_of_a_hundred_steps_of_10_ms() -> None:
    with FakeDevice(costs=Costs(kernel_us=0, copy_us=0, query_us=0)) as device:

        def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            device.work(10.0, "step")
            return model(batch).sum()  # type: ignore[no-any-return]

        def loader() -> Iterator[torch.Tensor]:
            for _ in range(100):
                device.host_work(0.5, "load")
                yield torch.ones(4, 1).pin_memory()

        model = torch.nn.Linear(1, 1).to(device.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = hr.Engine(model, optimizer, loss, plan="pipeline", device=device)
        table = engine.epoch(loader()).waits.table()
    assert output(ENGINE, "ledger").text.strip("\n") == table.strip("\n")


def test_deferred_losses_in_a_loop_of_ones_own() -> None:
    logged: list[tuple[int, float]] = []
    exec(
        only(ENGINE, "deferred = ").text,
        {
            "hr": hr,
            "device": "cpu",
            "loader": [torch.tensor(float(i)) for i in range(25)],
            "train_step": lambda batch: batch * 2,
            "log": lambda step, value: logged.append((step, value)),
        },
    )
    assert logged == [(i, 2.0 * i) for i in range(25)]


def test_streams_and_events_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"hr": hr, "slot": torch.zeros(4), "staging": torch.ones(4)}
    exec(only(ENGINE, "device = ").text.replace('"auto"', '"cpu"'), names)
    assert names["slot"].sum() == 4
    assert "epoch_end" in capsys.readouterr().out


def test_the_race_is_reported_in_these_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "test_prefetch.py"
    path.write_text(only(TESTING, "import torch\n\ndef prefetch").text, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    with fake_cuda(check=False) as device:
        names["test_prefetch"](device)
    found = race_report(device.findings()).splitlines()

    def shown(lines: list[str]) -> list[str]:  # without this file's line, which the columns follow
        return [" ".join(line.split()) for line in lines if __file__ not in line]

    assert shown(output(TESTING, "race").text.strip("\n").splitlines()) == shown(found)
