"""The command line as a person types it: output, exit codes, and no traceback."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import headrace
from headrace.bench import TuneSettings
from headrace.cli import app
from headrace.device import available_devices
from headrace.plan import PRESETS
from headrace.schema import Checked
from headrace.translation import SECTIONS, TrainSettings
from support.processes.forked import HEADRACE, run_python


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, check=False
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"headrace {headrace.__version__}\n")


def test_ctrl_c_is_said_in_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.plan.presets_table", interrupted)
    done = CliRunner().invoke(app, ["plan"])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "plan" in done.stdout


COMMANDS = [
    "doctor",
    "plan",
    "train",
    "evaluate",
    "translate",
    "export",
    "prepare",
    "bench",
    "tune",
    "races",
    "diagnose",
]


@pytest.mark.parametrize("arguments", [[], *([command] for command in [*COMMANDS, "report"])])
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    """Loading it takes seconds."""
    program = (
        "import sys; from headrace.cli import app; "
        "app(sys.argv[1:], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: " in done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, "report"])
def test_help_is_sentences_with_defaults_and_an_example_in_80_columns(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "\x1b" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert f"$ headrace {command}" in shown.partition("Example")[2]
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    for option in known.params:
        assert option.help[0].isupper() or "," in option.help or " or " in option.help
        assert option.help.endswith((".", "…")), option.help
        if option.default is not None and not option.required:
            assert option.show_default, option.name


@pytest.mark.parametrize("settings", [TrainSettings, TuneSettings])
def test_help_names_every_choice(settings: type[Checked]) -> None:
    hints = typing.get_type_hints(settings)
    for known in dataclasses.fields(settings):
        meaning = known.metadata["meaning"]
        if typing.get_origin(hints[known.name]) is typing.Literal:
            assert all(one in meaning for one in typing.get_args(hints[known.name])), meaning


def test_help_shows_the_defaults_of_settings() -> None:
    shown = " ".join(
        CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).stdout.split()
    )
    for default in ("runs/train", "0.0007", "no-joint", "(set by --preset)", "auto"):
        assert f"[default: {default}]" in shown
    for panel in SECTIONS:
        assert f" {panel}: -" in shown


def test_waiting_threads_sleep_from_when_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP reads its wait policy when PyTorch loads it."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    program = """
import os, sys

class Watch:
    def find_spec(self, name, *others):
        if name == "torch":
            print("policy", os.environ.get("OMP_WAIT_POLICY"), file=sys.stderr)

sys.meta_path.insert(0, Watch())
from headrace.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", "--no-measure"],
        capture_output=True,
        text=True,
    )
    assert "policy PASSIVE" in done.stderr.splitlines()


def test_doctor_says_what_is_here() -> None:
    done = run_python(HEADRACE, "doctor", "--no-measure")
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    for name in available_devices():
        assert f"{name}: " in done.stdout


def test_doctor_json_is_one_object_on_stdout() -> None:
    done = run_python(HEADRACE, "doctor", "--json", "--no-measure")
    content = json.loads(done.stdout)
    assert [device["name"] for device in content["devices"]] == available_devices()
    assert content["healthy"] is (done.returncode == 0)
    assert content["memory_bytes"] > 0
    for finding in content["findings"]:
        assert finding["remedy"]


def test_plan_shows_all_or_one(tmp_path: Path) -> None:
    assert run("plan").stdout.splitlines()[0].split() == ["field", *PRESETS]
    assert run("plan", "event").stdout.startswith("plan event")
    assert json.loads(run("plan", "--json").stdout)["graph"]["graphs"] == "on"
    path = tmp_path / "mine.yaml"
    path.write_text("plan: {preset: pipeline, prefetch_depth: 5}\n")
    assert json.loads(run("plan", str(path), "--json").stdout)["prefetch_depth"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "pipelin"], 2, "error: no plan 'pipelin' (did you mean 'pipeline'?)"),
        (["plan", "missing.yaml"], 2, "error: missing.yaml: cannot be read"),
        (["dcotor"], 2, "No such command 'dcotor'"),
        (["doctor", "--jsn"], 2, "No such option"),
    ],
)
def test_errors_are_one_line_on_stderr(arguments: list[str], code: int, message: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_default_languages_are_noted_for_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"s{n}\tt{n}\n" for n in range(50)))
    arguments = ["prepare", str(tmp_path / "a.tsv"), "--cache", str(tmp_path / "cache")]
    for more, note in (
        ([], "note: --src and --trg are not given: the pairs are taken for zh and en"),
        (["--src", "fr"], "note: --trg is not given: the pairs are taken for fr and en"),
        (["--src", "fr", "--trg", "en"], None),
        (["--quiet"], None),
    ):
        found = CliRunner().invoke(app, [*arguments, *more])
        assert found.exit_code == 0, found.output
        noted = [line for line in found.stderr.splitlines() if line.startswith("note: ")]
        assert noted == ([] if note is None else [note])
