"""Weights in one .safetensors file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import save_checkpoint, weights_from_file, weights_to_file
from headrace.checkpoint.tensor_file import DTYPE_NAMES
from headrace.device import Device
from headrace.errors import CheckpointError
from support.storage.checkpoints import DTYPES, names, on, raw, same, truncate


def test_weights_round_trip(tmp_path: Path, device: Device) -> None:
    path, weight = tmp_path / "weights[1].safetensors", on(device, 3.0, 4, 2)
    (tmp_path / ".writing-weights[1].safetensors-00").touch()
    tensors = {"head": weight, "embedding": weight, "t": weight.t(), "n": torch.tensor(1)}
    weights_to_file(path, tensors, device=device)
    first = path.read_bytes()
    separate = {name: tensors[name].detach().clone() for name in sorted(tensors)}
    weights_to_file(path, separate, device=device)
    assert path.read_bytes() == first
    found = weights_from_file(path)
    assert list(found) == ["embedding", "head", "n", "t"]
    assert all(raw(found[name]) == raw(tensors[name]) for name in tensors)
    assert names(tmp_path) == [path.name]
    assert device.pinned.lent == 0


def test_the_safetensors_package_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    known = [dtype for dtype in DTYPES if dtype in package._TYPES.values()]
    tensors = {f"ü {n}": torch.ones(n, 2).to(dtype) for n, dtype in enumerate(known)}
    path, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.dtype in DTYPE_NAMES}
    weights_to_file(path, tensors)
    assert same(dict(sorted(package.load_file(path).items())), dict(sorted(tensors.items())))
    package.save_file(tensors, theirs, metadata={"format": "pt"})
    assert same(weights_from_file(theirs), dict(sorted(tensors.items())))
    whole = save_checkpoint(
        tmp_path, {"a": tensors, "b": torch.ones(2, dtype=torch.complex128)}, step=1
    )
    assert len(package.load_file(whole / "tensors.safetensors")) == len(tensors) + 1


def test_weights_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    for tensors, message in (
        ({"__metadata__": torch.ones(1)}, "cannot be a tensor's name"),
        ({1: torch.ones(1)}, "cannot be a tensor's name"),
        ({"a": 1}, "weight 'a' is a int: expected a tensor"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "which safetensors does not support"),
        ({"a": torch.ones(1, device="meta")}, "weight 'a' is a tensor on the meta device"),
    ):
        with pytest.raises(CheckpointError, match=message):
            weights_to_file(path, tensors)  # type: ignore[arg-type]
    weights_to_file(path, {"a": torch.ones(3)})

    def fail(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(
                CheckpointError, match="No space left on device; the old file is unchanged"
            ):
                weights_to_file(path, {"a": torch.zeros(3)})
        assert names(tmp_path) == ["w.safetensors"]
        assert torch.equal(weights_from_file(path)["a"], torch.ones(3))
    with pytest.raises(CheckpointError, match="were not read from"):
        weights_from_file(tmp_path / "missing")
    truncate(path)
    with pytest.raises(CheckpointError, match="incomplete, or not a safetensors file"):
        weights_from_file(path)


def test_loaded_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    weights_to_file(path, {"a": torch.ones(1000), "n": torch.tensor(2.0), "e": torch.empty(0, 3)})
    found = weights_from_file(path)
    path.write_bytes(b"\xff" * path.stat().st_size)  # in place, as other tools may write
    assert torch.equal(found["a"], torch.ones(1000))
    assert (found["n"].shape, found["e"].shape) == ((), (0, 3))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}},
        {"a": {"dtype": "X1", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4 * 10**30]}},
        {"a": 1},
        [],
    ],
)
def test_wrong_headers(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CheckpointError, match="incomplete, or not a safetensors file"):
        weights_from_file(path)
