"""The Python values that a loss function can read: found, compared and restored."""

from __future__ import annotations

import configparser
import functools
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, deque
from enum import Enum
from os import getenv
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from headrace.capture.guards.guards import ReadValues
from headrace.capture.state.state import StepState
from headrace.device import Device, open_device

DEVICE = open_device("cpu")
x = 0  # a script's loop variable, which no loss function here reads
scale = 1.0


def state_of(loss: Any, model: nn.Module | None = None) -> ReadValues:
    return ReadValues(StepState(DEVICE, loss, (model or nn.Linear(1, 1),), (), passes_model=True))


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
    box: dict[str, Any] = {"beta": 0.1, "sizes": (1, 2), "table": numpy.arange(3)}
    state = state_of(lambda model, batch: (box["beta"], box["sizes"], len(box["table"])))
    box["beta"] = sum([0.05, 0.05])
    box["sizes"] = tuple([1, 2])  # noqa: C409
    box["table"] = numpy.arange(3)
    assert state.changed() is None
    box["table"][0] = 5
    assert state.changed() is not None
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


def test_keys_and_their_order_are_compared() -> None:
    box, ordered = {"a": True}, OrderedDict(a=1.0, b=1.0)
    by_tensor = {torch.ones(3): 1.5}
    state = state_of(lambda model, batch: ("b" in box, next(iter(ordered)), by_tensor))
    assert state.changed() is None
    box["b"] = box.pop("a")
    assert state.changed() is not None
    ordered.move_to_end("a")
    assert state.changed() is not None
    by_tensor[torch.ones(3)] = by_tensor.pop(next(iter(by_tensor)))
    assert state.changed() is not None
    assert state.changed() is None


def test_an_equal_container_is_watched_instead_of_the_one_it_replaces() -> None:
    space, box = SimpleNamespace(scales=[1.0, 1.0]), {"scales": [1.0]}
    held = [1.0]
    state = state_of(lambda model, batch: (space.scales, box["scales"], held))
    for replace, mutate in (
        (lambda: setattr(space, "scales", [1.0, 1.0]), lambda: space.scales.append(1.0)),
        (lambda: box.update(scales=[1.0]), lambda: box["scales"].append(1.0)),
    ):
        replace()
        assert state.changed() is None
        mutate()
        assert state.changed() is not None
    held = [1.0]
    assert state.changed() is None
    held.append(1.0)
    assert state.changed() is not None


