"""Where `--packed auto` packs, what it says where it does not, and how large batches are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.device import open_device
from headrace.errors import TranslationError
from headrace.fake import FakeDevice
from headrace.parallel import SINGLE
from headrace.plan import LoaderPlan
from headrace.translation import TrainSettings, batching, build
from support.translation.id_pairs import random_pairs

LARGE: dict[str, Any] = {"plan": "max", "tokens": 10_000}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"tokens": None, "sentences": 2000}, None),
        ({"attention_dropout": 0.0}, None),
        ({"plan": "pipeline"}, "plan pipeline does not compile"),
        ({"tokens": 8191}, "8,191 target tokens per batch, less than 8,192"),
        ({"shapes": 8}, "shapes = 8: packed batches have one shape"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: expected 0"),
        ({"on_oom": "halve"}, "on_oom = halve: packed batches have no rows"),
    ],
)
def test_packed_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str | None
) -> None:
    pairs = random_pairs(tmp_path, 50, 20, 12)
    data: Any = SimpleNamespace(splits={"train": pairs, "valid": pairs})
    settings = TrainSettings(**(LARGE | changes))
    with FakeDevice() as device:
        found = batching.why_padded(settings, data, SINGLE, device)
        assert "flex_attention does not run on" in str(found)
        monkeypatch.setattr(device, "compiles", True)
        found = batching.why_padded(settings, data, SINGLE, device)
        assert found is None if why is None else str(found).startswith(why)
        two: Any = SimpleNamespace(several=True)
        found = batching.why_padded(settings, data, two, device)
        assert found == "several ranks: only --packed on packs" if why is None else found


@pytest.mark.parametrize(("plan", "may"), [("auto", True), ("max", True), ("graph", False)])
def test_the_compiler_is_loaded_early_where_it_may_be_needed(
    monkeypatch: pytest.MonkeyPatch, plan: str, may: bool
) -> None:
    with FakeDevice() as device:
        settings = TrainSettings(plan=plan)
        assert not build.may_compile(settings, device)
        monkeypatch.setattr(device, "compiles", True)
        assert build.may_compile(settings, device) is may
        monkeypatch.setenv("HEADRACE_PLAN", "baseline")
        assert not build.may_compile(settings, device)


def test_a_packed_batch_holds_the_longest_sentence(tmp_path: Path) -> None:
    """Of train and of valid. Fewer tokens are refused; few sentences make a larger batch."""
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
    splits = {
        "train": random_pairs(tmp_path / "train", 50, 20, 12),
        "valid": random_pairs(tmp_path / "valid", 5, 20, 30),
    }
    longest = (splits["valid"].lengths - [0, 1]).max(axis=0).tolist()
    assert min(longest) > splits["train"].lengths.max()
    data: Any = SimpleNamespace(splits=splits)

    def lengths(**values: Any) -> tuple[int, int]:
        settings = TrainSettings(packed="on", plan="pipeline", max_length=500, **values)
        device = open_device("cpu")
        plan, loader = batching.resolve_plans(settings, device)
        return batching.plan_batches(settings, data, plan, loader, device).epoch(0)[0].lengths

    message = (
        "tokens = 9 with packed = on: the longest target sentence of train and valid takes "
        f"{longest[1]} tokens"
    )
    with pytest.raises(TranslationError, match=message):
        lengths(tokens=9)
    for found in (lengths(tokens=longest[1]), lengths(sentences=1)):
        assert all(tokens <= size < 50 for tokens, size in zip(longest, found, strict=True))


def test_padded_validation_batches_are_as_large_as_those_of_training(tmp_path: Path) -> None:
    """Larger ones might not fit into memory. Only a longer sentence makes one larger."""
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
    splits = {
        "train": random_pairs(tmp_path / "train", 50, 20, 12),
        "valid": random_pairs(tmp_path / "valid", 50, 20, 30),
    }
    data: Any = SimpleNamespace(splits=splits)
    longest = int(splits["valid"].lengths[:, 1].max())

    def largest(loader: LoaderPlan, **values: Any) -> tuple[int, int]:
        """The most pairs and the most target tokens of a validation batch."""
        settings, device = TrainSettings(plan="pipeline", **values), open_device("cpu")
        plan, _ = batching.resolve_plans(settings, device)
        training = batching.plan_batches(settings, data, plan, loader, device)
        epoch = batching.plan_validation(settings, data, loader, training).epoch(0)
        batches = [epoch[number].indices for number in range(len(epoch))]
        assert sorted(np.concatenate(batches)) == list(range(50))
        targets = splits["valid"].lengths[:, 1]
        return max(map(len, batches)), max(int(targets[batch].sum()) for batch in batches)

    assert largest(LoaderPlan())[0] == 30
    assert largest(LoaderPlan(batch_size=7))[0] == 7
    assert longest < largest(LoaderPlan(), tokens=100)[1] <= 100
    assert largest(LoaderPlan(), tokens=20)[1] == longest
