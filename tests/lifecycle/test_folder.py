"""Run folders: names, who gets which, what is in them, and the lock."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import RunError
from headrace.lifecycle import RunFolder
from headrace.lifecycle import folder as run_folder
from headrace.schema import read_yaml
from support.storage.run_folders import create_many

spawning = multiprocessing.get_context("spawn")
needs_flock = pytest.mark.skipif(find_spec("fcntl") is None, reason="needs flock")


# --- names ---------------------------------------------------------------------------------------


def test_without_a_name_the_first_free_of_exp(tmp_path: Path) -> None:
    project = tmp_path / "runs" / "train"
    assert [RunFolder.create(project).name for _ in range(3)] == ["exp", "exp2", "exp3"]
    (project / "exp4").write_text("a file is in the way too")
    (project / "exp5").symlink_to("nowhere")
    assert RunFolder.create(project).path == project / "exp6"


def test_the_default_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.create().path == Path("runs/train/exp")
    assert (tmp_path / "runs/train/exp").is_dir()


def test_where_things_are(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "small")
    files = ("config", "weights", "state", "metrics", "events", "report")
    assert [getattr(folder, file).relative_to(tmp_path).as_posix() for file in files] == [
        "small/config.yaml",
        "small/weights",
        "small/state",
        "small/metrics.jsonl",
        "small/tensorboard",
        "small/report.html",
    ]
    assert folder.weights.is_dir()
    assert folder.state.is_dir()


@pytest.mark.parametrize(
    ("name", "free"), [("small", "small2"), ("lr1e-4", "lr1e-4-2"), ("exp", "exp2")]
)
def test_a_name_that_is_taken(tmp_path: Path, name: str, free: str) -> None:
    folder = RunFolder.create(tmp_path, name)
    with pytest.raises(RunError, match=f"{name}: already exists; choose a free name: {free}$"):
        RunFolder.create(tmp_path, name)
    folder.write_config({})
    RunFolder.create(tmp_path, free)
    with pytest.raises(RunError, match=rf"already exists; resume it with --resume .*{name}, or"):
        RunFolder.create(tmp_path, name)


BAD_NAMES = [
    *("", ".", "..", "../up", "a/b", "/abs", "a\\b", "C:x", "\0", "a\0b", ".hidden", " a", "a "),
    *("a\nb", "a\x1b[2J", "\ud800", "a\u2028b", "x" * 201, "é" * 101),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="is not a valid run name: it ") as raised:
        RunFolder.create(tmp_path / "project", name)
    assert str(raised.value).isprintable()
    assert not (tmp_path / "project").exists()


def test_a_name_must_be_text(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="7 is not a valid run name: it is not text"):
        RunFolder.create(tmp_path, 7)  # type: ignore[arg-type]


@given(name=st.text(max_size=30) | st.text("./\\:~ a-\0", max_size=8))
@example(name="~")
@example(name="-rf")
@example(name="实验 1")
@example(name="lr=3e-4,σ")
def test_a_name_is_a_folder_in_the_project_or_an_error(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    project = tmp_path_factory.mktemp("project")
    try:
        folder = RunFolder.create(project, name)
    except RunError:
        assert list(project.iterdir()) == []
    else:
        assert folder.path.resolve().parent == project.resolve()
        assert [entry.name for entry in project.iterdir()] == [name]


def test_a_project_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunError, match="file: is a file; expected a folder for new runs"):
        RunFolder.create(file)
    with pytest.raises(RunError, match="cannot create a run folder there"):
        RunFolder.create(file / "below")
    with pytest.raises(RunError, match="cannot create a run folder there"):
        RunFolder.create(str(tmp_path / "nul\0"))


def test_runs_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    barrier, made = spawning.Barrier(2), spawning.Queue()
    processes = [
        spawning.Process(target=create_many, args=(tmp_path, barrier, made)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    names = made.get(timeout=100) + made.get(timeout=100)
    for process in processes:
        process.join()
    assert sorted(names) == sorted(["exp", *(f"exp{number}" for number in range(2, 41))])


# --- opening --------------------------------------------------------------------------------------


def test_open_what_was_created(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with pytest.raises(RunError, match=r"exp: is not a run folder \(it has no config.yaml\)$"):
        RunFolder.open(folder.path)
    folder.write_config({"epochs": 3})
    assert RunFolder.open(str(folder.path)) == folder


def test_open_says_what_may_have_been_meant(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="gone: does not exist; expected the folder of an earlier"):
        RunFolder.open(tmp_path / "gone")
    with pytest.raises(RunError, match="nul\0: does not exist"):
        RunFolder.open("nul\0")
    for name, written_s in (("new", 2000), ("old", 1000)):
        folder = RunFolder.create(tmp_path, name)
        folder.write_config({})
        os.utime(folder.config, (written_s, written_s))
    with pytest.raises(RunError, match=r"did you mean .*/new, its newest run\?"):
        RunFolder.open(tmp_path)
    weights = folder.weights / "last.pt"
    weights.write_bytes(b"")
    with pytest.raises(RunError, match=r"last.pt: is a file; .* did you mean .*/old\?"):
        RunFolder.open(weights)
    with pytest.raises(RunError, match=r"weights: is not a run folder .* did you mean .*/old\?"):
        RunFolder.open(folder.weights)


# --- the configuration ----------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(config=st.dictionaries(st.text(max_size=10), PLAIN, max_size=5))
@example(config={"\x85": "\u2028a\n\r\ud800\U0001f600\ufeff"})
@example(config={"lr": 1e-5, "on": "off", "names": ["数据", "1e-5", "~", "2020-01-01"]})
def test_a_configuration_comes_back_as_it_was(
    config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    try:
        folder.write_config(config)
    except RunError:
        assert not folder.config.exists()
    else:
        assert read_yaml(folder.config, RunError) == config
        assert os.listdir(folder.path) == ["config.yaml"]  # noqa: PTH208 (names alone)


def test_a_configuration_keeps_its_order_and_has_no_anchors(tmp_path: Path) -> None:
    folder, shared = RunFolder(tmp_path), [1, 2]
    folder.write_config({"z": shared, "a": shared, "文": "字"})
    assert folder.config.read_text(encoding="utf-8") == "z:\n- 1\n- 2\na:\n- 1\n- 2\n文: 字\n"


def test_a_value_that_is_not_plain_leaves_the_old_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config({"epochs": 3})
    endless: list[Any] = []
    endless.append(endless)
    for value in (object(), tmp_path, endless):
        with pytest.raises(RunError, match=r"config.yaml: the configuration cannot be written"):
            folder.write_config({"value": value})
    assert read_yaml(folder.config, RunError) == {"epochs": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\nc: [}\n", r"config.yaml:3: is not YAML \("),
        (b"a: 1\n\tb: 2\n", r"config.yaml:2: is not YAML \("),
        (b"a: 1\nb: \xff\n", r"config.yaml:2: is not UTF-8 text"),
        (b"a: \x01\n", r"config.yaml: is not YAML \("),
        (b"when: 2020-99-99\n", r"config.yaml: has a value that cannot be read"),
        (b"", "config.yaml: expected a mapping, found nothing"),
        (b"- 1\n", "config.yaml: expected a mapping, found a list"),
        (b"!!python/object:os.system {}\n", r"config.yaml:1: is not YAML \("),
        (b"[" * 1200, "config.yaml: is nested too deeply"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_bytes(content)
    with pytest.raises(RunError, match=message) as raised:
        read_yaml(folder.config, RunError)
    assert "\n" not in str(raised.value)


def test_a_configuration_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"config.yaml: cannot be read \(No such file"):
        read_yaml(RunFolder(tmp_path).config, RunError)


# --- the lock -------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from headrace.lifecycle.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


@needs_flock
def test_a_lock_is_given_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        holder = f"process {os.getpid()} on .* is training in this folder"
        with folder.locked(), pytest.raises(RunError, match=holder):
            folder.locked().__enter__()
    with pytest.raises(ZeroDivisionError), folder.locked():
        _ = 1 / 0
    with folder.locked():
        pass


@needs_flock
def test_another_process_holds_the_lock_until_it_dies(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(RunError, match=f"process {other.pid} on .* is training in this folder"):
            folder.locked().__enter__()
        other.send_signal(signal.SIGKILL)
        other.wait()
        with folder.locked():
            pass


def _hold_on(pipe: Any) -> None:
    pipe.send("up")
    pipe.recv()


@needs_flock
def test_a_forked_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A loader's worker may outlive a trainer that was killed: the run can still be resumed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    folder = RunFolder(tmp_path)
    worker = context.Process(target=_hold_on, args=(theirs,), daemon=True)
    lock = run_folder._lock(tmp_path)
    worker.start()
    assert ours.recv() == "up"
    with pytest.raises(RunError, match="is training in this folder"):
        folder.locked().__enter__()
    lock._close()  # as when the process dies: nothing is unlocked on purpose
    with folder.locked():
        assert worker.is_alive()
    ours.send("go")
    worker.join()


@needs_flock
def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with RunFolder(tmp_path).locked():
        assert "cannot be locked (Operation not supported)" in caplog.text


def test_a_full_disk_can_still_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(RunError, match="another process is training in this folder"),
    ):
        RunFolder(tmp_path).locked().__enter__()


def test_only_a_run_that_has_not_trained_is_removed(tmp_path: Path) -> None:
    for name in ("weights/last.safetensors", "state/step-1", "metrics.jsonl"):
        folder = RunFolder.create(tmp_path)
        (folder.path / name).touch()
        folder.remove_if_untrained()
        assert (folder.path / name).exists()
    folder = RunFolder.create(tmp_path)
    with folder.locked():
        folder.write_config({})
        folder.remove_if_untrained()
    assert not folder.path.exists()


def test_a_folder_that_is_gone_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\.lock: cannot be opened \(No such file"):
        RunFolder(tmp_path / "gone").locked().__enter__()
