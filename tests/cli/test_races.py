"""`headrace races`: the program's own output and exit code, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.records import RacesResult

PROGRAM = """
    import sys
    import torch
    import beside

    def main(step):
        copies = torch.cuda.Stream()
        x = torch.ones(4).pin_memory()
        with torch.cuda.stream(copies):
            y = x.cuda(non_blocking=True)
        if step != "race":
            torch.cuda.current_stream().wait_stream(copies)
        y.add_(1)
        if step == "fail":
            raise ValueError("the program's own failure")
        if step == "exit":
            sys.exit(7)
        print(beside.NAME, y.sum().item(), sys.argv)

    if __name__ == "__main__":
        main(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "beside.py").write_text("NAME = 'beside'", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("program", "beside"):  # as a program has imported them
        sys.modules.pop(name, None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["races", *arguments])


def test_a_program_without_races_keeps_its_output_and_exit_code(folder: Path) -> None:
    done = run("program.py", "right", "--json")  # the program's own argument
    assert (done.exit_code, done.stderr) == (0, "0 races found\n")
    assert done.stdout == "beside 8.0 ['program.py', 'right', '--json']\n"
    done = run("-m", "program", "exit")
    end = "the program ended with exit code 7: only what it did until then was checked"
    assert (done.exit_code, done.stderr) == (7, f"0 races found\n{end}\n")
    done = run("program.py", "fail")
    assert done.exit_code == 1
    first, second, *_ = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second.endswith('program.py", line 21, in <module>')
    assert "ValueError: the program's own failure\n0 races found\n" in done.stderr


def test_what_a_program_prints_as_it_ends_is_its_output(folder: Path) -> None:
    text = "import atexit\natexit.register(print, 'goodbye')\nprint('hello')\n"
    (folder / "ends.py").write_text(text, encoding="utf-8")
    headrace = (sys.executable, "-m", "headrace")
    for command in (("races",), ("diagnose", "--fake")):
        run = partial(subprocess.run, capture_output=True, text=True, timeout=120)
        done = run([*headrace, *command, "ends.py"])
        assert (done.returncode, done.stdout) == (0, "hello\ngoodbye\n")
        done = run([*headrace, *command, "--json", "ends.py"])
        assert json.loads(done.stdout)["exit_code"] == 0
        assert "hello\n" in done.stderr
        assert done.stderr.endswith("goodbye\n")


def test_races_are_reported_with_exit_code_1(folder: Path) -> None:
    done = run("--html", "races.html", "program.py", "race")
    assert done.exit_code == 1
    assert done.stdout.startswith("beside 8.0")
    assert done.stderr.startswith("1 race found\n")
    assert "program.py:10 in main  y = x.cuda(non_blocking=True)\n" in done.stderr
    assert "program.py:21          main(sys.argv[1])\n" in done.stderr
    assert "torch.cuda.current_stream().wait_stream(copies) before program.py:13" in done.stderr
    assert done.stderr.endswith("report: races.html\n")
    assert "<h1>1 race found</h1>" in (folder / "races.html").read_text(encoding="utf-8")


REPLAYS = """
    import torch
    import headrace as hr

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scale, side = torch.ones((), device="cuda"), torch.cuda.Stream()

    @hr.graphed
    def step(x):
        optimizer.zero_grad()
        loss = (model(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(6):
        x = torch.randn(8, 6, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        if number > 3:
            with torch.cuda.stream(side):
                scale.fill_(0.5)
        step(x)
    print(step.report().replays, step.report().why)
"""


def test_a_replay_that_races_is_reported_at_the_line_of_its_call(folder: Path) -> None:
    (folder / "replays.py").write_text(textwrap.dedent(REPLAYS), encoding="utf-8")
    done = run("replays.py")
    assert (done.exit_code, done.stdout) == (1, "3 None\n")
    first, second = done.stderr.split("  second:")
    assert first.startswith("1 race found\n")
    assert "replays.py:23  scale.fill_(0.5)\n" in first
    assert second.splitlines()[1:4] == [
        "      replays.py:24          step(x)",
        "      replays.py:13 in step  loss = (model(x) * scale).square().mean()",
        "  missing: torch.cuda.current_stream().wait_stream(side) before replays.py:24",
    ]


@pytest.mark.parametrize(
    ("code", "end"),
    [(130, "raise KeyboardInterrupt"), (143, "signal.raise_signal(signal.SIGTERM)")],
)
def test_an_interrupt_reports_what_was_found_until_then(folder: Path, code: int, end: str) -> None:
    ending = f"import program, signal\nprogram.main('race')\n{end}"
    (folder / "interrupted.py").write_text(ending, encoding="utf-8")
    done = run("interrupted.py")
    assert done.exit_code == 1
    assert done.stderr.startswith("1 race found\n")
    assert f"exit code {code}: only what it did until then was checked\n" in done.stderr


def test_json_is_one_object_on_stdout(folder: Path) -> None:
    done = run("--json", "program.py", "race")
    assert done.exit_code == 1
    result = RacesResult.from_dict(json.loads(done.stdout))
    (race,) = result.races
    assert (result.program, result.exit_code, race.kind) == ("program.py", 0, "write-write")
    assert (race.first.where, race.second.where) == ("copies", "default")
    assert race.second.lines[0].text == "y.add_(1)"
    assert (race.first.lines[0].file, race.first.lines[0].line) == ("program.py", 10)
    assert race.tensor.endswith("device memory, allocated at program.py:10")
    assert "beside 8.0" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "nothing.py: no such file; expected a Python script, or -m and a module"),
        (["--html", ".", "program.py"], "is a folder; expected the path of a file"),
        (["-m", "nothing.at.all"], "nothing.at.all: no such module"),
    ],
)
def test_a_mistyped_command_is_an_error(folder: Path, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert message in str(done.exception)
    assert done.exception.exit_code == 2  # type: ignore[union-attr]


def test_a_program_that_uses_no_device_is_not_called_free_of_races(folder: Path) -> None:
    (folder / "host.py").write_text("import torch\nprint(torch.ones(2).sum())", encoding="utf-8")
    done = run("host.py")
    assert done.exit_code == 0
    assert done.stderr == "the program put no work on the CUDA device: nothing was checked\n"


def test_streams_in_a_list_are_named_by_their_place(folder: Path) -> None:
    program = """
        import torch
        streams = [torch.cuda.Stream() for _ in range(2)]

        def main():
            both = streams
            with torch.cuda.stream(both[0]):
                x = torch.ones(4, device="cuda")
            with torch.cuda.stream(both[1]):
                x.add_(1)

        main()
    """
    (folder / "several.py").write_text(textwrap.dedent(program), encoding="utf-8")
    done = run("several.py")
    assert done.exit_code == 1
    assert "missing: both[1].wait_stream(both[0]) before several.py:10" in done.stderr
