"""The trainer: killed anywhere and resumed, the weights are those of a run that never stopped."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import HeadraceError, TranslationError
from headrace.fake import FakeDevice
from headrace.lifecycle import read_metrics
from headrace.plan import load_plan
from headrace.translation import (
    TrainedModel,
    Trainer,
    TrainResult,
    TrainSettings,
    announcements,
    prepared_for,
)
from headrace.translation.build import build_run
from headrace.translation.corpus.batches import BatchPlan
from headrace.translation.corpus.packed import PackedPlan
from headrace.translation.run_checkpoints import EpochLoss
from headrace.translation.weights import load_weights
from support.processes.forked import run_python
from support.translation.trainers import SMALL, new, weights_of

# Runs a trainer in a process of its own that dies, as if by SIGKILL, after so many batches.
DIES = """
import os, sys
from pathlib import Path
from headrace.engine import Engine
from headrace.translation import Trainer
run, cache, batches = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
steps, seen = Engine.steps, [0]
def counted(self, *args, **options):
    for info in steps(self, *args, **options):
        seen[0] += 1
        yield info
        if seen[0] == batches:
            os._exit(9)
Engine.steps = counted
Trainer.resume(run, cache=cache, quiet=True).run()
"""


def everything_in(run: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(run)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(run.rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new(corpus, tmp_path_factory.mktemp("runs"), "run").run().folder.path


class TestResume:
    @pytest.mark.parametrize(
        ("plan", "workers", "options", "deaths"),
        [
            ("pipeline", 0, {}, [1, 7]),
            ("pipeline", 2, {"ema": 0.9}, [15]),
            ("baseline", 0, {"accumulate": 3}, [5, 9]),
            ("streams4", 0, {"dropout": 0.3}, [12]),
            ("graph", 0, {"average_last": 2}, [3]),
        ],
    )
    def test_a_killed_and_resumed_run_gives_the_same_weights(
        self,
        corpus: Path,
        tmp_path: Path,
        plan: str,
        workers: int,
        options: dict[str, Any],
        deaths: list[int],
    ) -> None:
        whole = new(corpus, tmp_path, "whole", plan=plan, workers=workers, **options)
        expected = whole.run()
        killed = new(corpus, tmp_path, "killed", plan=plan, workers=workers, **options)
        for batches in deaths:
            died = run_python(DIES, killed.folder.path, corpus / "cache", batches)
            assert died.returncode == 9, died.stderr
        found = Trainer.resume(killed.folder.path, cache=corpus / "cache", quiet=True).run()
        assert weights_of(found.folder.path) == weights_of(expected.folder.path)
        assert found.scores == expected.scores
        assert epochs(found) == epochs(expected)

    @pytest.mark.parametrize("save_every", [0, 1000])
    @pytest.mark.parametrize("where", ["weights.WeightFiles.keep", "result.TrainResult.store"])
    def test_killed_after_the_metrics_line_and_before_the_checkpoint(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
        save_every: int,
    ) -> None:
        whole = new(corpus, tmp_path, "whole", save_every=save_every).run()
        dead = new(corpus, tmp_path, "dead", save_every=save_every)

        def die(*args: Any) -> None:
            raise SystemExit

        with monkeypatch.context() as patch:
            patch.setattr(f"headrace.translation.{where}", die)
            with pytest.raises(SystemExit):
                dead.run()
        lines = [line["kind"] for line in read_metrics(dead.folder.metrics)]
        assert ("epoch" if where.startswith("weights") else "valid") in lines
        found = Trainer.resume(dead.folder.path, cache=corpus / "cache", quiet=True).run()
        assert epochs(found) == epochs(whole)
        lines = [line["kind"] for line in read_metrics(dead.folder.metrics)]
        assert (lines.count("epoch"), lines.count("valid")) == (2, 1)

    def test_killed_before_the_first_checkpoint(self, corpus: Path, tmp_path: Path) -> None:
        expected = new(corpus, tmp_path, "whole").run()
        fresh = new(corpus, tmp_path, "fresh")  # its folder has nothing but config.yaml
        found = Trainer.resume(fresh.folder.path, cache=corpus / "cache", quiet=True).run()
        assert weights_of(found.folder.path) == weights_of(expected.folder.path)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_after_a_signal_it_saves_and_says_how_to_resume(
        self,
        corpus: Path,
        tmp_path: Path,
        number: signal.Signals,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        expected = new(corpus, tmp_path, "whole", save_every=1e6).run()
        trainer = new(corpus, tmp_path, "stopped", save_every=1e6)
        note = EpochLoss.add_arrived
        seen: list[int] = []

        def count(self: EpochLoss, arrived: Any) -> None:
            seen.append(1)
            if len(seen) == 5:
                os.kill(os.getpid(), number)
            note(self, arrived)

        monkeypatch.setattr(EpochLoss, "add_arrived", count)
        stopped = trainer.run()
        monkeypatch.undo()
        assert (stopped.stopped, stopped.scores) == (number.name, None)
        said = capfd.readouterr().err
        assert f"stopped by {number.name} after 5 updates" in said
        assert "headrace train --resume" in said
        assert "Not finished: 5 updates so far" in stopped.folder.report.read_text()
        found = Trainer.resume(stopped.folder.path, cache=corpus / "cache", quiet=True).run()
        assert weights_of(found.folder.path) == weights_of(expected.folder.path)

    def test_a_packed_run_stopped_within_an_epoch_continues_with_the_next_batch(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Between two batches of a group, too."""
        monkeypatch.setattr(announcements, "_DENSE_TOKENS", 50)
        options: dict[str, Any] = {"packed": "on", "tokens": 100, "accumulate": 2}
        expected = new(corpus, tmp_path, "whole", **options).run()
        trainer = new(corpus, tmp_path, "stopped", **options)
        note, seen = EpochLoss.add_arrived, []

        def stop_after_three(self: EpochLoss, arrived: Any) -> None:
            seen.append(1)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            note(self, arrived)

        with monkeypatch.context() as patch:
            patch.setattr(EpochLoss, "add_arrived", stop_after_three)
            stopped = trainer.run()
        assert (stopped.stopped, stopped.updates) == ("SIGTERM", 1)
        found = Trainer.resume(stopped.folder.path, cache=corpus / "cache").run()
        assert weights_of(found.folder.path) == weights_of(expected.folder.path)
        assert epochs(found) == epochs(expected)
        starts = [line for line in read_metrics(found.folder.metrics) if line["kind"] == "start"]
        assert [{"data_s", "build_s"} <= line.keys() for line in starts] == [True]
        said = " ".join(capfd.readouterr().err.split())
        assert "batches are packed, and attention has no dropout" in said
        slow = "and the step is not compiled: attention computes all pairs of tokens"
        assert said.count(slow) == 3  # each time before the first batch
        assert said.index(slow) < said.index("epoch 1/")
        assert re.search(
            r"packed batches per epoch, \d+ source and \d+ target tokens, \d+\.\d% and", said
        )

    def test_a_finished_run_is_left_as_it_is(self, corpus: Path, tmp_path: Path) -> None:
        result = new(corpus, tmp_path, "done").run()
        before = everything_in(result.folder.path)
        again = Trainer.resume(result.folder.path, cache=corpus / "cache", quiet=True).run()
        assert again == result
        assert everything_in(result.folder.path) == before

    def test_the_same_weights_in_every_folder(self, corpus: Path, tmp_path: Path) -> None:
        """No date, name or path is in a file of weights."""
        one, other = new(corpus, tmp_path, "a").run(), new(corpus, tmp_path / "b", "c").run()
        assert weights_of(one.folder.path) == weights_of(other.folder.path)


