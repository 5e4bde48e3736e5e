"""Exit codes of all commands: 2 for what is typed wrong, 1 for what fails while working."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import CheckpointError, HeadraceError, RunError, usage_errors
from support.storage.saved_runs import write_run

TYPED_WRONG = [
    "plan nope",
    "plan missing.yaml",
    "plan bad.yaml",
    "plan a b",
    "doctor --jsn",
    "diagnose",
    "diagnose missing.py",
    "diagnose --fail-on waits>many pairs.tsv",
    "races",
    "races missing.py",
    "races --jsn train.py",
    "dcotor",
    "run",
    "run missing.py",
    "run --only nope bad.tsv",
    "watch",
    "watch missing",
    "train --lr -1",
    "train --epochs many",
    "train missing.tsv",
    "train empty",
    "train pairs.tsv --src en --trg en",
    "train --src xx",
    "train --plan nope",
    "train --plan missing.yaml",
    "train --config missing.yaml",
    "train --config bad.yaml",
    "train --device nope",
    "train --device cuda:77",
    "train --weights missing.safetensors",
    "train --name a/b",
    "train --project pairs.tsv",
    "train --cache pairs.tsv",
    "train --resume missing",
    "train --resume empty",
    "train --resume tuned",
    "train --resume run --lr 3",
    "evaluate missing",
    "evaluate empty",
    "evaluate pairs.tsv",
    "evaluate tuned",
    "evaluate run missing.tsv",
    "evaluate run empty",
    "evaluate run --split nope",
    "evaluate run --split test --cache cache",
    "evaluate run --weights worst",
    "evaluate run --weights missing.safetensors",
    "evaluate run --beam 0",
    "evaluate run --device nope",
    "evaluate run --cache pairs.tsv",
    "translate missing x",
    "translate empty x",
    "translate run --file missing.txt",
    "translate run --file empty",
    "translate run --file bad.yaml x",
    "translate run x --weights worst",
    "translate run x --beam 0",
    "translate run x --device nope",
    "translate run \udcff",
    "prepare missing.tsv",
    "prepare empty",
    "prepare --src xx",
    "prepare pairs.tsv --src en --trg en",
    "prepare --vocabulary 5",
    "prepare --max-length 1",
    "prepare --cache pairs.tsv",
    "bench --work nope",
    "bench --work nowhere_at_all:make_work",
    "bench --work missing.py:make_work",
    "bench --work own.py:nothing",
    "bench --work :",
    "bench --work mlp --plans nope",
    "bench --work mlp --device nope",
    "bench --work mlp --out empty",
    "tune --work nope",
    "tune --work nowhere_at_all:make_work",
    "tune --work own.py:nothing",
    "tune --work own.py:make_work --workers 0,2",
    "tune --work mlp --plans nope",
    "tune --work mlp --device nope",
    "tune --work mlp --project pairs.tsv",
    "tune --work mlp --name a/b",
    "tune --resume missing",
    "tune --resume empty",
    "report missing",
    "report empty",
    "report pairs.tsv",
    "report run --out empty",
    "report run --perfetto traces",
    "export missing",
    "export tuned",
    "export run --to nope",
    "export run --out empty",
    "export run --out pairs.tsv/model",
    "export run --weights worst",
    "export run --cache pairs.tsv",
]
FAILS = [
    "prepare bad.tsv --src en --trg de --cache cache",
    "evaluate run bad.tsv",
    "evaluate damaged good.tsv",
    "translate damaged x",
    "translate run x --weights pairs.tsv.safetensors",
    "translate run --file latin1.txt",
    "bench --work breaks.py:make_work --device cpu",
    "bench --work failing.py:make_work --device cpu --steps 1 --repeats 1 --watch 0",
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    write_run(folder)
    (folder / "other").mkdir()
    write_run(folder / "other")
    (folder / "other" / "run").rename(folder / "damaged")
    weights = folder / "damaged" / "weights" / "best.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for name in ("empty", "tuned"):
        (folder / name).mkdir()
    (folder / "tuned" / "plan.yaml").write_text("plan: {preset: event}\n")
    (folder / "bad.yaml").write_text("plan: {nope: 1}\n")
    (folder / "bad.tsv").write_text("one\ttwo\nthree\n")
    (folder / "good.tsv").write_text("one\ttwo\n")
    (folder / "latin1.txt").write_bytes(b"one\ntw\xf6\n")
    (folder / "pairs.tsv.safetensors").write_text("one\ttwo\n")
    (folder / "own.py").write_text("def make_work():\n    pass\n")
    (folder / "breaks.py").write_text("import nowhere_at_all\n")
    (folder / "failing.py").write_text("def make_work():\n    raise ValueError('too much')\n")
    return folder


def outcome(command: str) -> tuple[int, Any]:
    """The exit code that the program would end with, and its exception."""
    found = CliRunner().invoke(app, command.split(" "))
    if isinstance(found.exception, HeadraceError):
        assert "\n" not in str(found.exception)
        return found.exception.exit_code, found.exception
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_what_is_typed_wrong_is_2_and_what_fails_is_1(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    before = sorted(path.name for path in here.iterdir())
    for expected, commands in ((2, TYPED_WRONG), (1, FAILS)):
        codes = {command: outcome(command) for command in commands}
        assert {c: found for c, found in codes.items() if found[0] != expected} == {}
        if expected == 2:  # no run was begun
            made = {path.name for path in here.iterdir()} - set(before)
            assert made <= {"cache", "__pycache__"}


def test_every_command_is_in_the_table() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert names <= {line.split()[0] for line in TYPED_WRONG}


def test_damage_and_full_disks_are_no_usage_errors() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for cause, problem, code in (
        (None, RunError("no such run"), 2),
        (FileNotFoundError(errno.ENOENT, "missing"), RunError("cannot be opened"), 2),
        (full, RunError("cannot be written"), 1),
        (None, CheckpointError("is damaged"), 1),
    ):
        with pytest.raises(HeadraceError) as caught, usage_errors():
            raise problem from cause
        assert caught.value.exit_code == code
    assert RunError.exit_code == 1  # the class keeps its own
