"""The faults of docs/faults.md that concern a whole run, and what happens after each."""

from __future__ import annotations

import errno
import importlib.util
import logging
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from headrace import atomic_files
from headrace.checkpoint import latest_checkpoint
from headrace.cli import app
from headrace.errors import (
    CheckpointError,
    LoaderError,
    NonFiniteError,
    OutOfMemoryError,
    RunError,
    StepError,
    TranslationError,
)
from headrace.lifecycle import MetricsLog, RunFolder, StopRequests, read_metrics
from headrace.translation import Trainer, TrainSettings
from headrace.translation.corpus.loader import PaddedBatches
from headrace.translation.ending import exit_after_grace
from headrace.translation.loss import TranslationLoss
from headrace.translation.run_checkpoints import EpochLoss
from support.paths import BENCHMARKS
from support.processes.forked import HEADRACE, Forked, child_processes
from support.translation.trainers import SMALL, new, weights_of

pytestmark = pytest.mark.unsanitized
_KILLED = "killed by signal: Killed|exited unexpectedly"  # whichever of the two PyTorch sees first


def resumed(run: Path, corpus: Path) -> str:
    Trainer.resume(run, cache=corpus / "cache", quiet=True).run()
    return weights_of(run)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing happened to."""
    return weights_of(new(corpus, tmp_path_factory.mktemp("whole"), "whole").run().folder.path)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each fault: no process of ours, and the run's lock is free."""
    yield
    _, alive = psutil.wait_procs(child_processes(), timeout=30)
    assert alive == []


def after(batches: int, do: Any) -> Any:
    """`do(row)` in the place of the so-manieth batch that a loader makes."""
    made, get = [0], PaddedBatches.__getitem__

    def wrapped(self: PaddedBatches, spec: Any) -> Any:
        made[0] += 1
        if made[0] == batches:
            do()
        return get(self, spec)

    return wrapped


