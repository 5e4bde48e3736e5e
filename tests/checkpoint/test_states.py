"""States: loading restores exactly what was saved."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    weights_from_file,
    weights_to_file,
)
from headrace.device import Device
from headrace.errors import CheckpointError
from support.storage.checkpoints import DTYPES, contents, example, names, raw, same


def round_trip(folder: Path, state: Any) -> Any:
    return load_checkpoint(save_checkpoint(folder, state, step=1))


# --- round trips ----------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    tensor.copy_(torch.tensor(list(content), dtype=torch.uint8))
    return tensor.view(dtype).view(shape)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "0", "a/b", "[0]", "~"])
nested = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nested)
def test_any_state_is_restored_exactly(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert same(round_trip(Path(folder), state), state)


def test_numbers_and_texts_that_json_lacks(tmp_path: Path) -> None:
    state = {
        "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1],
        "ints": [2**63, -(2**63), 10**5000, 2**53 + 1],
        "texts": ["\ud83d\ude00", "\ud800", "\U0001f600", "\0", ""],
        "\udcff": torch.ones(1),
        1: {1: 1, "1": 2, -1: 3, 10**30: 4},
        "counter": Counter({3: 2}),
    }
    back = round_trip(tmp_path, state)
    assert same(back, state)
    assert type(back["counter"]) is Counter


def test_keys_that_look_alike_name_different_tensors(tmp_path: Path) -> None:
    ones = [torch.full((1,), float(n)) for n in range(9)]
    state = {
        "a": {"b": ones[0]},
        "a/b": ones[1],
        "0": ones[2],
        0: ones[3],
        "[0]": ones[4],
        "__metadata__": ones[5],
        "~5f;_metadata__": ones[6],
        "": {"": ones[7]},
        "/": ones[8],
    }
    assert same(round_trip(tmp_path, state), state)
    assert same(round_trip(tmp_path, {"__metadata__": ones[0]}), {"__metadata__": ones[0]})
    assert same(round_trip(tmp_path, ones[0]), ones[0])


def test_tied_tensors_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    state = {
        "embedding": weight,
        "head": weight.detach(),
        "parameter": torch.nn.Parameter(weight),
        "row": weight[10:20],
        "transposed": weight.view(10, 100).t(),
        "double": weight.view(torch.complex64),
        "empty": [weight[:0], weight[5:5]],
        "rare": [torch.ones(2, dtype=torch.complex128)] * 2,
    }
    path = save_checkpoint(tmp_path, state, step=1)
    back = load_checkpoint(path)
    assert all(raw(back[key]) == raw(state[key]) for key in ("embedding", "head", "row", "double"))
    assert torch.equal(back["transposed"], weight.view(10, 100).t())
    assert back["embedding"].data_ptr() == back["head"].data_ptr() == back["parameter"].data_ptr()
    assert back["rare"][0].data_ptr() == back["rare"][1].data_ptr()
    assert back["row"].data_ptr() not in range(
        back["embedding"].data_ptr(), back["embedding"].data_ptr() + 4000
    )
    assert (path / "tensors.safetensors").stat().st_size < 3 * 4000 + 2000


def test_strided_conjugated_and_negated_tensors(tmp_path: Path) -> None:
    base = torch.arange(6).to(torch.complex64).view(2, 3) * (1 + 2j)
    state = [
        base.conj(),
        base,
        base.conj().imag,  # negated
        torch.ones(1).expand(4),
        torch.arange(12).view(3, 4)[:, ::2],
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(2, requires_grad=True) * 3,
    ]
    back = round_trip(tmp_path, state)
    assert all(torch.equal(one, other) for one, other in zip(back, state, strict=True))
    assert not any(tensor.requires_grad for tensor in back)


class Trained:
    """A model after some steps, with everything that training keeps."""

    def __init__(self, scheduler: Callable[[torch.optim.Optimizer], Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.scheduler = scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.parts = (self.model, self.optimizer, self.scheduler, self.scaler)

    def train(self, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            loss = self.model(torch.randn(5, 4)).square().mean() + step
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([loss.item()] if plateau else []))
            losses.append(loss.item())
        return losses

    def state(self) -> list[Any]:
        return [*(part.state_dict() for part in self.parts), torch.get_rng_state()]

    def resume(self, state: list[Any]) -> None:
        for part, kept in zip(self.parts, state[:-1], strict=True):
            part.load_state_dict(kept)
        torch.set_rng_state(state[-1])


rates = torch.optim.lr_scheduler
SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: rates.MultiStepLR(optimizer, [2, 2, 4]),
    lambda optimizer: rates.LambdaLR(optimizer, lambda step: 0.9**step),
    lambda optimizer: rates.OneCycleLR(optimizer, 1.0, total_steps=50),
    lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=0),
    lambda optimizer: rates.CosineAnnealingWarmRestarts(optimizer, 3),
    lambda optimizer: rates.SequentialLR(
        optimizer,
        [rates.LinearLR(optimizer), rates.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, scheduler: Callable[[torch.optim.Optimizer], Any]
) -> None:
    trained = Trained(scheduler)
    trained.train(3)
    path = save_checkpoint(tmp_path, trained.state(), step=3)
    expected = trained.train(4)
    resumed = Trained(scheduler, seed=1)
    resumed.resume(load_checkpoint(path))
    assert resumed.train(4) == expected
    assert same(resumed.state(), trained.state())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2: object()}]}, r"state\['a'\]\[1\]\[2\] is a object: expected dict, list"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\), a tuple: expected str or int"),
        ({True: 1}, r"state has the key True, a bool"),
        ([torch.Size([1])], r"state\[0\] is a torch.Size"),
        ([{1}], r"state\[0\] is a set"),
        ([b"x"], r"state\[0\] is a bytes"),
        ([torch.ones(2, device="meta")], r"state\[0\] is a tensor on the meta device"),
        ([torch.ones(2, 2).to_sparse()], r"state\[0\] is a tensor of layout sparse_coo"),
        ([torch.nn.parameter.UninitializedParameter()], r"is a .*UninitializedParameter"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, state, step=1)
    assert names(tmp_path) == []


def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="does it contain itself"):
        save_checkpoint(tmp_path, state, step=1)


@pytest.mark.parametrize("step", [-1, True, 1.5])
def test_steps_and_keep_are_checked(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match=r"step = .*: expected a whole number, 0 or more"):
        save_checkpoint(tmp_path, {}, step=step)
    with pytest.raises(CheckpointError, match="keep = 0: expected a whole number, 1 or more"):
        save_checkpoint(tmp_path, {}, step=1, keep=0)


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    def state(clone: bool) -> Any:
        values: dict[str, Any] = {"b": torch.arange(9.0).view(3, 3).t(), "a": (1.5, math.nan)}
        values["c"] = torch.ones(3, dtype=torch.int8)
        if clone:
            values["b"] = values["b"].clone(memory_format=torch.contiguous_format)
        return values

    found = []
    for number, clone in enumerate([False, True]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(contents(save_checkpoint(folder, state(clone), step=5)))
    assert found[0] == found[1]
    assert sorted(found[0]) == ["state.json", "tensors.safetensors"]


def test_loading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, example(1), step=1)
    weights_to_file(tmp_path / "weights.safetensors", {"a": torch.ones(1)})

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert same(load_checkpoint(path), example(1))
    assert latest_checkpoint(tmp_path) == path
    weights_from_file(tmp_path / "weights.safetensors")


def test_load_to_a_device(tmp_path: Path, device: Device) -> None:
    state = {"a": torch.arange(5.0), "b": torch.ones((), dtype=torch.complex128)}
    path = save_checkpoint(tmp_path, state, step=1)
    back = load_checkpoint(path, device=device)
    assert all(device.holds(tensor) for tensor in back.values())
    again = save_checkpoint(tmp_path, back, step=2, device=device)
    assert same(load_checkpoint(again), state)
    assert device.pinned.lent == 0


def test_paths_may_be_text(device: Device, tmp_path: Path) -> None:
    with CheckpointWriter(device, str(tmp_path)) as writer:
        writer.save({"a": 1}, 1)
    newest = latest_checkpoint(str(tmp_path))
    assert newest is not None
    assert load_checkpoint(str(newest)) == {"a": 1}
    assert save_checkpoint(str(tmp_path), {"a": 2}, step=2).name == "step-00000002"
    file = str(tmp_path / "weights.safetensors")
    weights_to_file(file, {"w": torch.ones(2)})
    assert torch.equal(weights_from_file(file)["w"], torch.ones(2))
