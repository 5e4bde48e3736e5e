"""`headrace bench` as it is typed: exit codes, stdout and stderr, files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from headrace.bench.machine_lock import MachineLock
from headrace.cli import app
from headrace.cli.bench import _progress_on
from headrace.cli.output import results_only
from headrace.errors import BenchError, HeadraceError
from headrace.progress import StatusLine
from headrace.records import BenchResult
from support.processes.forked import HEADRACE, Forked, run_python
from support.processes.terminals import Terminal, new_console
from support.training.devices import needs_cuda

QUICK = ["--steps", "3", "--repeats", "2", "--warmup", "1", "--watch", "0", "--compare", "3"]
SMALL = ["--set", "batch=4", "--set", "width=8", "--set", "layers=1"]

WORK = """
import torch

def make_work():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    def loss(model, batch):
        calls.append(1)
        if len(calls) == {at}:
            raise ValueError("too much")
        return model(batch).mean()
    return model, optimizer, loss, [torch.ones(2, 3)]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *QUICK, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_table_and_a_file(here: Path) -> None:
    code, out, err = run("--work", "mlp", *SMALL, "--plans", "baseline,pipeline,pipeline")
    assert code == 0
    assert "1 layers of 8, 4 rows: 2 × 3 steps on CPU" in out
    for plan, losses in (("baseline", "reference"), ("pipeline#2", "identical")):
        assert re.search(rf"^ {plan} .* {losses}$", out, re.MULTILINE)
    assert max(len(line) for line in out.splitlines()) <= 120
    assert "not measured here: GPU busy time" in out
    assert "measured twice, differs by" in out
    found = re.search(r"wrote (runs/bench/mlp-.*\.json)\n", err)
    assert found is not None
    result = BenchResult.read(here / found[1])
    assert [row.plan for row in result.rows] == ["baseline", "pipeline", "pipeline#2"]
    assert result.settings.steps == 3
    assert "round 2 of 2" in err
    assert "\x1b" not in err


def test_json_and_quiet(here: Path) -> None:
    code, out, err = run("--work", "mlp", *SMALL, "--json", "--quiet", "--out", "r.json")
    assert code == 0
    content = json.loads(out)
    assert content == json.loads((here / "r.json").read_text())
    assert content["rows"][0]["plan"] == "baseline"
    assert err == "wrote r.json\n"


def test_a_failing_work_is_exit_code_1(here: Path) -> None:
    (here / "failing_here.py").write_text(WORK.format(at=3))
    code, out, _ = run("--work", "failing_here:make_work", "--plans", "baseline,event")
    assert code == 1
    assert "baseline failed: step 3: ValueError: too much" in out
    assert f"{here / 'failing_here.py'}:11)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--work", "nowhere_at_all:make_work"], "no module 'nowhere_at_all'"),
        (["--work", "mlp", "--plans", "grph"], "no plan 'grph' (did you mean 'graph'?)"),
        (["--work", "mlp", "--set", "layers=x"], "mlp: layers = 'x': expected a whole number"),
        (["--work", "mlp", "--peers", "lightening"], "no peer 'lightening'"),
        (["--work", "mlp", "--device", "cuda:77"], "no device 'cuda:77'"),
    ],
)
def test_what_is_wrong_is_one_line(here: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        run(*arguments)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--set", "batch"], ["--precision", "fp8"], ["--no-such-option"]],
)
def test_usage_is_exit_code_2(here: Path, arguments: list[str]) -> None:
    assert run("--work", "mlp", *arguments)[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--plans", "nosuch"], ["--peers", "foo"], ["--work", "nosuch"], ["--set", "foo=3"]),
        *(["--work", "mlp", "--set", "batch=abc"], ["--out", "."]),
    ],
)
def test_what_is_typed_wrong_is_exit_code_2(here: Path, arguments: list[str]) -> None:
    with pytest.raises(HeadraceError) as caught:
        run(*arguments)
    assert caught.value.exit_code == 2


def test_losses_that_are_not_finite_are_not_the_same(here: Path) -> None:
    work = WORK.format(at=0).replace(".mean()", ".mean() * float('nan')")
    (here / "never.py").write_text(work)
    code, out, _ = run("--work", "never:make_work", "--plans", "baseline,pipeline")
    assert code == 1
    assert "the same losses" not in out
    assert "baseline's loss is not finite at step 1" in out


def test_a_work_that_ends_the_program_is_told(here: Path) -> None:
    (here / "quits.py").write_text("def make_work():\n    raise SystemExit(3)\n")
    with pytest.raises(BenchError, match=r"quits.py:2: quits:make_work raised SystemExit: 3"):
        run("--work", "quits:make_work")


