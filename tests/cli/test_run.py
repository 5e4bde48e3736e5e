"""`headrace run` as a command: its script has the process, and stderr tells about the parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app

PYTHON = sys.executable
# Without PyTorch, a process takes a tenth of a second.
SCRIPT = """
    import atexit, multiprocessing, os, signal, sys, threading

    def child(queue):
        queue.put(__name__)

    if __name__ == "__main__":
        import __main__
        print(__file__, sys.argv, sys.path[0], sorted(vars(__main__)), sys.stdout.errors)
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ))
        atexit.register(print, "at exit")
        what = sys.argv[1]
        if what == "fail":
            try:
                raise ValueError("the first")
            except ValueError as problem:
                raise KeyError("the second") from problem
        if what == "exit":
            sys.exit("a message")
        if what == "os._exit":
            try:
                print("not flushed")
                os._exit(5)
            finally:
                print("never")
        if what == "thread":
            thread = threading.Thread(target=print, args=("in a thread",))
            thread.start()
        if what == "tee":
            sys.stdout = open("tee.txt", "w")
            print("in the file")
        if what == "characters":
            print("\\ud800")
        if what == "children":
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get())
                process.join()
            sys.stdout.flush()
            if os.fork() == 0:
                sys.exit(7)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
        if hasattr(signal, what):
            try:
                os.kill(os.getpid(), getattr(signal, what))
            finally:
                print("handled")
"""
ENDS = ["", "fail", "exit", "os._exit", "thread", "tee", "characters", "children", "SIGINT"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("NAME = 'inner'\n", encoding="utf-8")
    inner = "from . import NAME\nimport sys\nprint(NAME, __spec__.name, sys.argv, sys.path[0])\n"
    (tmp_path / "package" / "train.py").write_text(inner, encoding="utf-8")
    interrupted = "import os, signal\nprint('begun')\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "interrupted.py").write_text(interrupted, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(*command: str, **options: Any) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and stderr without our lines."""
    done = subprocess.run(
        [PYTHON, *command], capture_output=True, text=True, timeout=60, check=False, **options
    )
    error = [line for line in done.stderr.splitlines() if not line.startswith("headrace")]
    return done.returncode, done.stdout, error


@pytest.mark.parametrize("what", [*ENDS, "SIGTERM"])
def test_a_script_ends_as_with_python(folder: Path, what: str) -> None:
    plain = ended("script.py", what)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert ended("-m", "headrace", "run", "script.py", what) == plain
    now = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert now == files


def test_ctrl_c_under_fake_ends_a_script_as_with_python(folder: Path) -> None:
    assert ended("-m", "headrace", "run", "--fake", "interrupted.py") == ended("interrupted.py")


def test_modules_run_as_with_python(folder: Path) -> None:
    for command in (["-m", "package.train", "--x"], ["-m", "package.train"]):
        assert ended("-m", "headrace", "run", *command) == ended(*command)


def test_a_closed_pipe_ends_a_script_as_with_python(folder: Path) -> None:
    (folder / "many.py").write_text("for _ in range(10_000): print('x' * 80)", encoding="utf-8")
    found = []
    for command in ([], ["-m", "headrace", "run"]):
        child = subprocess.Popen(
            [PYTHON, *command, "many.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        lines = [one for one in child.stderr if not one.startswith("headrace")]
        child.stderr.close()
        found.append((child.wait(), lines))
    assert found[0] == found[1]


def test_one_line_says_that_nothing_was_done(folder: Path) -> None:
    for rank, said in (("0", "headrace: script.py has not imported PyTorch: nothing was done\n"),
                       ("1", "")):  # fmt: skip
        done = subprocess.run(
            [PYTHON, "-m", "headrace", "run", "script.py", ""],
            env=dict(os.environ, RANK=rank),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == said


TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(8):
        x = torch.randn(6, 4, device="cuda")
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", "--fake", "--after", "2", *arguments])


@pytest.fixture
def training(folder: Path) -> Path:
    (folder / "train.py").write_text(textwrap.dedent(TRAINING), encoding="utf-8")
    return folder


def test_the_closing_table_and_the_report(training: Path) -> None:
    done = run("--report", "run.html", "train.py")
    assert (done.exit_code, done.stdout) == (0, "trained\n")
    lines = done.stderr.splitlines()
    assert lines[0] == "headrace: Sequential (train.py:10) is replayed as a graph from now on"
    assert lines[1] == "headrace: SGD (train.py:11) is replayed as a graph from now on"
    assert lines[-1] == "report: run.html"
    page = (training / "run.html").read_text(encoding="utf-8")
    assert "Sequential" in page
    assert "train.py:11" in page


def test_json_has_stdout_to_itself(training: Path) -> None:
    done = run("--json", "train.py")
    content = json.loads(done.stdout)
    assert content["kind"] == "headrace run"
    assert [part["name"] for part in content["parts"]] == ["Sequential", "SGD"]
    assert "trained\n" in done.stderr


def test_wrong_options_are_usage_errors(folder: Path) -> None:
    for arguments, said in (
        (("--only", "models", "script.py"), "--only models: expected model, optimizer, data"),
        (("--plan", "max", "script.py"), "--plan max: expected auto or graph"),
        (("none.py",), "none.py: no such file"),
        (("--report", "package", "script.py"), "package: is a folder"),
    ):
        done = CliRunner().invoke(app, ["run", *arguments])
        assert done.exit_code != 0
        assert said in str(done.exception)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_difference_is_exit_code_4(training: Path) -> None:
    """A model that reads a file, which no comparison before a replay sees."""
    script = """
        import pathlib
        file = pathlib.Path("scale")
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.read = net, file.read_text
            def forward(self, x):
                return self.body(x) * float(self.read())
        model = Net().cuda()
        for step in range(8):
            file.write_text("1.0" if step < 5 else "2.0")
            model(torch.randn(6, 4, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    head = textwrap.dedent(TRAINING).partition("for step")[0]
    (training / "file.py").write_text(head + textwrap.dedent(script), encoding="utf-8")
    done = run("--check", "5", "file.py")
    assert done.exit_code == 4
    assert "no: output 0, replay 4" in done.stderr
    assert run("--check", "2", "file.py").exit_code == 0
