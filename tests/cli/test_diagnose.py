"""`headrace diagnose`: scripts of every kind, on the fake device and on the CPU."""

from __future__ import annotations

import json
import os
import random
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from headrace import diagnosis
from headrace.cli import app
from headrace.errors import ProgramError
from headrace.records import DiagnosisResult
from support.diagnosis.made_traces import Loop
from support.diagnosis.trace_files import STACK, calls_and_work, profiler_steps, reads, write_trace

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch has CUDA here")

SCRIPT = """
    import os, signal, sys, threading, warnings
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def read(loss):
        return loss.item()

    def main(kind, steps):
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(steps):
            loss = (weight * 2).sum()
            optimizer.zero_grad()
            loss.backward()
            if kind != "never":
                optimizer.step()
            read(loss)
            if kind == "fails" and step == steps - 1:
                raise ValueError("the script's own failure")
            if kind == "interrupted" and step == steps - 1:
                raise KeyboardInterrupt
            if kind == "terminated" and step == steps - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "terminated in a worker" and step == 1:
                child = os.fork()
                if child == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                assert os.waitpid(child, 0)[1] == signal.SIGTERM
            if kind == "prints":
                print("line", step)
            if kind == "forks" and step == 1:
                child = os.fork()
                if child == 0:
                    for _ in range(40):
                        optimizer.step()
                    os._exit(0)
                os.waitpid(child, 0)
            if kind == "a child fails" and step == 1:
                child = os.fork()
                if child == 0:
                    raise ValueError("the child's failure")
                os.waitpid(child, 0)
            if kind == "races" and step == steps - 1:
                copies = torch.cuda.Stream()
                with torch.cuda.stream(copies):
                    late = torch.ones(4).pin_memory().cuda(non_blocking=True)
                late.add_(1)
            if kind == "generated":
                exec(compile("loss.item()", "<generated>", "exec"))
            if kind == "catches":
                try:
                    optimizer.step()
                except SystemExit:
                    print("caught")
            if kind == "redirects":
                sys.stdout = sys.stderr = open("log.txt", "w")
            if kind == "silences":
                warnings.simplefilter("ignore")

    if __name__ == "__main__":
        kind, steps = sys.argv[1], int(sys.argv[2])
        sys.argv = ["something", "else"]
        if kind == "interrupted at once":
            raise KeyboardInterrupt
        if kind in ("leaves a thread", "exits at once"):
            waiting = threading.Thread(target=lambda: open("fifo").read())
            waiting.start()
        if kind == "in a thread":
            threading.Thread(target=main, args=(kind, steps)).start()
        else:
            main(kind, steps)
        if kind == "exits at once":
            os._exit(4)
        if kind == "exits":
            sys.exit("an error in a sentence")
        print("done")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["diagnose", *arguments])


ENDED = "diagnose ended {} after 6 steps; with --then continue it runs on\n"
FAST = ("--warmup", "3", "--steps", "3", "--lines", "2")


def test_waits_are_listed_by_line_and_the_script_is_ended(folder: Path) -> None:
    done = run("--fake", *FAST, "train.py", "plain", "1000")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "The host waits for the device 1.0 times a step, at 1 line." in done.stderr
    assert "train.py:8   return loss.item()" in done.stderr
    assert "headrace.DeferredScalars" in done.stderr
    assert "SGD is not fused: pass fused=True" in done.stderr
    assert "backward passes" not in done.stderr  # there is one
    assert done.stderr.endswith(ENDED.format("train.py"))


@pytest.mark.parametrize(
    ("kind", "steps", "exit_code", "sentence"),
    [
        ("never", 5, 0, "never called an optimizer's step()"),
        ("plain", 1, 0, "The script stepped once"),
        ("plain", 4, 0, "ended after 4 steps, too few to measure.\nLet it train for at least 5 "),
        ("fails", 4, 1, "ValueError: the script's own failure"),
        ("exits", 4, 1, "an error in a sentence"),
        ("fails", 3, 1, "The script ended with exit code 1 after 3 steps, too few to measure"),
        ("fails", 1, 1, "after 1 step, too few to measure: its own output says why."),
        ("interrupted", 2, 130, "Ctrl-C ended the script after 2 steps, too few to measure.\n"),
        ("interrupted at once", 2, 130, "Ctrl-C ended the script before its first step.\n"),
        ("interrupted", 9, 130, "The host waits for the device 1.0 times a step"),
        ("terminated", 2, 143, "SIGTERM ended the script after 2 steps, too few to measure.\n"),
        ("terminated", 9, 143, "The host waits for the device 1.0 times a step"),
        ("terminated in a worker", 9, 0, "The host waits for the device 1.0 times a step"),
        ("prints", 9, 0, "The host waits for the device 1.0 times a step"),
        ("forks", 9, 0, "The host waits for the device 1.0 times a step"),
        ("a child fails", 9, 0, "The host waits for the device 1.0 times a step"),
        ("in a thread", 9, 0, "The host waits for the device 1.0 times a step"),
        ("generated", 9, 0, "exec(compile("),
        ("silences", 9, 0, "The host waits for the device 1.0 times a step"),
    ],
)
def test_every_script_has_a_clear_outcome(
    folder: Path, kind: str, steps: int, exit_code: int, sentence: str
) -> None:
    done = run("--fake", *FAST, "--lines", "50", "train.py", kind, str(steps))
    assert done.exit_code == exit_code, done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("The host waits") <= 1
    assert (done.stdout.endswith("done\n")) is (exit_code == 0)


def test_a_script_on_the_cpu_is_timed_and_told_so(folder: Path) -> None:
    done = run(*FAST, "train.py", "plain", "1000")
    assert done.exit_code == 0
    assert "PyTorch found no CUDA device: --fake finds waits and races without one" in done.stderr
    assert (
        "The script trains on the CPU: there is no GPU to keep busy.\nA step takes" in done.stderr
    )


def test_the_script_may_continue(folder: Path) -> None:
    done = run("--fake", *FAST, "--then", "continue", "train.py", "exits", "12")
    assert done.exit_code == 1  # its own
    assert done.stderr.count("The host waits for the device 1.0 times a step") == 1
    assert done.stderr.index("The host waits") < done.stderr.index("an error in a sentence")


def test_the_random_numbers_of_a_script_that_continues_stay_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "draws.py").write_text(
        "import random, torch\n"
        "random.seed(1)\n"
        "optimizer = torch.optim.SGD([torch.ones(1, device='cuda', requires_grad=True)])\n"
        "for _ in range(9): optimizer.step()\n"
        "print(random.random())\n",
        encoding="utf-8",
    )
    formatted = diagnosis.text_of

    def draw(result: DiagnosisResult) -> str:  # as some libraries do when they are loaded
        random.random()
        return formatted(result)

    monkeypatch.setattr(diagnosis, "text_of", draw)
    done = run("--fake", *FAST, "--then", "continue", "draws.py")
    assert done.stdout == f"{random.Random(1).random()}\n"


def test_races_after_the_last_window_count(folder: Path) -> None:
    done = run(
        "--fake", *FAST, "--then", "continue", "--fail-on", "races>0", "train.py", "races", "12"
    )
    assert done.exit_code == 3
    assert "No stream races were found; times need a GPU." in done.stderr  # meanwhile
    assert "1 stream race: `headrace races` shows them." in done.stderr


def test_a_script_that_catches_its_end_is_told_and_runs_on(folder: Path) -> None:
    done = run("--fake", *FAST, "train.py", "catches", "30")
    assert done.stdout == "caught\ndone\n"
    assert done.stderr.count("The host waits for the device") == 1
    assert "the script caught SystemExit, which should end it: it runs on" in done.stderr
    assert "diagnose ended" not in done.stderr


def test_a_thread_that_trains_is_ended_and_one_that_is_left_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("--fake", *FAST, "train.py", "in a thread", "1000")
    assert done.stderr.endswith(ENDED.format("train.py"))
    assert "Traceback" not in done.stderr
    ended: list[tuple[int, bool]] = []

    def end(exit_code: int, *, at_once: bool, has_script_output: bool) -> None:
        ended.append((exit_code, at_once))

    monkeypatch.setattr("headrace.cli.diagnose.end_program", end)
    os.mkfifo("fifo")
    run("--fake", *FAST, "train.py", "leaves a thread", "1000")
    run("--fake", *FAST, "train.py", "exits at once", "5")
    assert ended == [(0, True), (4, True)]
    Path("fifo").write_text("", encoding="utf-8")  # lets them end


def test_only_the_first_rank_prints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("--fake", *FAST, "--html", "page.html", "train.py", "plain", "1000")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert not (folder / "page.html").exists()


def test_a_step_may_be_named_by_its_line(folder: Path) -> None:
    done = run("--fake", *FAST, "--step-line", "train.py:19", "train.py", "never", "30")
    assert "The host waits for the device 1.0 times a step" in done.stderr


@pytest.mark.parametrize("steps", [5, 7, 14])
def test_the_advice_for_a_short_script_works(folder: Path, steps: int) -> None:
    done = run("--fake", "--warmup", "20", "train.py", "plain", str(steps))
    assert f"ended after {steps} steps, too few to measure." in done.stderr
    advice = done.stderr.rpartition("steps, or pass ")[2].partition(".")[0].split()
    done = run("--fake", *advice, "train.py", "plain", str(steps))
    assert "The host waits for the device 1.0 times a step" in done.stderr, advice


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        (
            "train.py:25",
            "train.py:25 never ran; the nearest line of that file that ran is train.py:26.\n"
            "Name a line that runs once per step: --step-line FILE:LINE.\n",
        ),
        ("other.py:1", "other.py:1 never ran, nor did any other line of that file.\n"),
        ("train.py:76", "The script ran train.py:76 once: there is no repeating step"),
    ],
)
def test_a_step_line_that_never_runs_is_told(folder: Path, line: str, sentences: str) -> None:
    (folder / "other.py").write_text("x = 1\n", encoding="utf-8")
    done = run("--fake", *FAST, "--step-line", line, "train.py", "plain", "9")
    assert (done.exit_code, done.stdout) == (0, "done\n")
    assert sentences in done.stderr


def test_a_loop_that_never_begins_is_told(folder: Path) -> None:
    (folder / "empty.py").write_text("for batch in ():\n    print(batch)\n", encoding="utf-8")
    done = run("--fake", *FAST, "--step-line", "empty.py:1", "empty.py")
    assert "The body of the loop at empty.py:1 never ran.\n" in done.stderr


@pytest.mark.parametrize("then", ["stop", "continue"])
def test_a_script_may_redirect_its_output(folder: Path, then: str) -> None:
    done = run("--fake", *FAST, "--then", then, "train.py", "redirects", "30")
    assert "The host waits for the device 1.0 times a step" in done.stderr
    assert (folder / "log.txt").read_text() == ("done\n" if then == "continue" else "")


def test_blocking_launches_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    done = run("--fake", *FAST, "train.py", "plain", "9")
    assert "CUDA_LAUNCH_BLOCKING is set: the host waits for every kernel" in done.stderr


def test_a_script_without_an_optimizer_steps_with_backward(folder: Path) -> None:
    done = run("--fake", *FAST, "train.py", "never", "5")
    assert "never called an optimizer's step(), but backward() 5 times." in done.stderr
    advice = done.stderr.rpartition("name that line: ")[2].strip().removesuffix(".").split()
    assert advice == ["--step-line", "train.py:16"]
    assert "1.0 times a step" in run("--fake", *FAST, *advice, "train.py", "never", "5").stderr
    done = run("--fake", *FAST, "train.py", "never", "90")
    assert "The host waits for the device 1.0 times a step" in done.stderr
    assert "no optimizer step was seen: each backward pass counts as a step" in done.stderr


def test_an_option_behind_the_script_is_told(folder: Path) -> None:
    text = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (folder / "parses.py").write_text(text, encoding="utf-8")
    done = run("--fake", "parses.py", "--html=page.html", "--lr", "3")
    assert done.exit_code == 2
    assert done.stderr.endswith(
        "parses.py got --html=page.html, which comes after it: an option of diagnose goes before "
        "the script\n"
    )
    assert "comes after it" not in run("--fake", "parses.py", "--lr", "3").stderr
    text = """if True:
        import torch
        weight = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(5):
            weight.sum().backward()
            optimizer.step()
    """
    (folder / "ignores.py").write_text(text, encoding="utf-8")
    done = run(*FAST, "ignores.py", "--fake")
    assert done.exit_code == 0
    assert "trains on the CPU" in done.stderr
    assert "ignores.py got --fake, which comes after it" in done.stderr


def test_json_and_limits(folder: Path) -> None:
    done = run("--fake", *FAST, "--json", "--fail-on", "waits>0.5", "train.py", "plain", "99")
    assert done.exit_code == 3
    assert "--fail-on: waits is 1 (> 0.5)" in done.stderr
    result = DiagnosisResult.from_dict(json.loads(done.stdout))
    assert (result.outcome, result.waits_per_step, result.races) == ("lines only", 1.0, 0)
    (line,) = result.lines
    assert line.line is not None
    assert (line.line.file, line.line.line, line.form) == ("train.py", 8, "item")
    assert run("--fake", *FAST, "--fail-on", "waits>1", "train.py", "plain", "99").exit_code == 0


def test_what_was_not_measured_exceeds_every_limit(folder: Path) -> None:
    done = run("--fake", *FAST, "--fail-on", "lines>9", "train.py", "plain", "3")
    assert done.exit_code == 3
    assert "--fail-on: lines could not be measured in this run" in done.stderr
    (folder / "on_cpu.py").write_text(
        (folder / "train.py").read_text(encoding="utf-8").replace('"cuda" if', '"cpu" if'),
        encoding="utf-8",
    )
    done = run("--fake", *FAST, "--fail-on", "waits>9", "on_cpu.py", "plain", "99")
    assert done.exit_code == 3
    assert "The script trains on the CPU" in done.stderr


def test_a_thread_that_trains_may_have_somebody_waiting(folder: Path) -> None:
    script = (folder / "train.py").read_text(encoding="utf-8")
    script = script.replace("args=(kind, steps)).start()", "args=(kind, steps)).start(); WAIT")
    script = script.replace("WAIT", "threading.Event().wait()")
    (folder / "waits.py").write_text(script, encoding="utf-8")
    done = run("--fake", *FAST, "waits.py", "in a thread", "1000")
    assert done.stderr.endswith(ENDED.format("waits.py"))


def test_the_report_is_written(folder: Path) -> None:
    done = run("--fake", *FAST, "--html", "page.html", "train.py", "plain", "99")
    assert done.exit_code == 0
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "return loss.item()" in page
    assert "The host waits for the device 1.0 times a step" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "nothing.py: no such file; expected a Python script"),
        (["-m", "nothing.at.all"], "nothing.at.all: no such module"),
        (["--fail-on", "idle>20", "train.py"], "expected conditions such as waits>2 or idle>20%"),
        (["--fail-on", "speed>2", "train.py"], "speed>2: expected conditions"),
        (["--step-line", "train.py", "train.py"], "train.py: expected a file and a line"),
        (["--html", ".", "train.py"], "is a folder; expected the path of a file"),
    ],
)
def test_a_mistyped_command_is_an_error(folder: Path, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert message in str(done.exception)
    assert done.exception.exit_code == 2  # type: ignore[union-attr]


# --- a trace instead of a script ------------------------------------------------------------------


def made_trace(folder: Path) -> Path:
    made = Loop(reads=1, steps=4).run()
    events = calls_and_work(made), profiler_steps(made), reads(made, *STACK)
    return write_trace(folder / "trace.json.gz", *events)


def test_a_trace_is_read_shown_and_stored(tmp_path: Path) -> None:
    page, stored = tmp_path / "page.html", tmp_path / "result.json"
    options = ["--html", str(page), "--out", str(stored), "--fail-on", "waits>2"]
    ended = CliRunner().invoke(app, ["diagnose", *options, str(made_trace(tmp_path))])
    assert ended.exit_code == 0, ended.output
    assert "A step takes 4.1 ms; the GPU computes for 4.0 ms" in ended.stdout
    assert ".item() in log()" in ended.stdout
    assert f"report: {page}" in ended.stderr
    assert DiagnosisResult.read(stored).environment.device_name == "Made GPU"
    text = page.read_text()
    assert "Made GPU" in text
    assert ".item() in log()" in text
    assert "timeline" in text


def test_limits_hold_for_a_trace(tmp_path: Path) -> None:
    trace = str(made_trace(tmp_path))
    ended = CliRunner().invoke(app, ["diagnose", "--json", "--fail-on", "waits>=1,races>0", trace])
    assert ended.exit_code == 3
    assert json.loads(ended.stdout)["waits_per_step"] == 1.0
    assert "--fail-on: waits is 1 (>= 1)" in ended.stderr
    assert "--fail-on: races could not be measured" in ended.stderr


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (["--fake"], [], "--fake does not go with"),
        (["--step-line", "a.py:3"], [], "--step-line does not go with"),
        ([], ["--json"], "--json: expected a trace; options go before"),
        ([], ["none.json"], "none.json: cannot be read"),
    ],
)
def test_what_a_trace_has_no_use_for_is_an_error(
    tmp_path: Path, before: list[str], after: list[str], words: str
) -> None:
    trace = str(made_trace(tmp_path))
    ended = CliRunner().invoke(app, ["diagnose", *before, trace, *after])
    assert isinstance(ended.exception, ProgramError)
    assert ended.exception.exit_code == 2
    assert words in str(ended.exception)


# --- two results ----------------------------------------------------------------------------------


def stored(folder: Path, name: str, step_ms: float) -> str:
    path = folder / name
    DiagnosisResult(step_ms=step_ms, noise_ms=0.1).write(path)
    return str(path)


def test_two_results_are_compared(tmp_path: Path) -> None:
    files = [stored(tmp_path, "before.json", 10.0), stored(tmp_path, "after.json", 12.0)]
    out = tmp_path / "compared.json"
    ended = CliRunner().invoke(app, ["diagnose", "--compare", "--out", str(out), *files])
    assert ended.exit_code == 0
    assert "20.0% ±1.4% slower." in ended.stdout
    assert json.loads(out.read_text())["kind"] == "headrace diagnosis comparison"
    failed = ["diagnose", "--compare", "--json", "--fail-on", "slower>3%", *files]
    ended = CliRunner().invoke(app, failed)
    assert ended.exit_code == 3
    assert json.loads(ended.stdout)["slower"] == pytest.approx(0.2)
    assert "--fail-on: slower is 20 % (> 3 %)" in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fail-on", "idle>3%"], "idle>3%: expected conditions such as slower>3%"),
        (["--html", "page.html"], "--html does not go with"),
        (["more.json"], "--compare: found 3 files; expected two results"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    tmp_path: Path, options: list[str], words: str
) -> None:
    files = [stored(tmp_path, "before.json", 10.0), stored(tmp_path, "after.json", 12.0)]
    ended = CliRunner().invoke(app, ["diagnose", "--compare", *options, *files])
    assert isinstance(ended.exception, ProgramError)
    assert ended.exception.exit_code == 2
    assert words in str(ended.exception)
