"""Both READMEs: each block runs on the CPU, or is part of a committed result.

A block of output follows a line that says where it comes from: `<!-- output: … -->` or
`<!-- bench: RESULT.json -->`. All other blocks are commands or code.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import headrace as hr
from headrace.cli import app
from headrace.fake import Costs, FakeDevice, fake_cuda
from headrace.races import race_report
from support.paths import BENCHMARKS, ROOT

READMES = ("README.md", "README.zh-CN.md")
DEMO = BENCHMARKS / "results" / "2026-11-16-cpu-demo.txt"
_BLOCK = re.compile(r"(?:<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `source` is what the line before says about its origin."""

    source: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _BLOCK.finditer(read(name))]


def only(name: str, start: str, language: str = "python") -> Block:
    """The one block in this language that begins so."""
    (block,) = (b for b in blocks(name) if b.language == language and b.text.startswith(start))
    return block


def output(name: str, source: str) -> Block:
    (block,) = (block for block in blocks(name) if block.source == f"output: {source}")
    return block


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
    assert set(kinds) == {
        *(("", "console"), ("", "diff"), ("", "python"), ("output", ""), ("bench", "console"))
    }
    assert kinds.count(("", "diff")) == 1
    assert kinds.count(("", "python")) == 3
    assert kinds.count(("output", "")) == 3


def test_both_have_the_same_blocks() -> None:
    english, chinese = ([without_comments(b.text) for b in blocks(name)] for name in READMES)
    assert english == chinese


def test_both_have_the_same_figures_in_their_tables() -> None:
    def figures(name: str) -> list[list[str]]:
        rows = (line for line in read(name).splitlines() if line.startswith("| "))
        return [sorted(re.findall(r"\d[\d,.]*\d|\d", row)) for row in rows]

    for english, chinese in itertools.zip_longest(*map(figures, READMES)):
        # Numbers that only one language writes as digits: "twelve", "two".
        words = {"1", "2", "4", "12"}
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
        else:
            assert first == "headrace"
            program.commands[second].make_context(second, rest)  # type: ignore[attr-defined]


def test_scripts_that_are_named_are_there(readme: str) -> None:
    scripts = set(re.findall(r"`python (\S+\.py)", read(readme)))
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_bench_output_is_that_of_the_committed_result() -> None:
    """If this fails because the output has changed: `python docs/readme_bench.py`."""
    spec = importlib.util.spec_from_file_location("readme_bench", ROOT / "docs/readme_bench.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in READMES:
        assert script.BLOCK.search(read(name))
        assert script.with_bench_blocks(read(name)) == read(name)


def test_the_table_of_milliseconds_is_that_of_the_committed_results(readme: str) -> None:
    (head,) = re.findall(r"^\| \S+ \| (`baseline` .*Accelerate) \|$", read(readme), re.MULTILINE)
    plans = [plan.strip("` ").lower() for plan in head.split("|")]
    rows = re.findall(r"^\| .*\((\S+bench\S+)\.html\).*?\| (\d.*) \|$", read(readme), re.MULTILINE)
    assert len(rows) == 4
    for path, cells in rows:
        result = json.loads(read(f"{path}.json"))
        medians = {row["plan"]: row["ms_per_step"]["median"] for row in result["rows"]}
        for plan, cell in zip(plans, cells.split("|"), strict=True):
            assert abs(float(cell.strip("* ")) - medians[plan]) < 0.06, (path, plan)


def test_the_demo_printed_this(readme: str) -> None:
    printed = iter(DEMO.read_text(encoding="utf-8").splitlines())
    for line in output(readme, DEMO.relative_to(ROOT).as_posix()).lines:
        assert line == "…" or line in printed  # in order: `in` reads on from the line before


def test_the_demo_model_translated_so(readme: str) -> None:
    (block,) = (b for b in blocks(readme) if b.text.startswith("$ headrace translate runs/demo"))
    command, answer = block.lines
    sentence = shlex.split(command)[-1]
    demo = DEMO.read_text(encoding="utf-8")
    assert f"  {sentence}\n= {answer}\n> {answer}\n" in demo


def test_the_changed_loop_trains_the_same_weights(readme: str) -> None:
    (diff,) = (block for block in blocks(readme) if block.language == "diff")
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


def test_the_waits_are_those_of_a_hundred_steps_of_10_ms(readme: str) -> None:
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
    assert output(readme, "ledger").text.strip("\n") == table.strip("\n")


def test_deferred_losses_in_a_loop_of_ones_own(readme: str) -> None:
    logged: list[tuple[int, float]] = []
    exec(
        only(readme, "deferred = ").text,
        {
            "hr": hr,
            "device": "cpu",
            "loader": [torch.tensor(float(i)) for i in range(25)],
            "train_step": lambda batch: batch * 2,
            "log": lambda step, value: logged.append((step, value)),
        },
    )
    assert logged == [(i, 2.0 * i) for i in range(25)]


def test_streams_and_events_by_hand(readme: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"hr": hr, "slot": torch.zeros(4), "staging": torch.ones(4)}
    exec(only(readme, "device = ").text.replace('"auto"', '"cpu"'), names)
    assert names["slot"].sum() == 4
    assert "epoch_end" in capsys.readouterr().out


def test_the_race_is_reported_in_these_words(
    readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "test_prefetch.py"
    path.write_text(only(readme, "import torch").text, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    with fake_cuda(check=False) as device:
        names["test_prefetch"](device)
    found = race_report(device.findings()).splitlines()

    def shown(lines: list[str]) -> list[str]:  # without this file's line, which the columns follow
        return [" ".join(line.split()) for line in lines if __file__ not in line]

    assert shown(output(readme, "race").text.strip("\n").splitlines()) == shown(found)
