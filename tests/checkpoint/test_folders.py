"""Torn, foreign and older checkpoints: refused by name, or upgraded."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint import folders, latest_checkpoint, load_checkpoint, save_checkpoint
from headrace.errors import CheckpointError
from support.checkpoints import example, flip, names, same, truncate


def edit_json(path: Path, **changes: Any) -> None:
    file = path / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def resign(path: Path, state: Any) -> None:
    """Another state, with a checksum that fits."""
    content = {**json.loads((path / "state.json").read_text())["content"], "state": state}
    edit_json(path, content=content, sha256=folders._checksum(content))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda path: truncate(path / "tensors.safetensors"),
        "has .* bytes: expected .*; the file is incomplete",
    ),
    (lambda path: flip(path / "tensors.safetensors", -5), "the file was changed"),
    (lambda path: flip(path / "tensors.safetensors", 12), "incomplete|changed"),
    (lambda path: flip(path / "tensors.safetensors", 0), "incomplete|changed"),
    (lambda path: (path / "tensors.safetensors").write_bytes(b""), "has 0 bytes"),
    (lambda path: (path / "tensors.safetensors").unlink(), "cannot be read"),
    (lambda path: truncate(path / "state.json") or truncate(path / "state.json"), "not JSON"),
    (lambda path: flip(path / "state.json", -5), "incomplete|changed"),
    (lambda path: (path / "state.json").write_bytes(b"\xff\xfe\x00"), "incomplete, or not JSON"),
    (lambda path: (path / "state.json").write_text("[" * 100_000), "incomplete, or not JSON"),
    (lambda path: (path / "state.json").unlink(), "cannot be read"),
    (lambda path: edit_json(path, version=2), "has version = 2: this Headrace reads 1"),
    (lambda path: edit_json(path, version=[1]), r"has version = \[1\]"),
    (lambda path: edit_json(path, content={}), "does not match its own checksum"),
    (lambda path: edit_json(path, content={"a": math.nan}), "does not match its own checksum"),
    (lambda path: edit_json(path, format="other"), "has format = 'other': expected 'headrace-"),
    (lambda path: (path / "state.json").write_text("[1, 2]"), "has format = None"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_bad_one_is_refused_by_name_and_the_one_before_taken(
    tmp_path: Path,
    damage: Callable[[Path], object],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = save_checkpoint(tmp_path, example(1), step=1)
    bad = save_checkpoint(tmp_path, example(2), step=2)
    damage(bad)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert latest_checkpoint(tmp_path) == before
    (record,) = caplog.records
    assert "step-00000002" in record.getMessage()
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(bad)
    assert "step-00000002" in str(caught.value)
    # It does not count among those to keep, and is left to be looked at.
    save_checkpoint(tmp_path, example(3), step=3, keep=2)
    if folders.problem_of(bad, every_byte=False) is not None:
        assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    else:  # that takes reading all of it
        assert names(tmp_path) == ["step-00000002", "step-00000003"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["state.json", "tensors.safetensors"]), st.data())
def test_no_byte_can_change_unnoticed(file: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), example(1), step=1)
        content = bytearray((path / file).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        (path / file).write_bytes(content)
        try:
            found = load_checkpoint(path)
        except CheckpointError:
            return
        assert same(found, example(1))  # a blank in place of another


@pytest.mark.parametrize(
    "state",
    [{"$unknown": 1}, {"$tensor": "none"}, {"$tuple": 1}, {"$float": "x"}, {"$dict": [[1]]}],
)
def test_a_state_that_no_headrace_wrote(tmp_path: Path, state: Any) -> None:
    path = save_checkpoint(tmp_path, example(1), step=1)
    resign(path, state)
    with pytest.raises(CheckpointError, match="holds no state that can be read"):
        load_checkpoint(path)


def test_an_older_version_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, {"a": 1}, step=1)
    monkeypatch.setattr(folders, "VERSION", 3)
    with pytest.raises(CheckpointError, match="has version = 1: this Headrace reads 3"):
        load_checkpoint(path)
    rename = {"state": {"b": 1}}
    monkeypatch.setitem(folders.UPGRADES, 1, lambda content: {**content, "seen": 1})
    monkeypatch.setitem(folders.UPGRADES, 2, lambda content: {**content, **rename})
    assert load_checkpoint(path) == {"b": 1}
    assert load_checkpoint(save_checkpoint(tmp_path, {"c": 1}, step=2)) == {"c": 1}


def test_nothing_there(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="no checkpoint was looked for"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "step-00000001")