def test_a_place_that_cannot_be_written_to_is_told_before_measuring(here: Path) -> None:
    (here / "file").write_text("")
    for out, told in (("file/r.json", "cannot be written"), (".", "is a folder")):
        with pytest.raises(HeadraceError, match=f"{re.escape(out)}: {told}"):
            run("--work", "no such work either", "--out", out)


def test_what_was_measured_is_written_even_if_it_cannot_be_printed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str) -> None:
        raise HeadraceError("the result could not be written to stdout")

    monkeypatch.setattr("headrace.cli.bench.print_line", fail)
    arguments = ["bench", "--device", "cpu", *QUICK, "--work", "mlp", *SMALL, "--out", "r.json"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, HeadraceError)
    assert json.loads(Path("r.json").read_text(encoding="utf-8"))


def test_what_was_measured_is_printed_even_if_it_cannot_be_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: BenchResult, path: Path) -> None:
        raise BenchError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(BenchResult, "write", full)
    arguments = ["bench", "--device", "cpu", *QUICK, "--work", "mlp", *SMALL, "--out", "r.json"]
    result = CliRunner().invoke(app, arguments)
    assert "No space left" in str(result.exception)
    assert " pipeline " in result.stdout


def test_missing_peers_say_how_to_get_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HeadraceError, match="lightning is not installed; run pip install"):
        run("--work", "mlp", "--peers", "lightning")


def test_a_cpu_gets_smaller_built_in_works(here: Path) -> None:
    _, out, err = run("--work", "translation", "--plans", "baseline", "--set", "length=5")
    assert "no GPU: training a smaller translation, Transformer tiny, 8 sentences × 5 tokens" in err
    assert "Transformer tiny" in out


def test_help_says_what_a_work_is() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "100"})
    assert "def make_work():" in result.stdout
    assert "return model, optimizer, loss, loader" in result.stdout


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_prints_the_rows_so_far(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    expected: int,
    to_all: bool,
) -> None:
    """In a process of its own: the signal comes once the first round is over, to the command or, as
    from a terminal or from Slurm, to the process in which it measures as well."""
    many = ["--steps", "50", "--repeats", "100000", "--warmup", "1", "--watch", "0"]
    which = ["--work", "mlp", *SMALL, "--device", "cpu", "--plans", "baseline,pipeline"]
    os.mkfifo(tmp_path / "stderr")
    monkeypatch.chdir(tmp_path)
    process = Forked(
        HEADRACE, "bench", *which, "--out", "r.json", *many, stderr=tmp_path / "stderr"
    )
    until = time.monotonic() + 60
    with (tmp_path / "stderr").open() as lines:
        for line in lines:
            if line.startswith("round 3 ") or time.monotonic() > until:
                break
        children = psutil.Process(process.pid).children()
        assert children
        process.send_signal(number)
        for child in children if to_all else ():
            child.send_signal(number)
        lines.read()
    try:
        assert process.wait(60) == expected
    finally:
        process.kill()
    out = process.stdout.read_text()
    assert "interrupted: these are the results so far" in out
    assert re.search(r"^ pipeline .* identical$", out, re.MULTILINE)
    assert BenchResult.read(tmp_path / "r.json").interrupted


ENDING = """
import os, signal
import torch

def make_work(workers=0, how="", at=0):
    if how == "while it is built":
        os._exit(3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    def loss(model, batch):
        calls.append(1)
        if workers == 7 and len(calls) == at:  # a number that only one of the plans sets
            if how == "context":  # a failed assertion on the device ends the CUDA context
                return model(batch[torch.full((1,), 99, device=batch.device)]).mean()
            os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV)
        return model(batch).mean()
    return model, optimizer, loss, [torch.ones(2, 3)]
"""


def run_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, at: int, device: str = "cpu"
) -> Any:
    """`headrace bench` in a process of its own, with a plan that ends it."""
    monkeypatch.chdir(folder)
    (folder / "ending.py").write_text(ENDING)
    (folder / "ending.yaml").write_text("plan: event\nloader: {workers: 7}\n")
    which = ["--work", "ending:make_work", "--set", f"how={how}", "--set", f"at={at}"]
    plans = ["--plans", "baseline,ending.yaml,pipeline", "--device", device, "--out", "r.json"]
    return run_python(HEADRACE, "bench", *which, *plans, *QUICK)


@pytest.mark.parametrize(
    ("how", "at", "told"),
    [
        ("signal", 2, "ended the process (SIGSEGV) while comparing losses"),
        ("exit", 6, "ended the process (exit code 3) while timing"),
    ],
)
def test_a_plan_that_ends_the_process_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, at: int, told: str
) -> None:
    done = run_ending(tmp_path, monkeypatch, how, at)
    assert done.returncode == 1, done.stderr
    assert f"event failed: {told}" in " ".join(done.stdout.split())
    assert f"event {told}; measuring goes on without it" in " ".join(done.stderr.split())
    result = BenchResult.read(tmp_path / "r.json")
    assert not result.interrupted
    for plan in ("baseline", "pipeline"):
        row = result.row(plan)
        assert row.agrees
        assert row.ms_per_step is not None
        assert len(row.ms_per_step.repeats) == 2
    # What was compared and timed is kept.
    assert done.stderr.count("comparing losses of baseline") == 1


