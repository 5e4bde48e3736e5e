"""State that a loss function carries from batch to batch: the run equals `baseline`, or the step is
not captured and the line is named. Never silently different."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import itertools
import mmap
import random
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.capture.state.capturable_optimizer import CapturableOptimizer
from headrace.device import Device
from headrace.fake import FakeDevice
from headrace.plan import Plan

WIDTH = 4
BATCHES = 9
Loss = Callable[[Any, Any], Any]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 3)
        self.h: Any = None

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.mix(torch.cat([x, h], 1)))
        return self.out(h), h


def data(count: int = BATCHES, seed: int = 1) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(2, WIDTH, generator=made), torch.randint(3, (2,), generator=made))
        for _ in range(count)
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Run:
    """What one engine made of a loss function."""

    def __init__(
        self,
        device: Device,
        make_loss: Callable[[torch.device, Recurrent], Loss],
        plan: str | Plan,
        optimizer: str = "fused AdamW",
        *,
        capturable_from: int | None = None,
        batches: int = BATCHES,
        epochs: int = 1,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        model = Recurrent().to(device.torch_device)
        model.h = zeros(device.torch_device)
        made = OPTIMIZERS[optimizer](model.parameters())
        loss = make_loss(device.torch_device, model)
        self.engine = hr.Engine(model, made, loss, plan=plan, device=device, **options)

        def on_step(info: hr.Progress) -> None:
            if capturable_from is not None and info.batch + 1 == capturable_from:
                update = self.engine._builder.parts.update  # type: ignore[union-attr]
                update.rates = CapturableOptimizer(device, made).rates
            if isinstance(getattr(loss, "__self__", None), Untouched):
                loss.__self__.steps += 1

        self.engine.on_step = on_step
        self.losses = [
            loss
            for epoch in range(epochs)
            for loss in self.engine.epoch(data(batches, 1 + epoch)).losses
        ]
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.carried = getattr(loss, "carried", lambda: None)()
        self.report = self.engine.graphs
        self.engine.close()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Run)
        same = all(map(torch.equal, self.weights, other.weights))
        return self.losses == other.losses and same and _same(self.carried, other.carried)


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, WIDTH, device=device)


# --- ways to carry state --------------------------------------------------------------------------
# Each makes a loss function. The line that is to be named has the words "carries here" on it.


def closure(device: torch.device, model: Recurrent) -> Loss:
    state = {"h": zeros(device)}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], state["h"])
        state["h"] = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    loss.carried = lambda: state["h"].clone()  # type: ignore[attr-defined]
    return loss


def nonlocal_variable(device: torch.device, model: Recurrent) -> Loss:
    before = zeros(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal before
        out, h = model(batch[0], before)
        before = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


class CallableObject:
    def __init__(self, device: torch.device) -> None:
        self.before = zeros(device)

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], self.before)
        self.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])


def callable_object(device: torch.device, model: Recurrent) -> Loss:
    return CallableObject(device)


class LossModule(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.before = zeros(device)

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], self.before)
        self.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])


def loss_module(device: torch.device, model: Recurrent) -> Loss:
    return LossModule(device)


GLOBAL: Any = None


def with_a_global(model: Any, batch: Any) -> torch.Tensor:
    global GLOBAL
    out, h = model(batch[0], GLOBAL)
    GLOBAL = h.detach()  # carries here
    return cross_entropy(out, batch[1])


def a_global(device: torch.device, model: Recurrent) -> Loss:
    global GLOBAL
    GLOBAL = zeros(device)
    return with_a_global


def a_default_argument(device: torch.device, model: Recurrent) -> Loss:
    def loss(model: Any, batch: Any, kept: Any = [zeros(device)]) -> torch.Tensor:  # noqa: B006, B008
        out, h = model(batch[0], kept[-1])
        kept.append(h.detach())  # carries here
        return cross_entropy(out, batch[1])

    return loss


def a_model_attribute(device: torch.device, model: Recurrent) -> Loss:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], model.h)
        model.h = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


def a_function_attribute(device: torch.device, model: Recurrent) -> Loss:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], loss.before)  # type: ignore[attr-defined]
        loss.before = h.detach()  # type: ignore[attr-defined] # carries here
        return cross_entropy(out, batch[1])

    loss.before = zeros(device)  # type: ignore[attr-defined]
    return loss


class Shared:
    before: Any = None


def a_class_attribute(device: torch.device, model: Recurrent) -> Loss:
    Shared.before = zeros(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], Shared.before)
        Shared.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


def a_deque(device: torch.device, model: Recurrent) -> Loss:
    window: deque[torch.Tensor] = deque([zeros(device)] * 3, maxlen=3)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], sum(window) / 3)
        window.append(h.detach())  # carries here
        return cross_entropy(out, batch[1])

    return loss


def a_namespace(device: torch.device, model: Recurrent) -> Loss:
    space = types.SimpleNamespace(before=zeros(device))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], space.before)
        space.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


@dataclass(slots=True)
class Slotted:
    before: torch.Tensor


def slots(device: torch.device, model: Recurrent) -> Loss:
    kept = Slotted(zeros(device))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], kept.before)
        kept.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


class Store:
    """A container of one's own."""

    def __init__(self, first: torch.Tensor) -> None:
        self._all = {"h": first}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._all[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self._all[key] = value  # carries here


def a_container_of_ones_own(device: torch.device, model: Recurrent) -> Loss:
    store = Store(zeros(device))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], store["h"])
        store["h"] = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


