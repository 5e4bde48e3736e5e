"""Torn and foreign checkpoints, and those of another version: refused by name."""

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

from headrace.checkpoint import content as state_content
from headrace.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from headrace.checkpoint.content import checksum
from headrace.checkpoint.finding import find_problem
from headrace.errors import CheckpointError
from support.storage.checkpoints import example, flip, names, same, truncate


def edit_json(path: Path, **changes: Any) -> None:
    file = path / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def resign(path: Path, state: Any) -> None:
    """Replace the state, with a valid checksum."""
    content = {**json.loads((path / "state.json").read_text())["content"], "state": state}
    edit_json(path, content=content, sha256=checksum(content))


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
    (lambda path: flip(path / "state.json", -5), "not JSON|changed"),
    (lambda path: (path / "state.json").write_bytes(b"\xff\xfe\x00"), "is not UTF-8 text"),
    (lambda path: (path / "state.json").write_text("[" * 100_000), "cannot be read as JSON"),
    (lambda path: (path / "state.json").unlink(), "cannot be read"),
    (lambda path: edit_json(path, version=2), "version = 2: expected 1, which this Headrace reads"),
    (lambda path: edit_json(path, version=[1]), r"version = \[1\]: expected 1"),
    (lambda path: edit_json(path, content={}), "does not match its own checksum"),
    (lambda path: edit_json(path, content={"a": math.nan}), "does not match its own checksum"),
    (lambda path: edit_json(path, format="other"), "format = 'other': expected 'headrace-"),
    (lambda path: (path / "state.json").write_text("[1, 2]"), "expected a mapping, found a list"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_bad_checkpoint_is_named_and_the_next_older_one_is_used(
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
    # The bad one does not count as kept, and is not removed.
    save_checkpoint(tmp_path, example(3), step=3, keep=2)
    if find_problem(bad, every_byte=False) is not None:
        assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    else:  # only reading all of it would show the damage
        assert names(tmp_path) == ["step-00000002", "step-00000003"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["state.json", "tensors.safetensors"]), st.data())
def test_every_changed_byte_is_noticed(file: str, data: st.DataObject) -> None:
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
        assert same(found, example(1))  # one whitespace character replaced by another


@pytest.mark.parametrize(
    "state",
    [{"$unknown": 1}, {"$tensor": "none"}, {"$tuple": 1}, {"$float": "x"}, {"$dict": [[1]]}],
)
def test_a_state_from_another_program(tmp_path: Path, state: Any) -> None:
    path = save_checkpoint(tmp_path, example(1), step=1)
    resign(path, state)
    with pytest.raises(CheckpointError, match="holds no state that can be read"):
        load_checkpoint(path)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, {"a": 1}, step=1)
    monkeypatch.setattr(state_content, "VERSION", 3)
    with pytest.raises(CheckpointError, match="version = 1: expected 3, which"):
        load_checkpoint(path)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "step-00000001")