class TestEndings:
    """A run that ends early or trains on leaves the weights of one that did neither."""

    def resume(self, run: Path, corpus: Path, **changes: Any) -> TrainResult:
        resumed = Trainer.resume(run, changes=changes, cache=corpus / "cache", quiet=True)
        return resumed.run()

    def test_more_epochs_for_a_finished_run(
        self, trained: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        one = new(corpus, tmp_path, "one", epochs=1, average_last=2).run()
        run = one.folder.path
        unchanged = everything_in(run)
        assert self.resume(run, corpus, epochs=1) == one
        assert "finished after 1 epoch, and --epochs 1 asks for no more" in caplog.text
        assert everything_in(run) == unchanged
        two = self.resume(run, corpus, epochs=2)
        assert weights_of(run) == weights_of(trained)
        assert [entry["epoch"] for entry in epochs(two)] == [0, 1]
        assert TrainSettings.read(two.folder.config).epochs == 2
        for folder in (run / "state").iterdir():
            shutil.rmtree(folder)
        with pytest.raises(TranslationError, match="has no checkpoint from which this finished"):
            self.resume(run, corpus, epochs=3)

    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_a_time_limit_ends_the_run_with_scores_and_it_can_train_on(
        self,
        trained: Path,
        corpus: Path,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        accumulate: int,
    ) -> None:
        options = {"accumulate": accumulate, "valid_sentences": 4 if accumulate == 1 else 0}
        short = new(corpus, tmp_path, "short", time_limit=1e-3, **options).run()
        run = short.folder.path
        assert (short.stopped, short.ended_early) == (None, "time limit")
        assert short.scores is not None
        assert "the time limit of 0.001s is reached after 1 update" in capfd.readouterr().err
        assert [entry["epoch"] for entry in epochs(short)] == [0]
        assert "The time limit ended it before its last epoch" in short.folder.report.read_text()
        again = self.resume(run, corpus)  # the limit counts anew
        assert again.ended_early == "time limit"
        whole = self.resume(run, corpus, time_limit=0)
        assert (whole.ended_early, [entry["epoch"] for entry in epochs(whole)]) == (None, [0, 1])
        if accumulate == 1:
            assert weights_of(run) == weights_of(trained)
        else:
            never_stopped = new(corpus, tmp_path, "never stopped", **options).run()
            assert weights_of(run) == weights_of(never_stopped.folder.path)

    @pytest.mark.parametrize(
        ("valid_sentences", "said"),
        [(4, "no better validation BLEU than 0.00 of epoch 1 in the last 1 epoch (--patience)"),
         (0, "no better validation loss than ")],
    )  # fmt: skip
    def test_patience(
        self,
        corpus: Path,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        valid_sentences: int,
        said: str,
    ) -> None:
        options = {"lr": 0.0, "epochs": 9, "patience": 1, "valid_sentences": valid_sentences}
        stuck = new(corpus, tmp_path, "stuck", **options).run()
        assert stuck.ended_early == "patience"
        assert len(epochs(stuck)) == 2
        assert said in capfd.readouterr().err
        if not valid_sentences:
            return
        assert self.resume(stuck.folder.path, corpus) == stuck  # it is finished
        assert len(epochs(self.resume(stuck.folder.path, corpus, epochs=10))) == 3

    def test_other_settings_cannot_be_changed(self, trained: Path, corpus: Path) -> None:
        with pytest.raises(TranslationError, match="unknown key 'lr'"):
            self.resume(trained, corpus, lr=0.1)


def test_samples_are_shown_and_stored_and_change_nothing(
    trained: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`trained` has the default, three; its validation translates four sentences anyway."""
    default = [
        line["samples"]
        for line in read_metrics(trained / "metrics.jsonl")
        if "bleu" in line and "epoch" in line
    ]
    for count, valid_sentences in ((0, 4), (2, 0)):
        settings = TrainSettings.from_dict(
            SMALL
            | {"data": str(corpus / "pairs.tsv"), "samples": count, "tensorboard": False}
            | {"valid_sentences": valid_sentences}
        )
        result = Trainer.create(
            settings, project=tmp_path, name=str(count), cache=corpus / "cache"
        ).run()
        assert weights_of(result.folder.path) == weights_of(trained)
        lines = [line for line in read_metrics(result.folder.metrics) if line["kind"] == "epoch"]
        found = [line.get("samples") for line in lines]
        assert found == ([None, None] if count == 0 else [one[:count] for one in default])
        said = capfd.readouterr().err
        for source, reference, translation in found[-1] or []:
            assert f"    {source}\n  = {reference}\n  > {translation}".rstrip() in said
    page = result.folder.report.read_text()
    assert "By epoch" in page
    assert all(text in page for text in ("<dt>epoch 1</dt>", "<dt>epoch 2</dt>"))


def epochs(result: TrainResult) -> list[dict[str, Any]]:
    """The epoch metrics of a run, without those that depend on time."""
    lines = [json.loads(line) for line in result.folder.metrics.read_text().splitlines()]
    kept = ("step", "epoch", "loss", "valid_loss", "bleu", "samples")
    return [{name: line.get(name) for name in kept} for line in lines if line["kind"] == "epoch"]


class TestRun:
    def test_what_a_run_leaves(self, corpus: Path, tmp_path: Path) -> None:
        result = new(corpus, tmp_path, "run", tensorboard=True, average_last=2).run()
        there = {path.name for path in result.folder.path.rglob("*") if path.is_file()}
        for name in (
            *("config.yaml", "metrics.jsonl", "result.json", "src.model", "trg.model"),
            *("best.safetensors", "last.safetensors", "averaged.safetensors"),
        ):
            assert name in there
        assert any("tfevents" in name for name in there)
        assert [entry["epoch"] for entry in epochs(result)] == [0, 1]
        assert result.scores is not None
        assert len(result.examples) > 0

    def test_utilization_is_recorded(self, corpus: Path, tmp_path: Path) -> None:
        for monitor, epochs_noted in ((True, 2), (False, 0)):
            result = new(corpus, tmp_path, f"monitor {monitor}", monitor=monitor).run()
            lines = [json.loads(line) for line in result.folder.metrics.read_text().splitlines()]
            noted = [line for line in lines if line["kind"] == "use"]
            assert [line["step"] for line in noted] == [
                line["step"] for line in lines if line["kind"] == "epoch" and monitor
            ]
            assert len(noted) == epochs_noted
            assert all(line["cpu_share"] > 0 and line["gpu_share"] is None for line in noted)

    def test_fine_tuning_starts_from_other_weights(self, corpus: Path, tmp_path: Path) -> None:
        first = new(corpus, tmp_path, "first", epochs=3).run()
        tuned = new(corpus, tmp_path, "tuned", epochs=1, weights=str(first.folder.path)).run()
        assert epochs(tuned)[0]["loss"] < epochs(first)[0]["loss"]

    def test_fine_tuning_is_resumed_without_the_weights_it_started_from(
        self, corpus: Path, tmp_path: Path
    ) -> None:
        first = new(corpus, tmp_path, "first", epochs=1).run().folder.path
        runs = [
            new(corpus, tmp_path, name, epochs=1, weights=str(first)).run().folder.path
            for name in ("tuned", "untrained", "expected")
        ]
        tuned, untrained, expected = runs
        more: dict[str, Any] = {"changes": {"epochs": 2}, "cache": corpus / "cache"}
        Trainer.resume(expected, quiet=True, **more).run()
        first.rename(tmp_path / "gone")
        Trainer.resume(tuned, quiet=True, **more).run()
        assert weights_of(tuned) == weights_of(expected)
        shutil.rmtree(untrained / "state")  # a fresh start needs the weights
        with pytest.raises(TranslationError, match="does not exist"):
            Trainer.resume(untrained, quiet=True, **more).run()

    def test_fine_tuning_on_another_corpus_keeps_the_vocabularies_of_the_weights(
        self, corpus: Path, tmp_path: Path
    ) -> None:
        """Vocabularies of the new corpus may have the same sizes: nobody would notice that each
        embedding is that of another piece."""
        text = (corpus / "pairs.tsv").read_text(encoding="utf-8")
        (tmp_path / "pairs.tsv").write_text(text.replace("o", "q"), encoding="utf-8")
        first = new(corpus, tmp_path, "first", epochs=1).run().folder.path
        weights = first / "weights" / "last.safetensors"
        for name, given in (("folder", first), ("file", weights)):
            trainer = new(tmp_path, tmp_path, name, epochs=1, weights=str(given))
            tuned = trainer.run().folder.path
            for side in ("src", "trg"):
                model = Path("vocabulary") / f"{side}.model"
                assert (tuned / model).read_bytes() == (first / model).read_bytes()
            more: dict[str, Any] = {"changes": {"epochs": 2}, "cache": tmp_path / "cache"}
            assert Trainer.resume(tuned, quiet=True, **more).run().updates > 0
        words = ["evaluate", tuned, tmp_path / "pairs.tsv", "--cache", tmp_path / "cache"]
        found = CliRunner().invoke(app, [str(word) for word in words])
        assert "have a source or a target sentence that train has" in found.stdout
        with pytest.raises(TranslationError, match=r"joint = true: the run of weights = .* false"):
            new(corpus, tmp_path, "joint", joint=True, weights=str(first)).run()

    def test_weights_that_do_not_fit(self, corpus: Path, tmp_path: Path) -> None:
        first = new(corpus, tmp_path, "first", epochs=1).run()
        with pytest.raises(TranslationError, match=r"is \(.*\), the model has \("):
            new(corpus, tmp_path, "wide", width=32, weights=str(first.folder.path)).run()
        # Weights of another number of heads have the same shapes.
        with pytest.raises(TranslationError, match=r"heads = 4: the run of .* has heads = 2"):
            new(corpus, tmp_path, "heads", heads=4, weights=str(first.folder.path)).run()
        assert not (tmp_path / "heads").exists()

    def test_max_steps_ends_the_run(self, corpus: Path, tmp_path: Path) -> None:
        assert new(corpus, tmp_path, "short", max_steps=5).run().updates == 5


class TestSettings:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"epoch": 3}, r"unknown key 'epoch' \(did you mean 'epochs'\?\)"),
            ({"epochs": 0}, "epochs = 0: expected a whole number from 1"),
            ({"preset": "tinny"}, r"preset = 'tinny' \(did you mean 'tiny'\?\): expected tiny"),
            ({"dropout": 1.5}, "dropout = 1.5: expected a number from 0 to 0.999"),
            ({"joint": "yes"}, "joint = 'yes': expected true or false"),
            ({"data": 5}, "data = 5: expected a path, or a list of them"),
            ({"data": ["a", None]}, "expected a path, or a list of them"),
        ],
    )
    def test_errors_name_the_setting(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(TranslationError, match=message):
            TrainSettings.from_dict(values)

    def test_packed(self, corpus: Path, tmp_path: Path) -> None:
        """On a CPU, auto is off, and the run keeps that."""
        assert TrainSettings.from_dict(yaml.safe_load("packed: on")).packed == "on"
        on = TrainSettings(preset="tiny", packed="on")
        assert on.model().attention_dropout == 0
        assert on.replace(packed="off").model().attention_dropout is None
        run = new(corpus, tmp_path, "run", epochs=1, max_steps=1)
        assert run.settings.packed == "auto"
        folder = run.run().folder
        assert TrainSettings.read(folder.config).packed == "off"

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"attention_dropout": 0.1}, "attention_dropout = 0.1: expected 0; or packed = off"),
            ({"shapes": 4}, "shapes = 4: packed batches have one shape; expected none"),
            ({"on_oom": "halve"}, "on_oom = halve: packed batches have no rows to halve"),
        ],
    )
    def test_what_packed_batches_do_not_have(
        self, corpus: Path, tmp_path: Path, values: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TranslationError, match=f"packed = on with {message}"):
            new(corpus, tmp_path, "none", packed="on", **values)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"packed": "on", "tokens": 2}, "tokens = 2 with packed = on: the longest"),
            ({"packed": "off", "tokens": 2}, "tokens = 2: expected at least"),
            ({"max_length": 4}, "max_length = 4: all .* pairs of train are longer"),
        ],
    )
    def test_a_new_run_that_its_corpus_refuses_is_removed(
        self, corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        """Resuming it in vain removes nothing: its folder may have more than this run's files."""
        made = new(corpus, tmp_path, "run", **changes)
        again = Trainer.resume(made.folder.path, cache=corpus / "cache", quiet=True)
        for run, is_left in ((again, True), (made, False)):
            with pytest.raises(ValueError, match=message):
                run.run()
            assert made.folder.path.exists() is is_left

    def test_yaml_takes_some_numbers_for_text(self) -> None:
        assert TrainSettings.from_dict(yaml.safe_load("lr: 1e-3")).lr == 0.001
        with pytest.raises(TranslationError, match="lr = 'fast': expected a number"):
            TrainSettings.from_dict({"lr": "fast"})

    def test_round_trip(self) -> None:
        settings = TrainSettings(data=("a", "b"), epochs=3)
        assert (
            TrainSettings.from_dict(yaml.safe_load(yaml.safe_dump(settings.to_dict()))) == settings
        )


class TestCommands:
    def invoke(self, *arguments: object, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(word) for word in arguments], input=stdin)

    def test_train_prints_its_score_last(self, corpus: Path, tmp_path: Path) -> None:
        config = tmp_path / "small.yaml"
        config.write_text(yaml.safe_dump({**SMALL, "epochs": 5}), encoding="utf-8")
        found = self.invoke(
            *("train", "--data", corpus / "pairs.tsv", "--config", config, "--quiet"),
            *("--epochs", 1, "--time-limit", "1h"),
            *("--project", tmp_path / "runs", "--cache", corpus / "cache"),
        )
        assert found.exit_code == 0, found.output
        assert found.stdout.splitlines()[-1].startswith("BLEU ")
        assert (
            "valid: none of its 4 pairs shares a sentence with train; the best weights "
            "were chosen on it\n"
        ) in found.stdout
        stored = yaml.safe_load((tmp_path / "runs" / "exp" / "config.yaml").read_text())
        assert (stored["epochs"], stored["width"]) == (1, 16)  # flags override the file
        assert (stored["data"], stored["time_limit"]) == ([str(corpus / "pairs.tsv")], 3600.0)
        again = self.invoke(
            *("train", "--resume", tmp_path / "runs" / "exp", "--epochs", 2, "--time-limit", 0),
            *("--cache", corpus / "cache"),
        )
        assert again.exit_code == 0, again.output
        lines = read_metrics(tmp_path / "runs" / "exp" / "metrics.jsonl")
        assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [0, 1]

    def test_translate(self, trained: Path, tmp_path: Path) -> None:
        told = self.invoke("translate", trained, "one and two or three", "four and one or zero")
        assert told.exit_code == 0, told.output
        piped = self.invoke(
            "translate", trained, stdin="one and two or three\nfour and one or zero\n"
        )
        text = tmp_path / "text"
        text.write_text("one and two or three\nfour and one or zero\n", encoding="utf-8")
        read = self.invoke("translate", trained, "--file", text)
        assert told.stdout == piped.stdout == read.stdout
        assert len(told.stdout.splitlines()) == 2

    def test_evaluate(self, trained: Path, corpus: Path) -> None:
        found = self.invoke(
            *("evaluate", trained, "--split", "valid", "--lowercase", "--cache", corpus / "cache")
        )
        assert found.exit_code == 0, found.output
        assert "lowercased" in found.stdout
        assert (
            "valid: none of its 4 pairs shares a sentence with train; the best weights "
            "were chosen on it\n"
        ) in found.stdout
        assert found.stdout.splitlines()[-1].startswith("BLEU ")

    def test_prepare_says_where(self, corpus: Path, tmp_path: Path) -> None:
        found = self.invoke(
            *("prepare", corpus / "pairs.tsv", "--src", "en", "--trg", "de"),
            *("--vocabulary", 300, "--cache", tmp_path),
        )
        assert found.exit_code == 0, found.output
        assert Path(found.stdout.splitlines()[-1]).is_dir()
        assert "TSV without a header, column 1 is en, column 2 is de" in " ".join(
            found.stderr.split()
        )

    def test_evaluate_scores_the_file_as_it_is(self, trained: Path, tmp_path: Path) -> None:
        pairs = tmp_path / "test" / "test.tsv"  # a folder without a train split is enough
        pairs.parent.mkdir()
        pairs.write_text("one and two or three\teins und zwei oder drei\n" * 3, encoding="utf-8")
        found = self.invoke("evaluate", trained, pairs.parent)
        assert found.exit_code == 0, found.output
        assert "3 sentences" in found.stdout

    def test_translations_are_printed_part_by_part(
        self, trained: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sentences = "one and two or three\nfour and one or zero\nfive\n"
        whole = self.invoke("translate", trained, stdin=sentences)
        monkeypatch.setattr("headrace.cli.translate._PART", 2)
        parts = self.invoke("translate", trained, "--quiet", stdin=sentences)
        assert (parts.stdout, parts.stderr) == (whole.stdout, "")
        translate = TrainedModel.translate

        def interrupted(self: TrainedModel, given: list[str], **options: Any) -> list[str]:
            if given == ["five"]:
                raise KeyboardInterrupt
            return translate(self, given, **options)

        monkeypatch.setattr(TrainedModel, "translate", interrupted)
        begun = self.invoke("translate", trained, stdin=sentences)
        assert begun.exit_code != 0
        assert "translating 2/3" in begun.stderr
        assert begun.stdout.splitlines() == whole.stdout.splitlines()[:2]

    def test_translate_gives_one_line_each(self, trained: Path, tmp_path: Path) -> None:
        text = tmp_path / "text"
        text.write_bytes("\ufeffone and two\r\n\u2028three\x0cfour\n\none\n".encode())
        found = self.invoke("translate", trained, "--file", text)
        assert found.stdout.count("\n") == 4
        found = self.invoke("translate", trained, "\udcff")
        assert "sentence 1: is not UTF-8" in str(found.exception)
        text.write_bytes(b"one\ntwo\nthr\xffee\n")
        found = self.invoke("translate", trained, "--file", text)
        assert f"{text}:3: is not UTF-8" in str(found.exception)

    def test_user_errors_are_headrace_errors(self, trained: Path, tmp_path: Path) -> None:
        for arguments in (
            ("train", tmp_path / "none.tsv", "--project", tmp_path / "no"),
            ("train", "--resume", tmp_path),
            ("train", "--resume", trained, "--lr", "3"),
            ("train", "--epochs", "0"),
            ("translate", trained, "--weights", "worst"),
            ("evaluate", trained, "--split", "nonsense"),
            ("train", "--plan", "nope", "--project", tmp_path / "no"),
            ("train", "--dropout", "1", "--project", tmp_path / "no"),
            ("train", "--weights", "nope.safetensors", "--project", tmp_path / "no"),
        ):
            found = self.invoke(*arguments)
            assert found.exit_code != 0
            assert isinstance(found.exception, HeadraceError), found.exception
        assert not (tmp_path / "no").exists()  # nothing was begun

    def test_wrong_usage_exits_with_2(self, tmp_path: Path) -> None:
        """As for Typer's own usage errors. Later failures exit with 1."""
        for words in (["--lr", "-1"], ["--plan", "nope"], ["--heads", "3"], ["--config", "none"]):
            found = self.invoke("train", "--project", tmp_path / "no", *words)
            assert isinstance(found.exception, HeadraceError)
            assert found.exception.exit_code == 2, words

    def test_options_that_resume_does_not_take_are_named_as_typed(self, trained: Path) -> None:
        others = ("--stop-code", "zero", "--name", "x", trained)
        found = self.invoke("train", "--resume", trained, *others)
        assert "leave out --name, --stop-code, DATA, or edit" in str(found.exception)

    def test_resume_continues_in_the_same_folder(self, tmp_path: Path) -> None:
        elsewhere = self.invoke(
            "train", "--resume", tmp_path / "exp", "--project", tmp_path / "other"
        )
        assert "leave out --project, or edit" in str(elsewhere.exception)
        there = self.invoke("train", "--resume", tmp_path / "exp", "--project", tmp_path)
        assert "leave out" not in str(there.exception)  # there is no such run, though

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--tokens", 100, "--sentences", 5], "--tokens 100 and --sentences 5: expected one"),
            (["--src", "xx"], "src = 'xx' and trg = 'en': the built-in corpus is"),
            (["--time-limit", "soon"], "time_limit = 'soon': expected seconds, or a time such as"),
        ],
    )
    def test_invalid_settings_leave_no_folder(
        self, tmp_path: Path, words: list[object], told: str
    ) -> None:
        found = self.invoke("train", "--project", tmp_path / "runs", *words)
        assert told in str(found.exception)
        assert not (tmp_path / "runs").exists()

    def test_a_run_without_weights_says_when_it_will_have_some(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").touch()
        with pytest.raises(TranslationError, match="writes weights at the end of each epoch"):
            load_weights(torch.nn.Linear(1, 1), tmp_path / "weights" / "best.safetensors")


class TestChanged:
    """A run whose corpus or settings have changed is refused and left unchanged."""

    def unfinished(self, corpus: Path, tmp_path: Path) -> Path:
        (tmp_path / "pairs.tsv").write_bytes((corpus / "pairs.tsv").read_bytes())
        run = new(tmp_path, tmp_path, "run").run().folder.path
        (run / "result.json").unlink()
        return run

    def test_another_corpus(self, corpus: Path, tmp_path: Path) -> None:
        run = self.unfinished(corpus, tmp_path)
        before = everything_in(run / "vocabulary")
        text = (tmp_path / "pairs.tsv").read_text(encoding="utf-8")
        (tmp_path / "pairs.tsv").write_text(text.replace("o", "q"), encoding="utf-8")
        with pytest.raises(
            TranslationError, match="differs from the vocabularies that the corpus gives now"
        ):
            Trainer.resume(run, cache=tmp_path / "cache", quiet=True).run()
        assert everything_in(run / "vocabulary") == before

    @pytest.mark.parametrize("split", ["train", "valid"])
    def test_other_pairs_with_the_same_vocabularies(
        self, corpus: Path, tmp_path: Path, split: str
    ) -> None:
        """A run is refused if train or valid has changed, even between two epochs; test may."""
        lines = (corpus / "pairs.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
        files = {"train": lines[30:], "valid": lines[:15], "test": lines[15:30]}
        for name, pairs in files.items():
            (tmp_path / f"{name}.tsv").write_text("".join(pairs), encoding="utf-8")
        cache = tmp_path / "cache"
        settings = TrainSettings.from_dict({**SMALL, "data": str(tmp_path), "epochs": 1})
        run = Trainer.create(settings, project=tmp_path / "runs", cache=cache, quiet=True).run()
        (tmp_path / "test.tsv").write_text("".join(lines[15:25]), encoding="utf-8")
        more: dict[str, Any] = {"changes": {"epochs": 2}, "cache": cache, "quiet": True}
        Trainer.resume(run.folder.path, **more).run()
        more["changes"]["epochs"] = 3
        (tmp_path / f"{split}.tsv").write_text("".join(reversed(files[split])), encoding="utf-8")
        before = everything_in(run.folder.path)
        with pytest.raises(
            TranslationError, match=f"step-[0-9]+: was saved with other pairs of {split} than"
        ):
            Trainer.resume(run.folder.path, **more).run()
        assert everything_in(run.folder.path) == before

    def test_another_model(self, corpus: Path, tmp_path: Path) -> None:
        run = self.unfinished(corpus, tmp_path)
        config = (run / "config.yaml").read_text(encoding="utf-8")
        (run / "config.yaml").write_text(config.replace("width: 16", "width: 32"))
        with pytest.raises(TranslationError, match="does not fit the model"):
            Trainer.resume(run, cache=tmp_path / "cache", quiet=True).run()

    @pytest.mark.parametrize("options", [{}, {"packed": "on", "tokens": 100}])
    def test_another_division_of_the_epoch_into_batches(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: dict[str, Any],
    ) -> None:
        """Refused within an epoch, and allowed between two."""
        trainer = new(corpus, tmp_path, "run", epochs=1, valid_sentences=0, **options)
        add, epoch_of = EpochLoss.add_arrived, {}

        def stop_at_once(self: EpochLoss, arrived: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            add(self, arrived)

        def other_pairs(self: Any, epoch: int) -> Any:
            """As many batches of the same sizes, with other pairs."""
            return epoch_of[type(self)](self, epoch + 7)

        with monkeypatch.context() as patch:
            patch.setattr(EpochLoss, "add_arrived", stop_at_once)
            run = trainer.run().folder.path
        before = everything_in(run / "state")
        for plan in (BatchPlan, PackedPlan):
            epoch_of[plan] = plan.epoch
            monkeypatch.setattr(plan, "epoch", other_pairs)
        resumed = Trainer.resume(run, cache=corpus / "cache", quiet=True)
        with pytest.raises(
            TranslationError,
            match=r"saved after batch 1 of epoch 1, which had \d+ batches \(digest \w+\); "
            r"now the epoch has \d+ batches \(digest .* expected the same batches",
        ):
            resumed.run()
        assert everything_in(run / "state") == before
        monkeypatch.undo()
        again = Trainer.resume(run, cache=corpus / "cache", quiet=True)
        assert again.run().stopped is None
        for plan in (BatchPlan, PackedPlan):  # of an epoch that has ended they no longer matter
            monkeypatch.setattr(plan, "epoch", other_pairs)
        changes = {"epochs": 2}
        found = Trainer.resume(run, changes=changes, cache=corpus / "cache", quiet=True).run()
        assert found.stopped is None


def test_a_run_with_relative_paths_can_be_resumed_from_another_folder(
    corpus: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus)
    paths = {"data": "pairs.tsv", "weights": os.path.relpath(trained)}
    run = new(corpus, tmp_path, "run", max_steps=1, **paths).folder.path
    monkeypatch.chdir(tmp_path)
    assert Trainer.resume(run, cache=corpus / "cache", quiet=True).run().updates == 1


def test_a_moved_run_folder_still_translates(corpus: Path, tmp_path: Path) -> None:
    run = new(corpus, tmp_path, "run").run().folder.path
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    model = TrainedModel.load(moved, device="cpu")
    assert len(model.translate(["one and two or three", ""])) == 2
    assert model.translate([""]) == [""]


def test_memory_is_flat_over_2000_steps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "many.tsv").write_text(
        "".join(f"{n} and {n % 7}\t{n} und {n % 7}\n" for n in range(2100)), encoding="utf-8"
    )
    process, count = psutil.Process(), EpochLoss.add_arrived
    resident: list[int] = []

    def counted(self: EpochLoss, arrived: Any) -> None:
        resident.append(process.memory_info().rss)
        count(self, arrived)

    monkeypatch.setattr(EpochLoss, "add_arrived", counted)
    settings = {**SMALL, "width": 8, "sentences": 1, "epochs": 1, "save_every": 1e6}
    settings |= {"data": str(tmp_path / "many.tsv"), "vocabulary": 400}
    trainer = Trainer.create(
        TrainSettings.from_dict(settings), project=tmp_path, cache=tmp_path / "cache", quiet=True
    )
    assert trainer.run().updates >= 2000
    assert resident[2000] - resident[500] < 8e6


@pytest.mark.parametrize(
    ("shapes", "stored", "most"), [(None, False, 32), (5, False, 10), (None, True, 4)]
)
def test_graph_shapes_of_presets_and_plan_files(
    corpus: Path, tmp_path: Path, shapes: int | None, stored: bool, most: int
) -> None:
    """A preset gets two per bucket: full batches and the last one. A plan.yaml sets its own."""
    path = tmp_path / "plan.yaml"
    path.write_text("plan: {preset: graph, graph_shapes: 4}")
    settings = TrainSettings.from_dict(
        SMALL | {"data": [str(corpus)], "plan": str(path) if stored else "graph", "shapes": shapes}
    )
    data = prepared_for(settings, corpus / "cache")
    assert build_run(settings, data).plan.graph_shapes == most


def test_a_plan_file_is_kept_with_the_run(corpus: Path, tmp_path: Path) -> None:
    """A run keeps its plan if the file is changed or deleted, or the run folder is moved."""
    file = tmp_path / "mine.yaml"
    file.write_text("plan: {preset: pipeline, prefetch_depth: 3}")
    made = new(corpus, tmp_path, "run", plan=str(file))
    file.unlink()
    moved = tmp_path / "moved"
    made.folder.path.rename(moved)
    again = Trainer.resume(moved, cache=corpus / "cache", quiet=True)
    assert load_plan(again.settings.plan).plan.prefetch_depth == 3
    assert yaml.safe_load((moved / "config.yaml").read_text())["plan"] == "plan.yaml"
    assert again.run().updates > 0


def test_a_runs_config_can_start_another_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the plan file beside it, not one in the current directory."""
    file = tmp_path / "mine.yaml"
    file.write_text("plan: {preset: pipeline, prefetch_depth: 3}")
    made = new(corpus, tmp_path, "run", plan=str(file))
    (tmp_path / "plan.yaml").write_text("plan: {preset: baseline}")
    monkeypatch.chdir(tmp_path)
    words = ["train", "--config", str(made.folder.config), "--project", "other", "--max-steps", "1"]
    done = CliRunner().invoke(app, [*words, "--cache", str(corpus / "cache"), "--quiet"])
    assert done.exit_code == 0, done.exception
    assert load_plan(tmp_path / "other" / "exp" / "plan.yaml").plan.prefetch_depth == 3


@pytest.mark.parametrize("other", [None, "baseline"])
def test_another_plan_from_the_environment_keeps_the_batches(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """A plan with graphs has few batch shapes, even if HEADRACE_PLAN replaces it by one without."""
    with FakeDevice() as fake:
        monkeypatch.setattr("headrace.translation.build.open_device", lambda name: fake)
        settings = TrainSettings.from_dict(
            SMALL | {"data": [str(corpus)], "plan": "graph", "shapes": None, "precision": "fp32"}
        )
        data = prepared_for(settings, corpus / "cache")
        if other is not None:
            monkeypatch.setenv("HEADRACE_PLAN", other)
        parts = build_run(settings, data)
    assert parts.plan == parts.engine.plan
    assert parts.plan.name == (other or "graph")
    buckets = parts.loader.sampler._plan.buckets
    assert buckets is not None


def test_a_run_says_which_plan_it_has_and_that_it_is_not_compiled(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = TrainSettings.from_dict(
        SMALL | {"data": str(corpus / "pairs.tsv"), "plan": "max", "max_steps": 2}
    )
    for variable in ("", "event"):
        monkeypatch.setenv("HEADRACE_PLAN", variable)
        Trainer.create(settings, project=tmp_path, cache=corpus / "cache").run()
    lines = " ".join(capfd.readouterr().err.split())
    told = "plan max: the step is not compiled and runs as it is: Headrace does not compile for cpu"
    assert lines.count(told) == 1
    assert "HEADRACE_PLAN is set: this engine runs under plan event instead of max" in lines
    assert "plan max (fp32) on CPU" in lines
    assert "plan event (fp32) on CPU" in lines