class WithProperty:
    def __init__(self, first: torch.Tensor) -> None:
        self._hidden = first
        self.unrelated = 0

    @property
    def before(self) -> torch.Tensor:
        return self._hidden

    @before.setter
    def before(self, value: torch.Tensor) -> None:
        self._hidden = value  # carries here


def a_property(device: torch.device, model: Recurrent) -> Loss:
    kept = WithProperty(zeros(device))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], kept.before)
        kept.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


class Trainer:
    def __init__(self, device: torch.device) -> None:
        self.before = zeros(device)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], self.before)
        self.remember(h)
        return cross_entropy(out, batch[1])

    def remember(self, h: torch.Tensor) -> None:
        self.before = h.detach()  # carries here


def a_method(device: torch.device, model: Recurrent) -> Loss:
    return Trainer(device).loss


def a_partial(device: torch.device, model: Recurrent) -> Loss:
    def loss(kept: dict[str, Any], model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], kept["before"])
        kept["before"] = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return functools.partial(loss, {"before": zeros(device)})


LOCAL = threading.local()


def a_thread_local(device: torch.device, model: Recurrent) -> Loss:
    LOCAL.before = zeros(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], LOCAL.before)
        LOCAL.before = h.detach()  # carries here
        return cross_entropy(out, batch[1])

    return loss


CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("carried")


def a_context_variable(device: torch.device, model: Recurrent) -> Loss:
    CONTEXT.set(zeros(device))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], CONTEXT.get())  # carries here
        CONTEXT.set(h.detach())
        return cross_entropy(out, batch[1])

    return loss


def a_cached_function(device: torch.device, model: Recurrent) -> Loss:
    """Hidden in C, where nobody can look: the tensors themselves tell."""

    @functools.cache
    def store() -> dict[str, torch.Tensor]:
        return {"h": zeros(device)}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        mixed = batch[0] + store()["h"]  # carries here
        out, h = model(mixed, mixed)
        store()["h"] = h.detach()
        return cross_entropy(out, batch[1])

    return loss


def a_generator(device: torch.device, model: Recurrent) -> Loss:
    def carrying() -> Any:
        h = zeros(device)
        while True:
            h = yield h

    carrier = carrying()
    next(carrier)
    box = [zeros(device)]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], box[0])
        box[0] = carrier.send(h.detach())  # carries here
        return cross_entropy(out, batch[1])

    return loss


# --- Python numbers that change what is computed --------------------------------------------------


