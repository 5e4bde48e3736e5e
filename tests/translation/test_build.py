"""Where `--packed auto` packs, and what it says where it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.parallel import SINGLE
from headrace.testing import FakeDevice
from headrace.translation import TrainSettings, build
from support.id_pairs import random_pairs

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
    data: Any = SimpleNamespace(splits={"train": random_pairs(tmp_path, 50, 20, 12)})
    settings = TrainSettings(**(LARGE | changes))
    with FakeDevice() as device:
        monkeypatch.setattr(build, "open_device", lambda name: device)
        assert "flex_attention does not run on" in str(build.why_padded(settings, data, SINGLE))
        monkeypatch.setattr(device, "compiles", True)
        found = build.why_padded(settings, data, SINGLE)
        assert found is None if why is None else str(found).startswith(why)
        two: Any = SimpleNamespace(several=True)
        assert build.why_padded(settings, data, two) is not None
