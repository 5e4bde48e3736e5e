"""A crash or a disk error at any point of a save loses no older checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import atomic_files
from headrace.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from headrace.errors import CheckpointError
from support.paths import TESTS
from support.processes.forked import run_python
from support.storage.checkpoints import SAVES, contents, example, flip, names, same

# --- crashes --------------------------------------------------------------------------------------


# Leaves, for each kind of save, one folder for each call at which the process died.
CRASHES = """
import shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from headrace.checkpoint import save_checkpoint
from support.storage.checkpoints import SAVES, example
from support.storage.crashes import crash_at_each_call

for name, (steps, step) in SAVES.items():
    before = Path(sys.argv[2], name, "before")
    before.mkdir(parents=True)
    for old in steps:
        save_checkpoint(before, example(old), step=old, keep=9)
    crash_at_each_call(
        lambda n: Path(shutil.copytree(before, before.with_name(str(n)))),
        lambda folder: save_checkpoint(folder, example(1000), step=step, keep=2),
    )
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crashed")
    done = run_python(CRASHES, TESTS, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("save", SAVES)
def test_killed_at_every_point_of_a_save(
    crashed: Path, save: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps, _ = SAVES[save]
    points = len(list((crashed / save).iterdir())) - 1
    assert points > 15
    outcomes = []
    for n in range(1, points + 1):
        folder = crashed / save / str(n)
        newest = latest_checkpoint(folder)
        assert newest is not None
        found = load_checkpoint(newest)
        assert same(found, example(found["number"]))
        outcomes.append(found["number"])
        save_checkpoint(folder, example(77), step=77)  # works, and removes what was left
        assert len(names(folder)) == 2, names(folder)
        assert all(name.startswith("step-") for name in names(folder)), names(folder)
    # The old checkpoint up to some point, the new one from there on, and nothing else.
    assert set(outcomes) == {steps[-1], 1000}
    assert outcomes == sorted(outcomes)
    assert caplog.records == []  # no incomplete folder had a checkpoint's name


def test_everything_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fsync(descriptor: int) -> None:
        calls.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name[:8])

    def rename(source: Any, target: Any) -> None:
        calls.append(f"rename {Path(source).name[:8]} {Path(target).name[:8]}")
        original(source, target)

    original = os.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_checkpoint(tmp_path, example(1), step=1)
    assert calls == [
        "fsync tensors.",
        "fsync state.js",
        "fsync .writing",
        "rename .writing step-000",
        f"fsync {tmp_path.name[:8]}",
    ]


def test_the_folder_of_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    with atomic_files.temporary_folder(tmp_path / "step-00000009") as alive:
        (tmp_path / ".writing-step-00000008-0123").mkdir()
        save_checkpoint(tmp_path, {}, step=1)
        assert names(tmp_path) == sorted([alive.name, "step-00000001"])
    assert names(tmp_path) == ["step-00000001"]


# --- how many are kept ----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep(tmp_path: Path, keep: int) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-1").mkdir()
    for step in range(5, 11):
        save_checkpoint(tmp_path, example(step), step=step, keep=keep)
    expected = [f"step-{step:08d}" for step in range(11 - keep, 11)]
    assert names(tmp_path) == sorted(["notes", "step-1", *expected])


def test_a_good_checkpoint_of_a_later_step_is_kept(tmp_path: Path) -> None:
    for step in (40, 50):
        save_checkpoint(tmp_path, example(step), step=step)
    flip(tmp_path / "step-00000050" / "tensors.safetensors", -1)
    save_checkpoint(tmp_path, example(3), step=3, keep=1)
    assert names(tmp_path) == ["step-00000003", "step-00000040", "step-00000050"]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000040"


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, example(1), step=1)
    for number in (2, 3):
        path = save_checkpoint(tmp_path, example(number), step=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert same(load_checkpoint(path), example(3))


def test_long_step_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save_checkpoint(tmp_path, example(1), step=step, keep=5)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-100000000"


# --- disk errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_disk_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    save_checkpoint(tmp_path, example(1), step=1)
    before = contents(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, example(2), step=2)
    for part in (str(tmp_path), "step 2", os.strerror(number), "still there: step-00000001"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert contents(tmp_path) == before
    assert names(tmp_path) == ["step-00000001"]


def test_a_failed_replacement_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, example(1), step=1)
    before, rename = contents(tmp_path), os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(source).name.startswith(".writing"):
            raise OSError(errno.EIO, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="still there: step-00000001"):
        save_checkpoint(tmp_path, example(2), step=1)
    assert contents(tmp_path) == before


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: No such file .*; that folder cannot be"):
        save_checkpoint(tmp_path / "missing", {}, step=1)
    assert names(tmp_path) == []


def test_a_checkpoint_that_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, example(1), step=1)

    def fail(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "not allowed")

    monkeypatch.setattr(atomic_files, "remove_folder", fail)
    save_checkpoint(tmp_path, example(2), step=2, keep=1)
    assert "not allowed" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
