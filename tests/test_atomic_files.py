"""Files and folders that are whole or not there: under kills, full disks and two writers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.atomic_files import (
    atomic_file,
    build_folder,
    remove_abandoned,
    replace_file,
    sync_folder,
    temporary_folder,
    unique_path,
)
from headrace.errors import RunError
from support.paths import TESTS

# Leaves one folder for each call at which the process died.
CRASHES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from headrace.atomic_files import replace_file
from headrace.errors import RunError
from support.storage.crashes import crash_at_each_call

def prepare(n):
    folder = Path(sys.argv[2], str(n))
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    return folder

crash_at_each_call(prepare, lambda folder: replace_file(folder / "file", b"new content", RunError))
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_killed_at_every_point_of_a_replacement(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CRASHES, TESTS, tmp_path], check=True, timeout=100)
    outcomes = []
    for number in sorted(map(int, names(tmp_path))):
        folder = tmp_path / str(number)
        outcomes.append((folder / "file").read_bytes())
        replace_file(folder / "file", b"next", RunError)
        assert names(folder) == ["file"]  # what the killed process left is gone
    assert len(outcomes) > 5
    # The old file up to some point, the new one from there on, and never a part.
    assert sorted(set(outcomes)) == [b"new content", b"old"]
    assert outcomes == sorted(outcomes, reverse=True)


@pytest.mark.parametrize("name", ["write", "fsync", "replace", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_disk_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    (tmp_path / "file").write_text("old")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(RunError, match=rf"file: cannot be written \({os.strerror(number)}\)"):
            replace_file(tmp_path / "file", b"new", RunError)
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_the_content_is_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace = os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def record_replace(source: Any, target: Any) -> None:
        calls.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    replace_file(tmp_path / "file", b"new", RunError)
    assert calls == ["fsync file", "replace file", f"fsync {tmp_path.name}"]


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(TypeError), atomic_file(tmp_path / "file") as file:
        file.write([file.write(b"new")])  # type: ignore[arg-type,list-item]
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_the_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    replace_file(tmp_path / "file", b"new", RunError)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("name", ["x" * 255, "译" * 85])
def test_names_as_long_as_the_file_system_takes(tmp_path: Path, name: str) -> None:
    (tmp_path / unique_path(Path(name), "writing")).mkdir()  # abandoned
    replace_file(tmp_path / name, b"new", RunError)
    assert names(tmp_path) == [name]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:3]))
    replace_file(tmp_path / "file", b"0123456789", RunError)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems sync files only. A failing disk is an error all the same."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EINVAL
    sync_folder(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_only_abandoned_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".writing-it-0123").mkdir()
    (tmp_path / ".writing-it-4567").touch()
    (tmp_path / ".writing-other-0123").mkdir()
    with temporary_folder(tmp_path / "it") as alive:
        remove_abandoned(tmp_path, "it")
        assert names(tmp_path) == sorted([alive.name, ".writing-other-0123"])
    assert names(tmp_path) == [".writing-other-0123"]


def test_a_folder_taken_for_abandoned_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, made = Path.mkdir, []

    def slow(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        made.append(path)
        if len(made) == 1:
            remove_abandoned(tmp_path, "it")

    monkeypatch.setattr(Path, "mkdir", slow)
    with temporary_folder(tmp_path / "it") as folder:
        assert folder.is_dir()
    assert len(made) == 2
    assert names(tmp_path) == []


def test_without_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", unsupported)
    (tmp_path / ".writing-file-0123").mkdir()  # perhaps another writer's
    replace_file(tmp_path / "file", b"new", RunError)
    assert names(tmp_path) == [".writing-file-0123", "file"]


class TestBuildFolder:
    def usable(self, folder: Path) -> bool:
        return (folder / "file").exists()

    def quick(self, folder: Path) -> None:
        (folder / "file").write_text("quick")

    def test_two_builds_at_once(self, tmp_path: Path) -> None:
        """The quicker one's folder stays, and the slower one's is not taken for abandoned."""
        half_way, go_on = threading.Event(), threading.Event()

        def slow(folder: Path) -> None:
            (folder / "file").write_text("slow")
            half_way.set()
            assert go_on.wait(30)

        thread = threading.Thread(
            target=build_folder, args=(tmp_path / "it", slow), kwargs={"usable": self.usable}
        )
        thread.start()
        assert half_way.wait(30)
        build_folder(tmp_path / "it", self.quick, usable=self.usable)
        assert any(name.startswith(".writing-it") for name in names(tmp_path))
        go_on.set()
        thread.join(30)
        assert names(tmp_path) == ["it"]
        assert (tmp_path / "it" / "file").read_text() == "quick"

    def test_a_folder_that_is_not_usable_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "it").mkdir()
        (tmp_path / "it" / "other").touch()
        build_folder(tmp_path / "it", self.quick, usable=self.usable)
        assert names(tmp_path / "it") == ["file"]
        assert names(tmp_path) == ["it"]

    def test_an_error_leaves_nothing(self, tmp_path: Path) -> None:
        def broken(folder: Path) -> None:
            self.quick(folder)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            build_folder(tmp_path / "cache" / "it", broken, usable=self.usable)
        assert names(tmp_path / "cache") == []


# A build over a damaged folder. Leaves one folder for each call at which the process died.
BUILD_CRASHES = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from headrace.atomic_files import build_folder
from support.storage.crashes import crash_at_each_call

def prepare(n):
    folder = Path(sys.argv[2], str(n))
    (folder / "built").mkdir(parents=True)
    (folder / "built" / "damaged").touch()
    return folder

def fill(folder):
    for name in ("a", "b"):
        os.close(os.open(folder / name, os.O_CREAT))
    os.mkdir(folder / "sub")

def build(folder):
    build_folder(folder / "built", fill, usable=lambda there: (there / "sub").exists())

crash_at_each_call(prepare, build, ("rename", "mkdir", "unlink", "rmdir", "open"))
"""


def test_killed_at_every_point_of_a_build(tmp_path: Path) -> None:
    """What is at the path is complete or known to be damaged, and the next build removes the
    rest."""
    subprocess.run([sys.executable, "-c", BUILD_CRASHES, TESTS, tmp_path], check=True, timeout=100)
    numbers = sorted(map(int, names(tmp_path)))
    assert len(numbers) > 8
    found = []
    for number in numbers:
        folder = tmp_path / str(number)
        found.append(names(folder / "built") if (folder / "built").exists() else [])
        build_folder(
            folder / "built",
            lambda there: (there / "sub").mkdir(),
            usable=lambda there: (there / "sub").exists(),
        )
        assert names(folder) == ["built"]
    assert {tuple(each) for each in found} == {("damaged",), (), ("a", "b", "sub")}


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, b"result", RunError)
    assert os.read(reader, 100) == b"result"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_the_file_behind_stdout_keeps_what_is_printed(tmp_path: Path) -> None:
    code = """if True:
        from pathlib import Path
        from headrace.atomic_files import replace_file
        from headrace.errors import RunError
        print("before")
        replace_file(Path("/dev/stdout"), b"result\\n", RunError)
        print("after")
    """
    with (tmp_path / "printed").open("wb") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True)
    assert (tmp_path / "printed").read_text() == "before\nresult\nafter\n"


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    file.parent.mkdir()
    link.symlink_to(file)
    for content in (b"first", b"second"):
        replace_file(link, content, RunError)
        assert (link.is_symlink(), file.read_bytes()) == (True, content)
