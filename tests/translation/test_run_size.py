"""Which preset a run gets, and how long it is said to take."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.device import open_device
from headrace.errors import TranslationError
from headrace.fake import FakeDevice
from headrace.plan import Plan
from headrace.translation import Trainer, TrainSettings, prepared_for
from headrace.translation.build import build_run
from headrace.translation.run_size import (
    FirstBatches,
    about,
    choose_preset,
    cpu_batch_seconds,
    estimated_seconds,
    planned_parameters,
    preset_of_weights,
    training_seconds,
    warmup_warning,
)
from headrace.translation.settings import time_text
from support.paths import BENCHMARKS
from support.translation.trainers import SMALL


def test_the_preset_follows_device_and_corpus() -> None:
    assert {choose_preset(open_device("cpu"), pairs) for pairs in (10, 10**8)} == {"tiny"}
    with FakeDevice() as device:
        chosen = [choose_preset(device, n) for n in (0, 19_999, 20_000, 200_000, 10_000_000)]
    assert chosen == ["tiny", "tiny", "small", "base", "big"]


def test_a_run_says_its_preset_and_stores_it(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = SMALL | {"data": str(corpus / "pairs.tsv"), "preset": "auto", "max_steps": 1}
    settings = TrainSettings.from_dict(values)
    trainer = Trainer.create(settings, project=tmp_path, cache=corpus / "cache")
    assert TrainSettings.read(trainer.folder.config).preset == "auto"
    trainer.run()
    said = " ".join(capfd.readouterr().err.split())
    assert "CPU and 196 pairs: preset tiny, 0.0 M parameters; about 1 second for 2 epochs" in said
    stored = yaml.safe_load(trainer.folder.config.read_text())
    assert (stored["preset"], stored["plan"]) == ("tiny", "pipeline")
    assert "captures no graphs" not in said  # a CPU leaves no choice of plans


def test_weights_to_start_from_bring_their_preset(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("preset: small\n")
    for weights in (tmp_path, tmp_path / "weights" / "best.safetensors"):
        assert preset_of_weights(str(weights)) == "small"
    assert preset_of_weights(None) is None
    assert preset_of_weights(str(tmp_path / "model.safetensors")) is None


def test_a_model_needs_a_chosen_preset() -> None:
    assert TrainSettings().preset == "auto"
    with pytest.raises(TranslationError, match="preset = auto: is chosen when a run starts"):
        TrainSettings().model()


def test_the_estimate_grows_with_epochs_and_ends_with_max_steps(corpus: Path) -> None:
    def seconds(**changes: object) -> float:
        values = SMALL | {"data": str(corpus / "pairs.tsv"), "plan": "pipeline", **changes}
        settings = TrainSettings.from_dict(values)
        return estimated_seconds(build_run(settings, prepared_for(settings, corpus / "cache")))

    once = seconds(epochs=1)
    assert seconds(epochs=10) == pytest.approx(10 * once)
    assert seconds(epochs=10, max_steps=13) == pytest.approx(once)  # 13 batches are an epoch
    assert seconds(epochs=1, inner=4096) > once


def test_the_estimate_for_a_cpu_is_near_the_recorded_demo() -> None:
    """2026-11-16-cpu-demo.txt: 454 batches took 32 to 33 s with two threads."""
    recorded_s = 32.5 / 454
    found = cpu_batch_seconds(tokens=337_096 / 454, millions=1.18, layers=4, threads=2)
    assert found == pytest.approx(recorded_s, rel=0.2)


def test_the_estimate_under_graph_is_near_what_was_recorded() -> None:
    """The rates were fitted to the first two rows, and to none of the others. `base` has 32,000
    words on each side there."""
    graphs = stored("2026-11-15-h200-graphs.json")
    shapes = stored("2026-11-16-h200-compiled-shapes.json")["rows"]
    fitted = [(1800, graphs["30x60-bf16"]["rows"]["graph"]["ms"])]
    fitted += [(16_384, graphs["256x64-bf16"]["rows"]["graph"]["ms"])]
    others = [(row["tokens"], row["graph ms"]) for row in shapes.values()]
    for corpus in ("multi30k", "3am"):  # tokens of both sides
        row = graphs[corpus]
        others.append((row["real tokens a timed batch"] / 2, row["rows"]["graph"]["ms"]))
    settings = TrainSettings(preset="base", epochs=1)
    words: Any = SimpleNamespace(vocabularies=(range(32_000), range(32_000)))
    parameters = planned_parameters(settings, words)
    assert parameters == 76_908_544
    with FakeDevice() as device:
        for rows, tolerance in ((fitted, 0.02), (others, 0.25)):
            for tokens, recorded_ms in rows:
                found = training_seconds(
                    settings, device, Plan.preset("graph"), 1, tokens, parameters
                )
                assert 1e3 * found == pytest.approx(recorded_ms, rel=tolerance)


def stored(name: str) -> Any:
    return json.loads((BENCHMARKS / "results" / name).read_text(encoding="utf-8"))


def test_a_run_that_ends_within_its_warmup_is_warned_about(corpus: Path) -> None:
    def warning(**changes: object) -> str | None:
        values = SMALL | {"data": str(corpus / "pairs.tsv"), "plan": "pipeline", "warmup": 26}
        values |= changes
        settings = TrainSettings.from_dict(values)
        return warmup_warning(build_run(settings, prepared_for(settings, corpus / "cache")))

    assert warning() == (  # 2 epochs of 13 batches
        "the learning rate does not reach its peak: the run has 26 updates, its warmup 26. "
        "Use a smaller --warmup, or more --epochs"
    )
    assert warning(epochs=3) is None
    assert warning(epochs=3, accumulate=2) is not None  # 21 updates
    assert warning(max_steps=5) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.1, "about 1 second"), (17, "about 17 seconds"), (78, "about 80 seconds"),
        (170, "about 3 minutes"), (15 * 3600, "about 15 hours"), (3 * 86_400, "about 3 days"),
    ],
)  # fmt: skip
def test_times_in_words(seconds: float, words: str) -> None:
    assert about(seconds) == words


def test_the_first_batches_are_measured_once_after_warming_up() -> None:
    first = FirstBatches(skip=2, measured=3)
    clock = [10.0, 20.0, 20.5, 21.0, 21.5, 22.0]
    assert [first.on_batch(now) for now in clock] == [None, None, None, None, 0.5, None]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1h30m", 5400), (60, 60), ("0", 0)],
)
def test_time_limits_are_read(text: object, seconds: float) -> None:
    settings = TrainSettings.from_dict({"time_limit": text})
    assert settings.time_limit == seconds
    assert TrainSettings.from_dict({"time_limit": time_text(seconds)}) == settings


@pytest.mark.parametrize("text", ["soon", "", "5x", "m", "-5", "1.2.3m"])
def test_time_limits_that_are_refused(text: str) -> None:
    with pytest.raises(TranslationError, match="expected seconds, or a time such as 90s, 30m"):
        TrainSettings.from_dict({"time_limit": text})
