"""A command that is killed (`kill -9`) leaves no process behind, not even one that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.processes.forked import HEADRACE, Forked
from support.translation.trainers import SMALL

# Runs `headrace …` as the leader of a session, so that all its processes can be found.
LEADER = "import os, sys; os.setsid(); sys.path.insert(0, os.getcwd())\n"
STUCK = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

def stuck(*_):
    open("reached", "w").close()
    while True:
        time.sleep(60)

class Stuck(Dataset):
    __getitem__ = stuck
    def __len__(self):
        return 8

def make_work(workers=1):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stuck(), num_workers=1)
    return model, optimizer, lambda model, batch: model(batch).mean(), loader

def train():
    model, optimizer, loss, loader = make_work()
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step()
"""
WORKER = """
import stuck
from headrace.translation.corpus import loader
loader.ignore_foreign_sigterm = stuck.stuck  # what a worker calls first
"""
# `sentencepiece` and `torch`, as the child finds them.
SPM = """
import sentencepiece
from headrace.translation.corpus import sentencepiece_trainer
sentencepiece_trainer._IN_PROCESS_CHARACTERS = 0
open("sentencepiece.py", "w").write("import stuck; stuck.stuck()")
"""
DOCTOR = """
import importlib, pathlib
from headrace.machine import doctor

class AMX:
    exists = lambda self: True
    read_text = lambda self, **options: "amx_bf16"

doctor.Path = lambda path: AMX()
open("torch.py", "w").write("import time; open('reached', 'w'); time.sleep(600)")
"""
SETTINGS = {name: value for name, value in SMALL.items() if name != "tensorboard"}
TRAIN = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
WORK = ["--work", "stuck:make_work", "--device", "cpu", "--plans", "baseline"]
#: What is run before each command, and its arguments.
COMMANDS = {
    "train": (WORKER, [*TRAIN, "--workers=1", "--no-tensorboard", "--data=pairs.tsv"]),
    "prepare": (SPM, ["pairs.tsv", "--src=en", "--trg=de", "--vocabulary=300"]),
    "bench": ("", WORK),
    "tune": ("", WORK),
    "diagnose": ("", ["--fake", "script.py"]),
    "races": ("", ["script.py"]),
    "doctor": (DOCTOR, []),
}


def session(leader: int) -> list[int]:
    """Its processes that still run."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def within(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.02)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_left_of_a_killed_command(
    command: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, arguments = COMMANDS[command]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("pairs.tsv").symlink_to(corpus / "pairs.tsv")
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "script.py").write_text("import stuck; stuck.train()")
    leader = Forked(LEADER + before + HEADRACE, command, *arguments)
    try:
        for _ in within(60):
            if Path("reached").exists() or leader.poll() is not None:
                break
        assert leader.poll() is None, leader.stderr.read_text()
        assert Path("reached").exists()
        assert len(session(leader.pid)) > 1
        leader.kill()
        leader.wait(10)
        assert any(not session(leader.pid) for _ in within(10))
    finally:
        for pid in session(leader.pid):
            os.kill(pid, signal.SIGKILL)
