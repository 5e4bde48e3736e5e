"""A CTranslate2 model translates as the model that it was made from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import HeadraceError, MissingPackageError, TranslationError
from headrace.lifecycle import RunFolder
from headrace.translation import (
    ExportCheck,
    TrainedModel,
    TrainResult,
    export,
    export_ctranslate2,
)
from support.paths import ROOT
from support.storage.saved_runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), layers=2)


def load(run: Path) -> TrainedModel:
    return TrainedModel.load(run, device="cpu", precision="fp32")


def invoke(run: Path, *arguments: object) -> Any:
    words = ["export", run, "--cache", run.parent / "cache", *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


class TestWithCtranslate2:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("ctranslate2", reason="needs pip install 'headrace[export]'")

    @pytest.mark.parametrize(
        "changes",
        [
            {"norm": "pre", "tied": True, "joint": True},
            {"norm": "pre", "tied": False, "joint": True},
            {"norm": "post", "tied": True, "joint": False},
            {"norm": "post", "tied": False, "joint": False},
        ],
    )
    def test_every_kind_of_model(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        model = load(write_run(tmp_path, layers=2, **changes))
        sentences = ["one and two or three", "four", "", "zero and " * 200, "六 and ü"]
        found = export_ctranslate2(model, tmp_path / "out" / "model", check=sentences)
        assert found == ExportCheck(4, 4, None)
        files = {path.name for path in (tmp_path / "out" / "model").iterdir()}
        assert {"model.bin", "config.json", "src.model", "trg.model"} <= files
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]

    def test_the_example_of_the_documentation_runs(
        self,
        run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        export_ctranslate2(load(run), Path("my-model"))
        text = (ROOT / "docs" / "translation-use.md").read_text(encoding="utf-8")
        (code,) = (block for block in text.split("```") if block.startswith("python\nimport ctr"))
        code = code.removeprefix("python\n").replace("beam_size=3", "beam_size=1")
        exec(compile(code, "docs/translation-use.md", "exec"), {})
        found = capsys.readouterr().out.splitlines()
        ours = load(run).translate(["A dog runs.", "It rains."], beam=1)
        # `translate` ends sooner where a model repeats itself, as this one does.
        assert len(found) == 2
        for line, expected in zip(found, ours, strict=True):
            assert expected
            assert line.startswith(expected[:-1])

    def test_the_command_compares_held_out_sentences(self, run: Path) -> None:
        found = invoke(run)
        assert found.exit_code == 0, found.output
        assert found.stdout == f"4 of 4 translations are equal\n{run / 'ctranslate2'}\n"
        again = invoke(run)
        assert isinstance(again.exception, TranslationError)
        assert "already exists" in str(again.exception)
        assert again.exception.exit_code == 2

    def test_another_model_is_refused(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec_of = export._spec_of

        def without_scaling(model: Any) -> Any:
            spec = spec_of(model)
            spec.encoder.scale_embeddings = False
            return spec

        monkeypatch.setattr(export, "_spec_of", without_scaling)
        found = invoke(run, "--out", tmp_path / "model").exception
        assert isinstance(found, HeadraceError)
        assert found.exit_code == 1
        assert "of 4 translations differ; expected at most 10%" in str(found)
        assert not list(tmp_path.iterdir())
        unchecked = invoke(run, "--out", tmp_path / "model", "--no-check")
        assert unchecked.stdout == f"{tmp_path / 'model'}\n"

    def test_without_its_corpus_a_run_is_checked_with_its_examples(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = write_run(tmp_path)
        (tmp_path / "pairs.tsv").unlink()
        found = invoke(run).exception
        assert "--no-check exports without" in str(found)

        examples = [("one and two", "", ""), ("three", "", "")]
        stored = TrainResult(RunFolder(run), None, 1, examples=examples)
        monkeypatch.setattr("headrace.translation.result.stored_result", lambda folder: stored)
        checked = invoke(run)
        assert checked.stdout.startswith("2 of 2 translations are equal\n")
        assert "checking with the run's examples" in " ".join(checked.stderr.split())


def test_without_the_package_the_error_says_what_to_install(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    found = invoke(run, "--out", tmp_path / "model").exception
    assert isinstance(found, MissingPackageError)
    assert "pip install 'headrace[export]'" in str(found)


def test_one_translation_in_ten_may_differ() -> None:
    assert ExportCheck(100, 90, None).is_close
    assert not ExportCheck(100, 89, None).is_close
    assert not ExportCheck(8, 7, None).is_close
    assert ExportCheck(0, 0, None).is_close