def test_a_file_that_is_written_is_no_iterator(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.out = sys.stdout  # type: ignore[assignment]
    with (tmp_path / "log").open("w") as log:
        assert state_of(lambda model, batch: log.write("x"), model).reader.iterator is None
    with (tmp_path / "log").open() as log:
        assert state_of(lambda model, batch: next(log), model).reader.iterator is not None


class Settings(dict[str, float]):
    """A dict with attributes."""

    def __init__(self) -> None:
        self.beta = 1.0


class Base:
    weight = 1.0


class Derived(Base):
    pass


def with_default(beta: float = 1.0) -> float:
    return beta


class Slots:
    __slots__ = ("beta",)


class Private:
    __slots__ = ("__beta",)

    def __init__(self) -> None:
        self.__beta = 1.0

    def get(self) -> float:
        return self.__beta

    def add(self) -> None:
        self.__beta += 1


class Point:
    __match_args__ = ("x",)

    def __init__(self) -> None:
        self.x, self.y = 0.0, 0.0

    def scaled(self, factor: float) -> float:
        return self.x * factor

    doubled = functools.partialmethod(scaled, 2.0)

    @functools.singledispatchmethod
    def plus(self, other: Any) -> float:
        raise TypeError(other)

    @plus.register
    def _(self, other: float) -> float:
        return self.y + other


def x_is_zero(read: Any) -> bool:
    match read.point:
        case Point(0.0):
            return True
    return False


def y_is_zero(read: Any) -> bool:
    match read.point:
        case Point(y=0.0):
            return True
    return False


FACTORS = {"double": 2.0}
get_x = operator.attrgetter("x")


class Factor(Enum):
    DOUBLE = "double"

    def value_now(self) -> float:
        return FACTORS[self.value]


@functools.singledispatch
def negative(value: Any) -> Any:
    return -value


def decorated(function: Any) -> Any:
    """As a library's decorator returns it, without functools.wraps."""
    code = compile(
        "def wrap(function):\n    return lambda *arguments: function(*arguments)",
        "/lib/site-packages/a_library/decorators.py",
        "exec",
    )
    names: dict[str, Any] = {}
    exec(code, names)
    return names["wrap"](function)


@decorated
def double(value: float) -> float:
    return value * FACTORS["double"]


@negative.register
def _(value: float) -> float:
    return value * FACTORS["double"]


class Lazy:
    """Has no attribute yet, and says so in its own way."""

    __slots__ = ("beta",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def with_import(read: Any) -> Any:
    import imported_by_a_loss  # type: ignore[import-not-found]

    return imported_by_a_loss.beta


def with_import_from(read: Any) -> Any:
    from imported_by_a_loss import beta

    return beta


IMPORTED = types.ModuleType("imported_by_a_loss")
IMPORTED.__file__ = __file__


@pytest.fixture
def read() -> SimpleNamespace:
    """What a step reads, in the table below."""
    parser = configparser.ConfigParser()
    parser.read_dict({"a": {"beta": "1.0"}})
    inner, key = {"beta": 1.0}, Base()
    return SimpleNamespace(
        settings=Settings(),
        chain=ChainMap({"beta": 1.0}),
        inner=inner,
        proxy=MappingProxyType(inner),
        parser=parser,
        key=key,
        by_key=weakref.WeakKeyDictionary({key: 1.0}),
        by_proxy=weakref.proxy(key),
        derived=type("Fresh", (Derived,), {"__module__": __name__})(),
        space=SimpleNamespace(warm=1),
        weight=torch.ones(2, requires_grad=True),
        slots=Slots(),
        lazy=Lazy(),
        private=Private(),
        point=Point(),
        factor=Factor.DOUBLE,
        table={"x": 1.0, "y": 2.0},
        zero=0.0,
        event=threading.Event(),
        objects=numpy.array([Point()], dtype=object),
        function=types.FunctionType(with_default.__code__, globals(), "fresh", (1.0,)),
    )


NOTICED: dict[str, tuple[Any, Any]] = {
    "an attribute of a dict": (
        lambda read: read.settings.beta,
        lambda read: setattr(read.settings, "beta", 2.0),
    ),
    "a name that appears on a class": (
        lambda read: read.derived.weight,
        lambda read: setattr(type(read.derived), "weight", 2.0),
    ),
    "an attribute for another": (
        lambda read: getattr(read.space, "cold", 1.0),
        lambda read: (delattr(read.space, "warm"), setattr(read.space, "cold", 2.0)),
    ),
    "default arguments": (
        lambda read: read.function(),
        lambda read: setattr(read.function, "__defaults__", (2.0,)),
    ),
    "an imported module": (with_import, lambda read: setattr(IMPORTED, "beta", 2.0)),
    "an imported name": (with_import_from, lambda read: setattr(IMPORTED, "beta", 2.0)),
    "an attribute of a tensor": (
        lambda read: getattr(read.weight, "reg", 1.0),
        lambda read: setattr(read.weight, "reg", 2.0),
    ),
    "a slot": (lambda read: read.slots.beta, lambda read: setattr(read.slots, "beta", 2.0)),
    "a slot of an object that raises": (
        lambda read: read.lazy.beta,
        lambda read: setattr(read.lazy, "beta", 2.0),
    ),
    "a private slot": (lambda read: read.private.get(), lambda read: read.private.add()),
    "a partial method": (
        lambda read: read.point.doubled(),
        lambda read: setattr(read.point, "x", 1.0),
    ),
    "a function that a library has wrapped": (
        lambda read: double(1.0),
        lambda read: FACTORS.update(double=FACTORS["double"] + 1),
    ),
    "a method of an Enum": (
        lambda read: read.factor.value_now(),
        lambda read: FACTORS.update(double=FACTORS["double"] + 1),
    ),
    "a dict that is replaced by one in another order": (
        lambda read: read.table.values(),
        lambda read: setattr(read, "table", {"y": 2.0, "x": 1.0}),
    ),
    "the sign of zero": (lambda read: 1 / read.zero, lambda read: setattr(read, "zero", -0.0)),
    "a property of a metaclass": (
        lambda read: WithMeta.beta,
        lambda read: setattr(WithMeta, "_beta", WithMeta._beta + 1),
    ),
    "an environment variable": (
        lambda read: float(os.environ.get("HEADRACE_TEST_BETA", "1")),
        lambda read: os.environ.update(HEADRACE_TEST_BETA="2"),
    ),
    "an environment variable, by an imported name": (
        lambda read: float(getenv("HEADRACE_TEST_GAMMA", "1")),
        lambda read: os.environ.update(HEADRACE_TEST_GAMMA="2"),
    ),
    "an environment variable in a path": (
        lambda read: float(len(os.path.expandvars("$HEADRACE_TEST_DELTA"))),
        lambda read: os.environ.update(HEADRACE_TEST_DELTA="2"),
    ),
}


class Meta(type):
    _beta = 1.0

    @property
    def beta(cls) -> float:
        return cls._beta


class WithMeta(metaclass=Meta):
    _beta = 1.0


@pytest.mark.parametrize("name", NOTICED)
def test_what_is_noticed(read: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look, change = NOTICED[name]
    monkeypatch.setitem(sys.modules, IMPORTED.__name__, IMPORTED)
    monkeypatch.setattr(IMPORTED, "beta", 1.0, raising=False)
    monkeypatch.setenv("HEADRACE_TEST_BETA", "1")
    state = state_of(lambda model, batch: look(read))
    assert state.changed() is None
    change(read)
    assert state.changed() is not None
    assert state.changed() is None


def test_a_counter_that_only_the_loop_reads() -> None:
    """`step` is also what PyTorch calls on optimizers."""
    loose = SimpleNamespace(step=0, weight=1.0)
    state = state_of(lambda model, batch: model(batch) * loose.weight)
    loose.step += 1
    assert state.changed() is None


def test_a_class_gets_its_attributes_back(read: SimpleNamespace) -> None:
    state = state_of(lambda model, batch: read.derived.weight)
    type(read.derived).weight = 2.0
    state.restore()
    assert "weight" not in vars(type(read.derived))
    assert state.changed() is None


def test_what_a_library_s_module_names_is_compared() -> None:
    """Wherever a module is installed, its code is read."""
    source = """
class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.unread = config, 0

    def scale(self):
        return self.config.scale

    def forward(self, x):
        return x * self.scale()
"""
    names: dict[str, Any] = {"nn": nn, "__name__": "a_library"}
    exec(compile(source, "/lib/site-packages/a_library/model.py", "exec"), names)
    config = SimpleNamespace(scale=1.0, other=1.0)
    model = nn.Sequential(names["Model"](config))
    state = state_of(lambda model, batch: model(batch), model)
    config.other, model[0].unread = 2.0, 1
    assert state.changed() is None
    config.scale = 2.0
    changed = state.changed()
    assert changed is not None
    assert changed.name == "Sequential.0.config.scale"


def test_tensors_on_the_host_are_compared_by_value(fake_device: Device) -> None:
    array, host = numpy.ones(2), torch.tensor([1.0, float("nan")])
    of_array, single = torch.from_numpy(array), torch.tensor(True)
    state = ReadValues(StepState(fake_device, lambda batch: (host, of_array, single), (), ()))
    host.mul_(1.0)
    assert state.changed() is None
    for change in (
        lambda: host.data.fill_(2.0),
        lambda: array.fill(2.0),
        lambda: single.logical_not_(),
    ):
        change()
        assert state.changed() is not None
        assert state.changed() is None


def test_a_slot_that_was_not_assigned_is_emptied_again(read: SimpleNamespace) -> None:
    state = state_of(lambda model, batch: read.slots.beta)
    read.slots.beta = 1.0
    state.restore()
    assert not hasattr(read.slots, "beta")
    assert state.changed() is None


def test_equal_objects_that_come_at_each_step_are_compared_by_value() -> None:
    """The comparison is compiled once more, and not for each of them."""
    box: dict[str, Any] = {"beta": 0.1, "sizes": [1]}
    state = state_of(lambda model, batch: (box["beta"], box["sizes"]))
    compiled = []
    for at in range(5):
        box["beta"], box["sizes"] = float(str(0.1)), [1]
        assert state.changed() is None, at
        compiled.append(state._holds)
    assert len(set(compiled)) == 1
    box["sizes"].append(2)
    assert state.changed() is not None
