"""The Python values that a loss function can read: found, compared and restored."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from headrace.device import open_device
from headrace.engine.python_state import PythonState

DEVICE = open_device("cpu")
x = 0  # a script's loop variable, which no loss function here reads
scale = 1.0


def state_of(loss: Any, model: nn.Module | None = None) -> PythonState:
    return PythonState(DEVICE, loss, (model or nn.Linear(1, 1),))


def with_a_global(model: Any, batch: Any) -> Any:
    return model(batch.x) * scale


def test_a_global_is_not_confused_with_an_attribute_of_the_same_name() -> None:
    global x, scale
    state = state_of(with_a_global)
    x += 1
    assert state.changed() is None
    scale += 1
    changed = state.changed()
    assert changed is not None
    assert changed.name == "scale"
    assert f"{__file__}:{with_a_global.__code__.co_firstlineno + 1}" in str(changed)
    assert state.changed() is None  # the call before took a new snapshot


class Trainer:
    def __init__(self) -> None:
        self.weight, self.steps, self.history = 1.0, 0, [1.0]

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch) * self.weight

    def log(self) -> None:
        self.steps += 1
        self.history.append(1.0)


def test_only_attributes_that_the_loss_names_count() -> None:
    trainer = Trainer()
    state = state_of(trainer.loss)
    trainer.log()
    assert state.changed() is None
    trainer.weight = 0.5
    changed = state.changed()
    assert changed is not None
    assert changed.name == "Trainer.weight"


def test_new_objects_of_equal_value_are_no_change() -> None:
    box = {"beta": 0.1, "sizes": (1, 2)}
    state = state_of(lambda model, batch: model(batch) * box["beta"])
    box["beta"] = sum([0.05, 0.05])
    box["sizes"] = tuple([1, 2])  # noqa: C409
    assert state.changed() is None
    box["beta"] = float("nan")
    assert state.changed() is not None
    box["beta"] = float("nan")
    assert state.changed() is None


def test_restore_undoes_all_that_a_step_changed() -> None:
    first = torch.zeros(2)
    kept, row, window = {"h": first, "n": 1}, [first], deque([1, 2, 3], maxlen=3)
    space, names, dice = SimpleNamespace(h=first), {"a"}, random.Random(0)
    count, drawn = 0, dice.getstate()
    model = nn.Linear(1, 1)
    model.h = first  # type: ignore[assignment]

    def loss(model: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        kept["h"] = torch.ones(2)
        kept["new"] = 1
        del kept["n"]
        row.append(torch.ones(2))
        window.append(4)
        space.h = None
        names.add("b")
        dice.random()
        model.h = torch.ones(2)

    state = state_of(loss, model)
    loss(model, None)
    state.restore()
    assert count == 0
    assert list(kept.items()) == [("h", first), ("n", 1)]
    assert kept["h"] is first
    assert len(row) == 1
    assert list(window) == [1, 2, 3]
    assert space.h is model.h is first
    assert names == {"a"}
    assert dice.getstate() == drawn
    assert state.changed() is None


def test_a_new_object_is_followed() -> None:
    box: dict[str, Any] = {"inner": {"n": 1}}
    state = state_of(lambda model, batch: model(batch) * box["inner"]["n"])
    box["inner"] = {"n": 1}
    state.changed()
    box["inner"]["n"] = 2
    changed = state.changed()
    assert changed is not None
    assert changed.name.startswith("box['inner']")


def test_all_submodules_are_compared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    state = state_of(lambda model, batch: model(batch), model)
    model[1].p = 0.2
    changed = state.changed()
    assert changed is not None
    assert changed.name == "Sequential.1.p"
    model.eval()
    changed = state.changed()
    assert changed is not None
    assert changed.name == "Sequential.training"


def test_cyclic_references_end() -> None:
    ring: list[Any] = []
    ring.append(ring)
    space = SimpleNamespace(ring=ring)
    space.itself = space
    state = state_of(lambda model, batch: (space.itself, space.ring, ring))
    assert state.changed() is None
    ring.append(1)
    assert state.changed() is not None