class TestLoader:
    @pytest.mark.parametrize(
        ("do", "timeout", "message"),
        [
            (lambda: os.kill(os.getpid(), signal.SIGKILL), 0, _KILLED),
            (lambda: [][1], 0, "a loader process raised IndexError"),
            (signal.pause, 1, "timed out after 1 seconds.*a loader process hangs"),
        ],
    )
    def test_a_worker_that_dies_raises_or_hangs(
        self,
        corpus: Path,
        tmp_path: Path,
        whole: str,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        do: Any,
        timeout: int,
        message: str,
    ) -> None:
        """What was trained on before is saved; resumed, no batch is lost and none comes twice."""
        trainer = new(corpus, tmp_path, "run", workers=2, loader_timeout=timeout, save_every=1e6)
        with monkeypatch.context() as patch:
            patch.setattr(PaddedBatches, "__getitem__", after(4, do))
            # How long PyTorch waits for each worker that hangs before it kills it: 5 s.
            patch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
            with pytest.raises(LoaderError, match=message):
                trainer.run()
        assert "resume with: headrace train --resume" in capfd.readouterr().err
        if "killed" not in message:  # that is raised at any moment, in the midst of a step, too
            assert latest_checkpoint(trainer.folder.state) is not None
        assert resumed(trainer.folder.path, corpus) == whole

    def test_without_workers_a_hang_is_noticed_too(
        self,
        corpus: Path,
        tmp_path: Path,
        whole: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        import threading

        may_go = threading.Event()
        trainer = new(corpus, tmp_path, "run", loader_timeout=0.5)
        with monkeypatch.context() as patch:
            patch.setattr(PaddedBatches, "__getitem__", after(5, may_go.wait))
            with pytest.raises(LoaderError, match=r"no batch for 0\.5 s"):
                trainer.run()
        may_go.set()
        assert resumed(trainer.folder.path, corpus) == whole


class TestDisk:
    def test_a_checkpoint_that_cannot_be_written_stops_nothing(
        self,
        corpus: Path,
        tmp_path: Path,
        whole: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Full for the third and the fourth; the others are there, and so is the run's end."""
        made, init = [0], atomic_files.DurableFile.__init__

        def full(self: Any, path: Path) -> None:
            made[0] += "step-" in str(path)
            if made[0] in (5, 7):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            init(self, path)

        monkeypatch.setattr(atomic_files.DurableFile, "__init__", full)
        trainer = new(corpus, tmp_path, "run")
        trainer.run()
        assert weights_of(trainer.folder.path) == whole
        assert caplog.text.count("No space left on device; still there: step-") == 2
        assert "training continues and writes a new checkpoint now" in caplog.text

    @pytest.mark.parametrize("fault", ["missing", "read-only"])
    def test_a_folder_that_is_gone(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        fault: str,
    ) -> None:
        """Nothing can be saved any more: said each time, and at the end the run is there."""
        trainer = new(corpus, tmp_path, "run")
        if fault == "missing":
            trainer.folder.state.rmdir()
            expected = "No such file or directory; that folder cannot be read"
        else:
            create = atomic_files._create_locked

            def refuse(path: Path, stack: Any) -> Any:
                if path.name.startswith("step-"):
                    raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))
                return create(path, stack)

            monkeypatch.setattr(atomic_files, "_create_locked", refuse)
            expected = "Read-only file system; no older one is there"
        assert trainer.run().scores is not None
        assert expected in caplog.text

    @pytest.mark.parametrize("name", ["trg.model", "src.model"])
    def test_no_room_for_a_vocabulary(
        self, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """No half file is left, which would keep the run from starting over."""
        write = atomic_files.DurableFile.write

        def full(self: Any, content: Any) -> None:
            write(self, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        trainer = new(corpus, tmp_path, "run", max_steps=1)
        replace = atomic_files.replace_file

        def replace_on_full(path: Path, *arguments: Any) -> None:
            with monkeypatch.context() as patch:
                if path.name == name:
                    patch.setattr(atomic_files.DurableFile, "write", full)
                replace(path, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr("headrace.translation.saved_model.replace_file", replace_on_full)
            with pytest.raises(RunError, match=rf"{name}: cannot be written \(No space left"):
                trainer.run()
        assert resumed(trainer.folder.path, corpus)

    def test_no_room_for_the_weights_ends_it_and_it_can_go_on(
        self,
        corpus: Path,
        tmp_path: Path,
        whole: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def full(*args: Any, **options: Any) -> None:
            raise CheckpointError("weights were not written: No space left on device")

        trainer = new(corpus, tmp_path, "run")
        with monkeypatch.context() as patch:
            patch.setattr("headrace.translation.weights.weights_to_file", full)
            with pytest.raises(CheckpointError, match="No space left"):
                trainer.run()
        assert resumed(trainer.folder.path, corpus) == whole

    def test_metrics_that_cannot_be_written(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Full:
            """A disk on which half a line has room."""

            def __init__(self, file: Any) -> None:
                self.file = file

            def write(self, piece: Any) -> int:
                if len(piece) < 20:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(self.file.write(piece[:-10]))

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

        path = tmp_path / "metrics.jsonl"
        with MetricsLog(path, warn_only=True) as log:
            log.write("step", 1, loss=1.0)
            log._file, file = Full(log._file), log._file  # type: ignore[assignment]
            log.write("step", 2, loss=1.0)
            log._file = file
            log.write("step", 3, loss=1.0)
        assert [line["step"] for line in read_metrics(path)] == [1, 3]
        assert "No space left on device); training continues" in caplog.text
        strict = MetricsLog(path)
        strict._file = Full(strict._file)  # type: ignore[assignment]
        with pytest.raises(RunError, match="No space left"):
            strict.write("step", 4)
        strict.close()


class TestLosses:
    def nan_at(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        made, call = [0], TranslationLoss.__call__

        def wrapped(self: TranslationLoss, model: Any, batch: Any) -> Any:
            made[0] += torch.is_grad_enabled()
            found = call(self, model, batch)
            return {**found, "loss": found["loss"] * math.nan} if made[0] == at else found

        monkeypatch.setattr(TranslationLoss, "__call__", wrapped)

    def test_stop_names_the_batch_and_keeps_a_good_checkpoint(
        self,
        corpus: Path,
        tmp_path: Path,
        whole: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        trainer = new(corpus, tmp_path, "run")
        with monkeypatch.context() as patch:
            self.nan_at(patch, 8)
            with pytest.raises(NonFiniteError, match="loss not finite at batch 8 of epoch 1"):
                trainer.run()
        assert resumed(trainer.folder.path, corpus) == whole

    def test_no_checkpoint_of_it_where_another_error_comes_first(
        self, corpus: Path, tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise IndexError("row 17")

        trainer = new(corpus, tmp_path, "run", save_every=1000)
        with monkeypatch.context() as patch:
            self.nan_at(patch, 5)
            patch.setattr(PaddedBatches, "__getitem__", after(8, fail))
            with pytest.raises(IndexError, match="row 17"):
                trainer.run()
        assert list(trainer.folder.state.glob("step-*")) == []
        assert resumed(trainer.folder.path, corpus) == whole

    def test_skip_goes_on(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self.nan_at(monkeypatch, 8)
        result = new(corpus, tmp_path, "run", on_nonfinite="skip").run()
        assert result.scores is not None
        assert "loss not finite at batch 8 of epoch 1; its update is skipped" in caplog.text
        epochs = [line for line in read_metrics(result.folder.metrics) if line["kind"] == "epoch"]
        assert all(math.isfinite(line["loss"]) for line in epochs)

    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_no_memory(
        self,
        corpus: Path,
        tmp_path: Path,
        whole: str,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
    ) -> None:
        made, call = [0], TranslationLoss.__call__

        def no_room(gradient: torch.Tensor | None = None) -> None:
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")

        def full(self: TranslationLoss, model: Any, batch: Any) -> Any:
            made[0] += torch.is_grad_enabled()
            if made[0] == 6 and where == "forward":
                no_room()
            found = call(self, model, batch)
            if made[0] == 6:
                found["loss"].register_hook(no_room)
            return found

        trainer = new(corpus, tmp_path, "run", save_every=1e6)
        with monkeypatch.context() as patch:
            patch.setattr(TranslationLoss, "__call__", full)
            with pytest.raises(OutOfMemoryError, match=r"no memory left for batch .*3\.00 GiB"):
                trainer.run()
        assert latest_checkpoint(trainer.folder.state) is not None  # of the batch before
        assert resumed(trainer.folder.path, corpus) == whole

    def test_halves(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        call = TranslationLoss.__call__

        def small(self: TranslationLoss, model: Any, batch: Any) -> Any:
            if torch.is_grad_enabled() and len(batch[0]) > 8:
                raise torch.OutOfMemoryError("too much")
            return call(self, model, batch)

        expected = new(corpus, tmp_path, "whole", epochs=1, dropout=0.0).run()
        monkeypatch.setattr(TranslationLoss, "__call__", small)
        found = new(corpus, tmp_path, "halved", epochs=1, dropout=0.0, on_oom="halve").run()
        losses = [
            next(line["loss"] for line in read_metrics(r.folder.metrics) if line["kind"] == "epoch")
            for r in (expected, found)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class TestStopping:
    def test_the_scheduler_may_want_a_zero(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        count, seen = EpochLoss.add_arrived, []

        def counted(self: EpochLoss, arrived: Any) -> None:
            seen.append(1)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            count(self, arrived)

        monkeypatch.setattr(EpochLoss, "add_arrived", counted)
        for code, expected in (("zero", 0), ("signal", 143)):
            seen.clear()
            trainer = new(corpus, tmp_path, code, stop_code=code, grace=60)
            words = ("train", "--resume", trainer.folder.path, "--cache", corpus / "cache", "-q")
            found = CliRunner().invoke(app, [str(word) for word in words])
            assert found.exit_code == expected, found.output
            assert latest_checkpoint(trainer.folder.state) is not None

    def test_sigterm_to_all_of_its_processes_is_one_to_the_run(
        self, corpus: Path, tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As systemd sends it, and Slurm: the workers stay for as long as batches are needed."""
        count, seen = EpochLoss.add_arrived, []

        def counted(self: EpochLoss, arrived: Any) -> None:
            seen.append(1)
            if len(seen) == 3:
                ours = [os.getpid(), *(child.pid for child in child_processes())]
                assert len(ours) >= 3
                code = "import os, sys; [os.kill(int(pid), 15) for pid in sys.argv[1:]]"
                subprocess.run([sys.executable, "-c", code, *map(str, ours)], check=True)
            count(self, arrived)

        with monkeypatch.context() as patch:
            patch.setattr(EpochLoss, "add_arrived", counted)
            result = new(corpus, tmp_path, "run", workers=2, save_every=1000).run()
        assert result.stopped == "SIGTERM"
        assert latest_checkpoint(result.folder.state) is not None
        assert resumed(result.folder.path, corpus) == whole

    def test_the_grace_time_begins_with_the_signal(self) -> None:
        made: list[Any] = []

        class Timer:
            def __init__(self, seconds: float, call: Any) -> None:
                self.seconds, self.call, self.state = seconds, call, "new"
                self.daemon = False
                made.append(self)

            def start(self) -> None:
                self.state = "started"

            def cancel(self) -> None:
                self.state = "cancelled"

        called: list[bool] = []
        with StopRequests(5, lambda: called.append(True), timer=Timer) as stop:  # type: ignore[arg-type]
            assert made == []
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == "SIGTERM"
            (timer,) = made
            assert (timer.seconds, timer.state, timer.daemon) == (5, "started", True)
            timer.call()
            assert called == [True]
        assert timer.state == "cancelled"

    def test_overdue_it_leaves_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        codes: list[int] = []
        told: list[str] = []
        monkeypatch.setattr("headrace.translation.ending.exit_with_children", codes.append)
        exit_after_grace(7, RunFolder(tmp_path / "run"), told.append)
        assert codes == [143]
        assert "7 s after SIGTERM" in told[0]
        assert "--resume" in told[0]


BUILT_IN = {**SMALL, "src": "zh", "trg": "en"}


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"on_nonfinite": "maybe"}, StepError, "expected report, stop, skip"),
            ({"on_oom": "halve", "plan": "graph"}, TranslationError, "plan graph captures CUDA"),
            ({"on_oom": "half"}, TranslationError, "on_oom = 'half'"),
            ({"grace": -1}, TranslationError, "grace = -1"),
            ({"keep": 0}, TranslationError, "keep = 0"),
        ],
    )
    def test_before_there_is_a_folder(
        self, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            Trainer.create(
                TrainSettings.from_dict({**BUILT_IN, **changes}), project=tmp_path / "runs"
            )
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/../../x", "a\\x", ".hidden", "link"])
    def test_names_that_climb_out(self, tmp_path: Path, name: str) -> None:
        project = tmp_path / "a" / "runs"
        project.mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir()
        (project / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(RunError):
            Trainer.create(TrainSettings.from_dict(BUILT_IN), project=project, name=name)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "elsewhere"]
        assert list((tmp_path / "elsewhere").iterdir()) == []

    @pytest.mark.parametrize("what", ["weights", "state", "metrics.jsonl", "config.yaml"])
    def test_a_run_that_leads_out_of_its_folder(self, tmp_path: Path, what: str) -> None:
        trainer = Trainer.create(TrainSettings.from_dict(BUILT_IN), project=tmp_path, name="run")
        outside, inside = tmp_path / "outside", trainer.folder.path / what
        if inside.exists():
            inside.rename(outside)
        else:
            outside.touch()
        inside.symlink_to(outside)
        with pytest.raises(RunError, match=f"{what}: links out of the run folder"):
            Trainer.resume(trainer.folder.path)

    def test_a_linked_run_folder_is_fine(self, tmp_path: Path) -> None:
        trainer = Trainer.create(TrainSettings.from_dict(BUILT_IN), project=tmp_path, name="run")
        (tmp_path / "latest").symlink_to(trainer.folder.path)
        Trainer.resume(tmp_path / "latest")


def test_kept_checkpoints(
    corpus: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The last `keep` stay; a torn one is refused by name, and the one before is taken."""
    trainer = new(corpus, tmp_path, "run", keep=3, max_steps=9)
    trainer.run()
    kept = sorted(path.name for path in trainer.folder.state.iterdir())
    assert kept == ["step-00000007", "step-00000008", "step-00000009"]
    tensors = trainer.folder.state / kept[-1] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(trainer.folder.state) == trainer.folder.state / kept[-2]
    assert "step-00000009" in caplog.text


def kills_module() -> Any:
    path = BENCHMARKS / "proofs" / "kills.py"
    sys.path.insert(0, str(path.parent))
    try:
        found = importlib.util.spec_from_file_location("kills", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules["kills"] = module
        found.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@pytest.mark.timeout(300)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A short version of `benchmarks/proofs/kills.py`: SIGKILL, wherever it happens to be. Plans
    and workers in turn are killed at chosen batches in `translation/test_trainer.py`."""
    kills = kills_module()

    class Killing(kills.Killing):  # type: ignore[misc,name-defined]
        def start(self, run: Path) -> Forked:
            words = ["train", "--resume", run, "--cache", self.folder / "cache", "--quiet"]
            return Forked(HEADRACE, *words, stderr=self.folder / "stderr")

    way = {**kills.WAYS[1], "epochs": 2}
    tally = Killing(tmp_path / "runs", way, random.Random(7)).disturb(2)
    assert tally.same == tally.runs > 0
    assert tally.kills == 2
    assert tally.left_behind == 0