@pytest.mark.parametrize("device", [needs_cuda])
def test_a_plan_that_ends_the_cuda_context_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    done = run_ending(tmp_path, monkeypatch, "context", 6, device)
    assert done.returncode == 1, done.stderr
    result = BenchResult.read(tmp_path / "r.json")
    why = result.row("event").error
    assert why is not None
    assert why.startswith("ended the device's context (step ")
    assert "device-side assert" in why
    for plan in ("baseline", "pipeline"):
        row = result.row(plan)
        assert row.agrees
        assert row.ms_per_step is not None
        assert len(row.ms_per_step.repeats) == 2


def test_a_workload_that_ends_the_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_ending(tmp_path, monkeypatch, "while it is built", 0)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: the workload ended the process (exit code 3) while it was built" in done.stderr


def test_what_was_measured_before_a_kill_is_stored_and_can_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ["--steps", "5", "--repeats", "100000", "--warmup", "1", "--watch", "0"]
    which = ["--work", "mlp", *SMALL, "--device", "cpu", "--plans", "baseline,pipeline"]
    os.mkfifo(tmp_path / "stderr")
    monkeypatch.chdir(tmp_path)
    each_turn = "from headrace.bench import turns\nturns.STORING_SHARE = 1\n"
    bench = Forked(each_turn + HEADRACE, "bench", *which, *many, stderr=tmp_path / "stderr")
    try:
        with (tmp_path / "stderr").open() as lines:
            assert any(line.startswith("round 3 ") for line in lines)
            bench.kill()
            lines.read()  # until its child has ended, too
    finally:
        bench.kill()
    (stored,) = (tmp_path / "runs/bench").glob("*.json")
    result = BenchResult.read(stored)
    assert result.interrupted
    for row in result.rows:
        assert row.ms_per_step is not None
        assert len(row.ms_per_step.repeats) >= 2
    reported = CliRunner().invoke(app, ["report", str(stored)])
    assert reported.exit_code == 0, reported.output


def test_another_benchmark_is_named_and_need_not_be_waited_for(
    here: Path,
) -> None:
    with MachineLock(lambda others: None, command="headrace bench --work other") as lock:
        lock.begin_measuring()
        code, out, _ = run("--work", "mlp", *SMALL, "--plans", "baseline", "--no-wait")
    assert code == 0
    assert "an idle machine; another benchmark ran beside this one" in " ".join(out.split())


def test_progress_is_one_line_with_the_time_left() -> None:
    terminal = Terminal()
    with StatusLine(console=new_console(terminal)) as line:
        show = _progress_on(line)
        show("round 1 of 2", 0.0, None)
        assert terminal.screen() == ["round 1 of 2"]
        show("round 2 of 2", 0.5, 12.3)
        assert terminal.screen() == ["round 2 of 2, about 12 s left"]
    assert terminal.screen() == [""]


