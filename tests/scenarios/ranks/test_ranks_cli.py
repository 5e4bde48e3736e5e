"""`torchrun -m headrace train`: two processes on the CPU, from the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from headrace.translation import Trainer, TrainSettings
from support.processes.forked import run_python

TORCHRUN = "from torch.distributed.run import main; main()"
SMALL: dict[str, Any] = {
    "preset": "tiny",
    "width": 16,
    "heads": 2,
    "layers": 1,
    "inner": 32,
    "dropout": 0.0,
    "vocabulary": 300,
    "max_length": 24,
    "warmup": 10,
    "beam": 1,
    "valid_sentences": 4,
    "device": "cpu",
    "tensorboard": False,
}
# `headrace …` in which one rank does something after so many batches.
DOES = """
import os, signal, sys, time
from headrace.engine import Engine
from headrace.lifecycle.signals import StopRequests
steps, handle, handled = Engine.steps, StopRequests._handle, []
def counted(self, *args, **options):
    for number, info in enumerate(steps(self, *args, **options), 1):
        yield info
        if number == {batches} and os.environ["RANK"] == "1":
            {what}
def noted(self, *args):
    handle(self, *args)
    handled.append(1)
def stop_all():
    os.kill(os.getppid(), signal.SIGTERM)  # torchrun, which passes it on to its ranks
    while not handled:
        time.sleep(0.01)
def die_when_saved(state):
    while not any(name.startswith("step-") for name in os.listdir(state)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
Engine.steps, StopRequests._handle = counted, noted
from headrace.cli import main
sys.argv[0] = "headrace"
main()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    numbers = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    lines = [
        f"{words[a]} and {words[b]} or {words[c]}\t{numbers[a]} und {numbers[b]} oder {numbers[c]}"
        for a in range(10)
        for b in range(5)
        for c in range(4)
    ]
    # 2 are held out, 99 are left.
    (folder / "pairs.tsv").write_text("\n".join(lines[:101]) + "\n", encoding="utf-8")
    return folder


def small(corpus: Path, **changes: Any) -> dict[str, Any]:
    """14 batches of 7 sentences, and one of 1: that leaves one of two ranks without any."""
    told = {"data": str(corpus / "pairs.tsv"), "src": "en", "trg": "de", "sentences": 7}
    return {**SMALL, **told, "epochs": 2, "save_every": 0, **changes}


def options(settings: dict[str, Any]) -> list[str]:
    """Settings as they are typed."""
    typed = [str(settings["data"])] if "data" in settings else []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            typed.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != "data":
            typed += [f"--{flag}", str(value)]
    return typed


def torchrun(ranks: int, *told: object, script: Path | None = None) -> Any:
    program = ["-m", "headrace"] if script is None else [script]
    return run_python(TORCHRUN, "--standalone", "--nproc-per-node", ranks, *program, *told)


def epochs(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "epoch", "loss", "valid_loss")
    return [{name: line[name] for name in kept} for line in lines if line["kind"] == "epoch"]


def assert_same_run(found: Path, expected: Path) -> None:
    """The same losses and weights to rounding: gradients were summed in another order."""
    one, other = epochs(found), epochs(expected)
    assert len(one) == len(other)
    for line, wanted in zip(one, other, strict=True):
        assert line == pytest.approx(wanted, abs=1e-4)
    ours, theirs = (load_file(run / "weights" / "last.safetensors") for run in (found, expected))
    assert ours.keys() == theirs.keys()
    # Adam turns the rounding of a tiny gradient into a step of up to its rate.
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 2e-3


def nobody_works_on(folder: Path) -> bool:
    for process in psutil.process_iter(["cmdline", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and process.pid != os.getpid() and str(folder) in str(process.info["cmdline"]):
            return False
    return True


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process, to the end."""
    project = tmp_path_factory.mktemp("runs")
    settings = TrainSettings.from_dict(small(corpus))
    trainer = Trainer.create(settings, project=project, cache=corpus / "cache", quiet=True)
    return trainer.run().folder.path


def test_the_built_in_corpus_end_to_end(tmp_path: Path) -> None:
    settings = {**SMALL, "max_steps": 6, "valid_sentences": 0}
    places = ["--cache", tmp_path / "cache", "--project", tmp_path / "runs"]
    done = torchrun(2, "train", *options(settings), *places, "--parallel", "fsdp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("6 updates; weights, metrics and state in") == 1  # rank 0 alone
    assert done.stderr.count("2 ranks (fsdp)") == 1
    assert done.stderr.count("epoch 1/") == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "result.json").exists()
    checkpoint = max((run / "state").iterdir())
    assert len(list(checkpoint.glob("tensors-*-of-00002.safetensors"))) == 2


def test_a_rank_that_fails_ends_all_and_is_named(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    what = "raise RuntimeError('the cupboard of this rank is bare')"
    script.write_text(DOES.format(batches=3, what=what))
    places = ["--cache", corpus / "cache", "--project", tmp_path / "runs"]
    told = options(small(corpus, workers=1))
    done = torchrun(2, "train", *told, *places, script=script)
    assert done.returncode != 0
    assert "RuntimeError: the cupboard of this rank is bare" in done.stderr
    assert "This was rank 1." in done.stderr
    assert "rank      : 1 (local_rank: 1)" in done.stderr  # torchrun's own root cause
    assert nobody_works_on(tmp_path)


def test_sigterm_saves_on_all_ranks_and_one_process_goes_on(
    corpus: Path, tmp_path: Path, undisturbed: Path
) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(DOES.format(batches=5, what="stop_all()"))
    places = ["--cache", corpus / "cache", "--project", tmp_path / "runs", "--name", "stopped"]
    told = options(small(corpus, save_every=1e6))
    done = torchrun(2, "train", *told, *places, script=script)
    assert done.returncode != 0
    # Wished between the 4th and the 8th update, sent at the 8th, learnt by all at the 12th.
    assert done.stderr.count("stopped by SIGTERM after 12 updates") == 1, done.stderr
    assert nobody_works_on(tmp_path)
    run = tmp_path / "runs" / "stopped"
    assert [path.name for path in (run / "state").iterdir()] == ["step-00000012"]
    Trainer.resume(run, cache=corpus / "cache", quiet=True).run()
    assert_same_run(run, undisturbed)


def test_killed_on_two_ranks_and_resumed_on_three(
    corpus: Path, tmp_path: Path, undisturbed: Path
) -> None:
    script = tmp_path / "killed.py"
    state = str(tmp_path / "runs" / "killed" / "state")
    script.write_text(DOES.format(batches=13, what=f"die_when_saved({state!r})"))
    places = ["--cache", corpus / "cache", "--project", tmp_path / "runs", "--name", "killed"]
    done = torchrun(2, "train", *options(small(corpus)), *places, script=script)
    assert done.returncode != 0
    assert "exitcode  : -9" in done.stderr
    run = tmp_path / "runs" / "killed"
    # If torchrun asked for the exit status first, no rank knows the signal, but its summary does.
    named = re.findall(r"error: .*(?:rank 1 .* was killed by SIGKILL|ended: rank 1).*", done.stderr)
    assert len(named) == 1, done.stderr
    assert f"resume with: headrace train --resume {run}" in named[0]
    assert "another rank" not in done.stderr
    assert list((run / "state").glob("step-*"))
    assert not epochs(run)
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("parallel: ddp", "parallel: fsdp")
    )
    done = torchrun(3, "train", "--resume", run, "--cache", corpus / "cache", "--quiet")
    assert done.returncode == 0, done.stderr
    assert_same_run(run, undisturbed)
