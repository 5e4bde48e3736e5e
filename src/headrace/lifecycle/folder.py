"""Run folders: one for each training run, with its settings and everything it writes."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.atomic_files import replace_file
from headrace.errors import RunError
from headrace.file_lock import FileLock
from headrace.lifecycle.run_names import first_free, require_name

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder that has a run's files.

        folder = RunFolder.create(name="small")          # runs/train/small
        with folder.locked():
            folder.write_config({...})

    `weights`, `state` and `events` (TensorBoard's) are folders, the others are files.
    """

    path: Path

    @classmethod
    def create(
        cls,
        project: str | Path = Path("runs/train"),
        name: str | None = None,
        *,
        parts: tuple[str, ...] = ("weights", "state"),
    ) -> RunFolder:
        """Create a folder in `project`, with the folders `parts` in it.

        Without a `name` it is called exp, exp2, exp3, …: the first that is free. Two runs that
        start at the same time get different folders.
        """
        if name is not None:
            require_name(name)
        if Path(project).is_file():
            raise RunError(f"{project}: is a file; expected a folder for new runs")
        try:
            Path(project).mkdir(parents=True, exist_ok=True)
            path = first_free(Path(project)) if name is None else _new(Path(project), name)
            folder = cls(path)
            for part in parts:
                (path / part).mkdir()
        except (OSError, ValueError) as problem:
            raise RunError(
                f"{project}: cannot create a run folder there ({_why(problem)})"
            ) from problem
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an earlier run."""
        folder = cls(Path(path))
        try:
            if not folder.config.is_file():
                raise RunError(_not_a_run(folder.path))
            folder._require_inside()
        except (OSError, ValueError) as problem:
            raise RunError(f"{path}: cannot be opened ({_why(problem)})") from problem
        return folder

    def _require_inside(self) -> None:
        """Refuse links that lead out of the folder: a run must not write elsewhere."""
        inside = self.path.resolve()
        for entry in self.path.iterdir():
            if entry.is_symlink() and not entry.resolve().is_relative_to(inside):
                raise RunError(
                    f"{entry}: links out of the run folder, to {entry.resolve()}; expected every "
                    "file of a run inside its folder (the folder itself may be a link)"
                )

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write `config.yaml`, from plain values. A reader sees either the old or the new file."""
        try:
            text = yaml_text(config).encode()
        except (yaml.YAMLError, RecursionError, UnicodeEncodeError) as problem:
            raise RunError(
                f"{self.config}: the configuration cannot be written as YAML ({problem}); "
                "expected dicts, lists, strings, numbers, true, false and null"
            ) from problem
        replace_file(self.config, text, RunError)

    def remove_if_untrained(self) -> None:
        """Remove the folder, unless a run has begun to train in it. Hold its lock meanwhile."""
        parts = [self.weights, self.state]
        has_files = any(part.is_dir() and any(part.iterdir()) for part in parts)
        if not has_files and not self.metrics.exists():
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes. A killed process unlocks it."""
        with _lock(self.path):
            yield


def shared_folder(path: Path) -> RunFolder:
    """Open the folder that the first rank has just created."""
    if not RunFolder(path).config.is_file():
        raise RunError(
            f"{path}: another rank created this folder, but this rank does not see it; expected "
            "a file system that all nodes share (--project)"
        )
    return RunFolder(path)


def yaml_text(content: Mapping[str, Any]) -> str:
    """Plain values as YAML, in their order and without anchors."""
    text: str = yaml.dump(dict(content), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
    return text


class _PlainDumper(yaml.SafeDumper):
    """Writes a value twice if it occurs twice: anchors are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Without quotes, PyYAML would read these characters back as spaces.
    style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_PlainDumper.add_representer(str, _text)


# --- names ---------------------------------------------------------------------------------------


def _new(project: Path, name: str) -> Path:
    path = project / name
    try:
        path.mkdir()
    except FileExistsError:
        # Not `lr1e-42` after `lr1e-4`: that is another learning rate.
        stem = f"{name}-" if name[-1].isdigit() else name
        numbered = (f"{stem}{number}" for number in itertools.count(2))
        free = next(other for other in numbered if not os.path.lexists(project / other))
        resume = f"resume it with --resume {path}, or " if RunFolder(path).config.exists() else ""
        raise RunError(f"{path}: already exists; {resume}choose a free name: {free}") from None
    return path


def _not_a_run(path: Path) -> str:
    """The error for a `path` that is not a run folder. It suggests one nearby."""
    if not path.exists():
        return f"{path}: does not exist; expected the folder of an earlier run"
    if path.is_dir():
        what = f"{path}: is not a run folder (it has no config.yaml)"
        inside = [entry for entry in path.iterdir() if (entry / "config.yaml").is_file()]
        if inside:
            newest = max(inside, key=lambda entry: (entry / "config.yaml").stat().st_mtime)
            return f"{what}; did you mean {newest}, its newest run?"
    else:
        what = f"{path}: is a file; expected the folder of an earlier run"
    for folder in list(path.parents)[:2]:
        if (folder / "config.yaml").is_file():
            return f"{what}; did you mean {folder}?"
    return what


# --- the lock ------------------------------------------------------------------------------------


def _lock(folder: Path) -> FileLock:
    """Lock the folder until the returned lock is closed. The lock's file stays."""
    path = folder / ".lock"
    try:
        lock = FileLock(path)
    except OSError as problem:
        raise RunError(f"{path}: cannot be opened ({problem.strerror})") from problem
    try:
        if not lock.acquire(wait=False):
            holder = os.read(lock.fileno(), 200).decode(errors="replace").strip()
            lock.close()
            raise RunError(
                f"{folder}: {holder or 'another process'} is training in this folder; wait until "
                "it ends, or choose another folder (--name)"
            )
    except OSError as problem:
        # Some network file systems have no locks. Train anyway.
        log.warning(
            "%s: cannot be locked (%s); do not start a second run in it", folder, _why(problem)
        )
    with suppress(OSError):  # only the message above needs it; the disk may be full
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
    return lock


def _why(problem: OSError | ValueError) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