NOISY = """
import atexit, ctypes, os, sys
import torch
from torch.utils.data import DataLoader, Dataset

C = ctypes.CDLL(None)
kept = sys.stdout                                # a reference from before anything was redirected

def say(where):
    print("noise: print in", where)
    kept.write(f"noise: kept stdout in {where}\\n")
    os.write(1, f"noise: descriptor 1 in {where}\\n".encode())
    C.printf(f"noise: C in {where}\\n".encode())      # stays in the C library's buffer

say("import")
atexit.register(say, "exit")

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        say("a worker")
        return torch.full((3,), float(index))

def make_work():
    say("make_work")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(model, batch):
        say("the loss")
        return model(batch).mean()
    return model, optimizer, loss, DataLoader(Data(), batch_size=4, num_workers=1)
"""


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_json_is_all_that_is_on_stdout_whatever_the_work_prints(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    few = QUICK if command == "bench" else ["--steps", "2", "--repeats", "1", "--warmup", "1"]
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "headrace", command, "--json", "--device", "cpu", *few),
            *("--work", "noisy:make_work", "--plans", "baseline,pipeline"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["work"]["name"] == "noisy:make_work"
    for where in ("import", "make_work", "the loss", "a worker", "exit"):
        for what in ("print", "kept stdout", "descriptor 1", "C"):
            assert f"noise: {what} in {where}" in ran.stderr


def test_stdout_comes_back_after_the_work(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with results_only():
            print("inside")
            os.write(1, b"inside, too\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    print("after")
    os.write(1, b"after, too\n")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["after", "after, too"]
    assert sorted(err.splitlines()) == ["inside", "inside, too"]


OPTIONS = """
import torch

def make_work(
    rows=4, rate=0.1, name="x", exact=False, anything=None, workers=2, prefetch_factor=2,
    seed=0, typed: "int | None" = None,
):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    def loss(model, batch):
        return model(batch).mean()
    assert workers == 0, f"workers is {workers}"
    return model, optimizer, loss, [torch.ones(rows, 3)]
"""
WRONG = [
    ("rwos=3", "no option 'rwos' (did you mean 'rows'?)"),
    ("rows=abc", "rows = 'abc': expected a whole number"),
    ("rows=2.5", "rows = 2.5: expected a whole number"),
    ("rows=true", "rows = True: expected a whole number"),
    ("rows=", "rows = None: expected a whole number"),
    ("rate=fast", "rate = 'fast': expected a number"),
    ("name=7", """name = 7: expected text"""),
    ("exact=1", "exact = 1: expected true or false"),
    ("typed=x", "typed = 'x': expected a whole number or null"),
    ("seed=3", "seed cannot be set: --seed sets it"),
]


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(("given", "told"), WRONG)
def test_a_wrong_option_of_a_work_of_ones_own_is_exit_code_2(
    here: Path, command: str, given: str, told: str
) -> None:
    (here / "of_options.py").write_text(OPTIONS)
    which = ["--work", "of_options.py:make_work", "--device", "cpu", "--set", given]
    found = CliRunner().invoke(app, [command, *which])
    assert isinstance(found.exception, HeadraceError)
    assert told in str(found.exception)
    assert found.exception.exit_code == 2
    assert not (here / "runs").exists()


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize("work", ["mlp", "of_options.py:make_work"])
@pytest.mark.parametrize("given", ["batch=[1", "batch", "=3", "a: b: c=1: 2: 3"])
def test_an_option_that_cannot_be_read_is_exit_code_2(
    here: Path, command: str, work: str, given: str
) -> None:
    (here / "of_options.py").write_text(OPTIONS)
    found = CliRunner().invoke(app, [command, "--work", work, "--device", "cpu", "--set", given])
    assert found.exit_code == 2 or getattr(found.exception, "exit_code", None) == 2


@pytest.mark.parametrize("given", ["preset=huge", "batch=0", "workers=-1", "pin=true"])
def test_so_is_one_that_a_built_in_work_does_not_know(here: Path, given: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        run("--work", "translation", "--set", given)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("work", ["mlp", "of_options.py:make_work"])
def test_workers_may_be_none(here: Path, work: str) -> None:
    (here / "of_options.py").write_text(OPTIONS)
    code, out, _ = run("--work", work, "--set", "workers=0", "--plans", "baseline", "--json")
    assert code == 0
    assert json.loads(out)["work"]["options"]["workers"] == 0


def test_a_value_that_is_missing_is_exit_code_2(here: Path) -> None:
    (here / "needs.py").write_text("def make_work(rows):\n    pass\n")
    with pytest.raises(HeadraceError, match="needs a value for rows: expected --set rows=") as it:
        run("--work", "needs.py:make_work")
    assert it.value.exit_code == 2


STEP = """
import torch
def make_work():
    G, D = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    oG, oD = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    def step(batch):
        return D(G(batch)).mean()
    return {returned}
"""


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("torch.nn.ModuleList([G, D]), [oG, oD], step, [1]", "a list of 2 optimizers"),
        ("[G, D], {'g': oG}, step, [torch.randn(2, 4)]", "a dict of 1 optimizer"),
        ("G, oG, step, [torch.randn(2, 4)] * 4", "a function of the batch alone"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_parts_of_a_step_are_refused_with_what_to_return(
    here: Path, command: str, returned: str, found: str
) -> None:
    (here / "gan.py").write_text(STEP.replace("{returned}", returned))
    which = ["--work", "gan.py:make_work", "--device", "cpu"]
    told = CliRunner().invoke(app, [command, *which]).exception
    assert isinstance(told, BenchError)
    assert f"gan.py:3: gan.py:make_work returned {found}" in str(told)
    assert "return (step, loader)" in str(told)


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_plans_are_not_compared_while_the_environment_replaces_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("HEADRACE_PLAN", "baseline")
    found = CliRunner().invoke(app, [command, "--work", "mlp", "--device", "cpu"]).exception
    assert isinstance(found, HeadraceError)
    assert "unset HEADRACE_PLAN first" in str(found)
    assert found.exit_code == 2
    assert not (here / "runs").exists()


def test_a_module_that_ends_the_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text("import os\nos._exit(5)\n")
    done = run_python(HEADRACE, "bench", "--work", "leaves:make_work", "--device", "cpu", *QUICK)
    assert done.returncode == 1
    assert done.stderr == "error: the process ended (exit code 5) before anything was measured\n"