def weighed(by: Callable[[], float]) -> Loss:
    """A loss that a number weighs."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, _ = model(batch[0], batch[0])
        return cross_entropy(out, batch[1]) * by()

    return loss


def a_counter(device: torch.device, model: Recurrent) -> Loss:
    count = 0

    def by() -> float:
        nonlocal count
        count += 1  # carries here
        return float(0.9**count)

    return weighed(by)


def a_branch_now_and_then(device: torch.device, model: Recurrent) -> Loss:
    counts = [0]

    def by() -> float:
        counts[0] += 1  # carries here
        return 2.0 if counts[0] % 7 == 0 else 1.0

    return weighed(by)


def an_iterator(device: torch.device, model: Recurrent) -> Loss:
    weights = itertools.cycle([1.0] * 5 + [2.0])
    return weighed(lambda: next(weights))  # carries here


def a_c_number(device: torch.device, model: Recurrent) -> Loss:
    count = ctypes.c_int(0)

    def by() -> float:
        count.value += 1  # carries here
        return 2.0 if count.value == 6 else 1.0

    return weighed(by)


def an_array(device: torch.device, model: Recurrent) -> Loss:
    counts = array.array("i", [0])

    def by() -> float:
        counts[0] += 1  # carries here
        return 2.0 if counts[0] == 6 else 1.0

    return weighed(by)


def a_numpy_array(device: torch.device, model: Recurrent) -> Loss:
    counts = numpy.zeros(1)

    def by() -> float:
        counts[0] += 1  # carries here
        return 2.0 if counts[0] == 6 else 1.0

    return weighed(by)


def a_generator_of_random_numbers(device: torch.device, model: Recurrent) -> Loss:
    dice = random.Random(3)
    return weighed(lambda: 1.0 + (dice.random() > 0.8))  # carries here


def numpys_generator(device: torch.device, model: Recurrent) -> Loss:
    dice = numpy.random.default_rng(3)
    return weighed(lambda: 1.0 + (dice.random() > 0.8))  # carries here


def a_host_tensor(device: torch.device, model: Recurrent) -> Loss:
    """Its number is given to the kernel when that is launched."""
    scale = torch.ones(())

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, _ = model(batch[0], batch[0])
        scale.mul_(0.9)  # carries here
        return cross_entropy(out, batch[1]) * scale

    return loss


def mapped_memory(device: torch.device, model: Recurrent) -> Loss:
    counts = mmap.mmap(-1, 1)

    def by() -> float:
        counts[0] = counts[0] + 1  # carries here
        return 2.0 if counts[0] == 6 else 1.0

    return weighed(by)


CARRIED = [
    closure,
    nonlocal_variable,
    callable_object,
    loss_module,
    a_global,
    a_default_argument,
    a_model_attribute,
    a_function_attribute,
    a_class_attribute,
    a_deque,
    a_namespace,
    slots,
    a_container_of_ones_own,
    a_property,
    a_method,
    a_partial,
    a_thread_local,
    a_context_variable,
    a_cached_function,
    a_generator,
    a_counter,
    a_branch_now_and_then,
    an_iterator,
    a_c_number,
    an_array,
    a_numpy_array,
    a_generator_of_random_numbers,
    numpys_generator,
    a_host_tensor,
    mapped_memory,
]


# --- what can be captured -------------------------------------------------------------------------


def nothing(device: torch.device, model: Recurrent) -> Loss:
    return weighed(lambda: 0.5)


def in_place(device: torch.device, model: Recurrent) -> Loss:
    state = zeros(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, h = model(batch[0], state.clone())
        state.copy_(h.detach())
        return cross_entropy(out, batch[1])

    loss.carried = state.clone  # type: ignore[attr-defined]
    return loss


def made_by_the_first_batch(device: torch.device, model: Recurrent) -> Loss:
    state: dict[str, torch.Tensor] = {}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if "h" not in state:
            state["h"] = zeros(device)
        out, h = model(batch[0], state["h"].clone())
        state["h"].copy_(h.detach())
        return cross_entropy(out, batch[1])

    loss.carried = lambda: state["h"].clone()  # type: ignore[attr-defined]
    return loss


def a_constant(device: torch.device, model: Recurrent) -> Loss:
    weights = torch.tensor([1.0, 2.0, 3.0]).to(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, _ = model(batch[0], batch[0])
        return cross_entropy(out, batch[1], weight=weights)

    return loss


def a_cache_by_shape(device: torch.device, model: Recurrent) -> Loss:
    masks: dict[int, torch.Tensor] = {}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        rows = batch[0].shape[0]
        if rows not in masks:
            masks[rows] = torch.ones(rows, 1, device=device)
        out, _ = model(batch[0] * masks[rows], batch[0])
        return cross_entropy(out, batch[1])

    return loss


def a_cached_constant(device: torch.device, model: Recurrent) -> Loss:
    """Also where nobody can look: it was made before the first batch."""
    kept = torch.full((2, 1), 0.5, device=device)

    @functools.cache
    def mask() -> torch.Tensor:
        return kept

    def loss(model: Any, batch: Any) -> torch.Tensor:
        out, _ = model(batch[0] * mask(), batch[0])
        return cross_entropy(out, batch[1])

    return loss


class Untouched:
    """Counts outside of its loss function, which does not look."""

    def __init__(self) -> None:
        self.steps = 0
        self.scale = 0.5

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        out, _ = model(batch[0], batch[0])
        return cross_entropy(out, batch[1]) * self.scale


def another_attribute(device: torch.device, model: Recurrent) -> Loss:
    return Untouched().loss


CAPTURED = [
    nothing,
    in_place,
    made_by_the_first_batch,
    a_constant,
    a_cache_by_shape,
    a_cached_constant,
    another_attribute,
]


def lines_of(make: Callable[..., Any]) -> set[str]:
    """`file:line` of the lines that may be named, for one way of carrying."""
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    code = make.__code__
    names = {*code.co_names, make.__name__}
    sources = [code, with_a_global.__code__]
    for name in names:
        found = globals().get(name)
        for member in vars(found).values() if isinstance(found, type) else [found]:
            member = member.fset if isinstance(member, property) else member
            if isinstance(member, types.FunctionType):
                sources.append(member.__code__)
    found_lines = set()
    for source in sources:
        if source is with_a_global.__code__ and make is not a_global:
            continue
        start = source.co_firstlineno
        end = max(_last_line(source), start)
        found_lines |= {n for n in range(start, end + 1) if "# carries here" in text[n - 1]}
    assert found_lines, make
    return {f"{__file__}:{line}" for line in found_lines}


def _last_line(code: types.CodeType) -> int:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return max([line for _, _, line in code.co_lines() if line] + [_last_line(c) for c in inner])


@pytest.mark.parametrize("make", CARRIED, ids=lambda make: make.__name__)
def test_what_is_carried_is_not_captured(capturing: Device, make: Any) -> None:
    """Losses, weights and what is carried are those without graphs, to the bit: a capture that is
    refused leaves nothing behind, also where parts of the step are graphs then."""
    expected = Run(capturing, make, "pipeline")
    found = Run(capturing, make, "graph")
    assert found.report is not None
    assert found.report.replays == 0
    assert any(line in str(found.report.why) for line in lines_of(make)), found.report.why
    assert found == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", CAPTURED, ids=lambda make: make.__name__)
def test_what_stays_the_same_is_captured(capturing: Device, make: Any, optimizer: str) -> None:
    found = Run(capturing, make, "graph", optimizer)
    assert found.report is not None
    assert found.report.why is None
    assert found.report.replays >= BATCHES - 3
    begun = found.report.one_by_one if optimizer == "AdamW" else None
    assert found == Run(capturing, make, "pipeline", optimizer, capturable_from=begun)


@pytest.mark.parametrize("carried", ["by nobody", "in place", "in a closure"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_pytorchs_recurrent_layers(capturing: Device, kind: Any, carried: str) -> None:
    batches = [
        torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(9)
    ]
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        model = kind(WIDTH, WIDTH).to(capturing.torch_device)
        state = {"h": torch.zeros(1, 2, WIDTH, device=capturing.torch_device)}

        def loss(model: Any, batch: Any) -> torch.Tensor:
            if carried == "by nobody":
                return model(batch)[0].square().mean()  # type: ignore[no-any-return]
            before = state["h"].clone()  # noqa: B023
            out, now = model(batch, (before, before) if kind is nn.LSTM else before)
            now = now[0] if kind is nn.LSTM else now
            if carried == "in place":
                state["h"].copy_(now.detach())  # noqa: B023
            else:
                state["h"] = now.detach()  # noqa: B023
            return out.square().mean()  # type: ignore[no-any-return]

        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        engine = hr.Engine(model, optimizer, loss, plan=plan, device=capturing, deterministic=True)
        found.append((engine.epoch(batches).losses, state["h"].clone()))
        report = engine.graphs
        engine.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert report is not None
    assert (report.replays == 0) == (carried == "in a closure")


@pytest.mark.parametrize("optimizer", ["fused AdamW", "SGD"])
def test_a_learning_rate_that_the_loop_sets(capturing: Device, optimizer: str) -> None:
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        model = Scaled().to(capturing.torch_device)
        made = OPTIMIZERS[optimizer](model.parameters())
        engine = hr.Engine(model, made, scaled_loss, plan=plan, device=capturing)
        torch.manual_seed(1)
        for info in engine.steps(data(14)):
            for group in made.param_groups:
                group["lr"] = 0.1 / (1 + info.updates)
        assert engine.last_result is not None
        found.append(engine.last_result.losses)
        report = engine.graphs
        engine.close()
    assert found[0] == found[1]
    assert report is not None
    if optimizer == "SGD":
        assert "SGD's lr needs fused=True" in str(report.why)
    else:
        assert (report.replays, report.rechecks) == (11, 1)


# --- numbers that the loop changes ----------------------------------------------------------------

BETA = 1.0


def with_beta(model: Any, batch: Any) -> torch.Tensor:
    out, h = model(batch[0], batch[0])
    return cross_entropy(out, batch[1]) + BETA * h.square().mean()


def test_a_number_that_changes_by_epoch(capturing: Device) -> None:
    """Graphs with the old number are dropped, and captured anew."""
    global BETA
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        model = Recurrent().to(capturing.torch_device)
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        engine = hr.Engine(model, optimizer, with_beta, plan=plan, device=capturing)
        losses: list[float] = []
        for epoch in range(3):
            BETA = 0.5**epoch
            losses += engine.epoch(data(12, epoch)).losses
        found.append(losses)
        report = engine.graphs
        engine.close()
    assert found[0] == found[1]
    assert report is not None
    assert (report.why, report.captures) == (None, 3)


@pytest.mark.parametrize("where", ["module", "dropout"])
def test_a_models_number_that_the_loop_changes_in_mid_epoch(capturing: Device, where: str) -> None:
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        model = Scaled().to(capturing.torch_device)
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        engine = hr.Engine(model, optimizer, scaled_loss, plan=plan, device=capturing)
        torch.manual_seed(1)
        for info in engine.steps(data(16)):
            if info.batch == 8 and where == "module":
                model.scale = 0.1
            elif info.batch == 8:
                model.dropout.p = 0.9
        assert engine.last_result is not None
        found.append(engine.last_result.losses)
        report = engine.graphs
        engine.close()
    assert found[0] == found[1]
    assert report is not None
    assert (report.why, report.captures) == (None, 2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(0.2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.dropout(x)) * self.scale
        return out


def scaled_loss(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def test_a_loss_that_asks_the_engine_how_far_it_is(capturing: Device) -> None:
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        model = Scaled().to(capturing.torch_device)
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return scaled_loss(model, batch) * (2.0 if engine.updates > 6 else 1.0)  # noqa: B023

        engine = hr.Engine(model, optimizer, loss, plan=plan, device=capturing)
        torch.manual_seed(1)
        found.append(engine.epoch(data()).losses)
    assert found[0] == found[1]
    assert engine.graphs is not None
    assert "engine.updates changes from batch to batch" in str(engine.graphs.why)


def test_a_loss_that_reads_the_learning_rate(capturing: Device) -> None:
    found = []
    for plan in ("pipeline", "graph"):
        torch.manual_seed(0)
        model = Scaled().to(capturing.torch_device)
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=30)

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return scaled_loss(model, batch) * (1 + optimizer.param_groups[0]["lr"])  # noqa: B023

        engine = hr.Engine(model, optimizer, loss, plan=plan, device=capturing, scheduler=scheduler)
        torch.manual_seed(1)
        found.append(engine.epoch(data()).losses)
    assert found[0] == found[1]
    assert engine.graphs is not None
    assert "param_groups[0]['lr'] changes from batch to batch" in str(engine.graphs.why)


def test_what_only_the_first_batch_does_is_no_obstacle(capturing: Device) -> None:
    """A table that is copied to the device once, and kept where nobody can look."""
    device = capturing.torch_device

    @functools.cache
    def table() -> torch.Tensor:
        return torch.tensor([1.0, 2.0, 3.0]).to(device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1], weight=table())

    model = Scaled().to(device)
    optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
    engine = hr.Engine(model, optimizer, loss, plan="graph", device=capturing)
    engine.epoch(data())
    assert engine.graphs is not None
    assert engine.graphs.why is None
    assert engine.graphs.replays == BATCHES - 3


def test_numbers_from_where_nobody_can_look(capturing: Device) -> None:
    """They are seen where they are used, or returned."""

    def used(model: Any, batch: Any) -> torch.Tensor:
        return scaled_loss(model, batch) * (1 + time.perf_counter() % 1e-3)  # the line

    def returned(model: Any, batch: Any) -> Any:
        return {"loss": scaled_loss(model, batch), "at": time.perf_counter()}

    line = f"{__file__}:{used.__code__.co_firstlineno + 1}"
    for loss, word in ((used, line), (returned, "returned")):
        model = Scaled().to(capturing.torch_device)
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        engine = hr.Engine(model, optimizer, loss, plan="graph", device=capturing)
        engine.epoch(data())
        assert engine.graphs is not None
        assert engine.graphs.replays == 0
        assert word in str(engine.graphs.why)


# --- at random ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    makes=st.lists(st.sampled_from([*CARRIED, *CAPTURED]), min_size=1, max_size=3),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    auto=st.booleans(),
    accumulate=st.integers(1, 2),
    clip_norm=st.sampled_from([None, 0.5]),
    batches=st.integers(6, 14),
    epochs=st.integers(1, 2),
    graph_after=st.integers(1, 3),
)
def test_never_silently_different(
    makes: list[Any],
    optimizer: str,
    auto: bool,
    accumulate: int,
    clip_norm: float | None,
    batches: int,
    epochs: int,
    graph_after: int,
) -> None:
    """Several ways at once, in whatever loop: as `baseline`, or not captured and the line named."""

    def together(device: torch.device, model: Recurrent) -> Loss:
        parts = [make(device, model) for make in makes]
        return lambda model, batch: sum(part(model, batch) for part in parts)

    options: dict[str, Any] = {"batches": batches, "epochs": epochs, "accumulate": accumulate}
    options["clip_norm"] = clip_norm
    plan = Plan.preset("graph").replace(graphs="auto" if auto else "on", graph_after=graph_after)
    with FakeDevice() as device:
        found = Run(device, together, plan, optimizer, **options)
        assert found.report is not None
        begun = None
        if found.report.parts is not None and optimizer == "AdamW":
            return  # its update is a graph of its own, from a step that is not known here
        if found.report.replays and optimizer == "AdamW":
            if epochs > 1 or accumulate > 1:
                return  # where it was made capturable is not known here
            begun = found.report.one_by_one
        expected = Run(device, together, "baseline", optimizer, capturable_from=begun, **options)
    assert found == expected
    refused = [make for make in makes if make in CARRIED]
    if refused and batches * epochs > 8:
        lines = {line for make in refused for line in lines_of(make)}
        why = str(found.report.why)
        assert any(line in why for line in lines) or "no graphs are used" in why, why
    assert not (refused and found.report.replays)
