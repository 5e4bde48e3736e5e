"""`hr.graphed`: a step of the user's own gives the plain loop's results, or says why it is not
captured."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import Device
from headrace.errors import StepError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
Step = Callable[..., Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def capturing(device: Device) -> Device:
    if not device.captures:
        pytest.skip("needs a device that captures graphs")
    return device


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True)


@dataclass
class Made:
    """A step, and the modules whose weights it changes."""

    step: Step
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Dropout(0.2), nn.Tanh()]
    return nn.Sequential(*layers)


def make_gan(device: Device, optimizer: MakeOptimizer = fused) -> Made:
    """Two models, two optimizers, three backward passes, a gradient penalty, averaged weights."""
    where = device.torch_device
    generator, critic = network(4, 8, 4).to(where), network(4, 8, 1).to(where)
    averaged = copy.deepcopy(generator)
    g_optimizer = optimizer(list(generator.parameters()))
    d_optimizer = optimizer(list(critic.parameters()))

    def step(real: torch.Tensor) -> dict[str, torch.Tensor]:
        fake = generator(torch.randn_like(real))
        d_optimizer.zero_grad()
        d_loss = nn.functional.softplus(-critic(real)).mean()
        d_loss = d_loss + nn.functional.softplus(critic(fake.detach())).mean()
        d_loss.backward()
        point = real.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
        (slope.square().sum(1).mean() * 0.1).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = nn.functional.softplus(-critic(fake)).mean()
        g_loss.backward()
        g_optimizer.step()
        with torch.no_grad():
            for average, weight in zip(averaged.parameters(), generator.parameters(), strict=True):
                average.lerp_(weight, 0.1)
        return {"d": d_loss.detach(), "g": g_loss.detach(), "images": fake.detach()}

    return Made(step, [generator, critic, averaged], [g_optimizer, d_optimizer])


def make_accumulating(device: Device, *, keeps_zeros: bool = False) -> Made:
    """An update every few batches: the caller says when."""
    model = network(4, 8, 1).to(device.torch_device)
    optimizer = momentum(model.parameters())

    def step(x: torch.Tensor, update: bool = True) -> torch.Tensor:
        loss = model(x).square().mean()
        (loss / 2).backward()
        if update:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps_zeros)
        return loss.detach()

    return Made(step, [model], [optimizer])


def batches(device: Device, count: int, sizes: tuple[int, ...] = (6, 6, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(sizes[at % len(sizes)], 4, generator=generator).to(device.torch_device)
        for at in range(count)
    ]


def host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    return {name: host(part) for name, part in value.items()} if isinstance(value, dict) else value


def run(
    device: Device,
    make: Callable[[Device], Made],
    *,
    graphed: bool,
    count: int = 16,
    sizes: tuple[int, ...] = (6, 6, 3),
    between: Callable[[int, Made], None] = lambda at, made: None,
    arguments: Callable[[int], dict[str, Any]] = lambda at: {},
) -> tuple[Any, hr.GraphReport | None]:
    """All that the step returned, and all weights and gradients, with the report."""
    torch.manual_seed(0)
    made = make(device)
    step: Any = hr.graphed(made.step, device=device) if graphed else made.step
    returned = []
    for at, batch in enumerate(batches(device, count, sizes)):
        returned.append(step(batch, **arguments(at)))
        between(at, made)
    parameters = [p for module in made.modules for p in module.parameters()]
    gradients = [None if p.grad is None else host(p.grad) for p in parameters]
    result = [[host(one) for one in returned], [host(p) for p in parameters], gradients]
    return result, step.report() if graphed else None


def check_equal(device: Device, make: Callable[[Device], Made], **options: Any) -> hr.GraphReport:
    plain, _ = run(device, make, graphed=False, **options)
    found, report = run(device, make, graphed=True, **options)
    assert found == plain
    assert report is not None
    return report


def test_a_gan_is_captured_and_gives_the_same_bits(capturing: Device) -> None:
    report = check_equal(capturing, make_gan)
    assert report.why is None
    assert report.shapes == 2
    assert report.replays >= 10


@pytest.mark.parametrize("changes", [False, True])
def test_a_closure_of_the_optimizers_step(capturing: Device, changes: bool) -> None:
    """The gradients that a call finds are dropped in the closure, which is watched, too."""

    def make(device: Device) -> Made:
        model = network(4, 4).to(device.torch_device)
        optimizer, factors = fused(model.parameters()), [1.0, 2.0] if changes else [1.0]

        def step(x: torch.Tensor) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean() * factors[0]
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            factors.reverse()
            return loss.detach()

        return Made(step, [model], [optimizer])

    report = check_equal(capturing, make, count=12, sizes=(6,))
    assert report.replays == (0 if changes else 9)
    assert "factors" in str(report.why) if changes else report.why is None


def rate_on(parameters: list[torch.Tensor]) -> Any:
    return torch.tensor(1e-2).to(parameters[0].device)


OPTIMIZERS: list[tuple[MakeOptimizer, str | None]] = [
    (lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True), None),
    (lambda p: torch.optim.AdamW(p, lr=rate_on(p), capturable=True), None),
    (lambda p: torch.optim.NAdam(p, lr=rate_on(p), capturable=True), None),
    (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), None),
    (lambda p: torch.optim.Adam(p, lr=1e-2), "fused=True would make them equal"),
    (lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True), "fused=True would make them equal"),
    (lambda p: torch.optim.RAdam(p, lr=1e-2), "RAdam was made capturable"),
]


def test_a_kept_loss_is_named(capturing: Device) -> None:
    """Its history belongs to another stream, which the capture cannot wait for."""
    model = torch.nn.Linear(4, 4).to(capturing.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graphed, kept = hr.graphed(step, device=capturing), []
    for _ in range(4):
        kept.append(graphed(torch.ones(3, 4).to(capturing.torch_device)))
    assert "let the step return loss.detach()" in str(graphed.report())


@pytest.mark.parametrize(("optimizer", "rounding"), OPTIMIZERS)
def test_which_optimizers_give_the_same_bits(
    capturing: Device,
    optimizer: MakeOptimizer,
    rounding: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(device: Device) -> Made:
        return make_gan(device, optimizer)

    plain, _ = run(capturing, make, graphed=False)
    with caplog.at_level(logging.INFO, "headrace"):
        found, report = run(capturing, make, graphed=True)
    assert report is not None
    assert (report.why, report.replays >= 10) == (None, True)
    logged = [text for text in caplog.messages if "was made capturable" in text]
    if rounding is None:
        assert found == plain
        assert (report.rounding, logged) == (None, [])
        return
    assert rounding in str(report.rounding)
    assert logged == [f"plan graph: {report.rounding}"]
    for one, other in zip(found[1], plain[1], strict=True):  # the weights
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-3)


def test_results_may_be_kept(capturing: Device) -> None:
    """`run` compares them after the last call: a replay must not overwrite what it returned."""
    check_equal(capturing, make_gan, count=9)


@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_update_every_few_batches(capturing: Device, every: int, keeps_zeros: bool) -> None:
    report = check_equal(
        capturing,
        lambda device: make_accumulating(device, keeps_zeros=keeps_zeros),
        arguments=lambda at: {"update": at % every == every - 1},
        count=30,
    )
    assert report.why is None
    assert report.replays >= 8


def test_calls_that_leave_gradients_alone_do_not_overwrite_them(capturing: Device) -> None:
    """Graphs share memory: one that runs between two parts of an accumulation must not use that of
    the gradients, whichever of them was captured first."""

    def make(device: Device) -> Made:
        model = network(4, 32, 1).to(device.torch_device)
        optimizer = momentum(model.parameters())

        def step(x: torch.Tensor, do: str) -> torch.Tensor:
            if do == "look":
                with torch.no_grad():
                    return model(x.repeat(8, 8)[:, :4]).exp().sum()
            loss = model(x).square().mean()
            loss.backward()
            if do == "update":
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return Made(step, [model], [optimizer])

    order = ["look"] * 6 + ["add", "look", "add", "update", "look"] * 6
    report = check_equal(
        capturing, make, count=len(order), sizes=(6,), arguments=lambda at: {"do": order[at]}
    )
    assert report.why is None
    assert report.replays > 12


@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_steps_that_leave_each_other_gradients(capturing: Device, set_to_none: bool) -> None:
    """Each drops its own gradients first, and leaves some in the other's model."""
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        where = capturing.torch_device
        generator, critic = network(4, 8, 4).to(where), network(4, 8, 1).to(where)
        g_optimizer, d_optimizer = fused(generator.parameters()), momentum(critic.parameters())

        def d_step(
            real: torch.Tensor, g: Any = generator, d: Any = critic, update: Any = d_optimizer
        ) -> torch.Tensor:
            update.zero_grad(set_to_none=set_to_none)
            loss = d(g(torch.randn_like(real)).detach()).mean() - d(real).mean()
            loss.backward()
            update.step()
            return loss.detach()

        def g_step(
            real: torch.Tensor, g: Any = generator, d: Any = critic, update: Any = g_optimizer
        ) -> torch.Tensor:
            update.zero_grad(set_to_none=set_to_none)
            loss = -d(g(torch.randn_like(real))).mean()
            loss.backward()
            update.step()
            return loss.detach()

        steps: list[Any] = [d_step, g_step]
        if graphed:
            steps = [hr.graphed(step, device=capturing) for step in steps]
        returned = [step(x) for x in batches(capturing, 12, sizes=(6,)) for step in steps]
        parameters = [*generator.parameters(), *critic.parameters()]
        gradients = [host(p.grad) for p in parameters if p.grad is not None]
        found.append([list(map(host, returned)), list(map(host, parameters)), gradients])
    assert found[0] == found[1]
    assert all(step.report().replays >= 8 for step in steps)


def test_learning_rates_may_change_between_calls(capturing: Device) -> None:
    def schedule(at: int, made: Made) -> None:
        for number, optimizer in enumerate(made.optimizers):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + at + number)

    report = check_equal(capturing, make_gan, between=schedule)
    assert report.why is None
    assert report.captures == 2


def test_a_loaded_optimizer_state_is_captured_again(capturing: Device) -> None:
    def reload(at: int, made: Made) -> None:
        if at == 10:
            for optimizer in made.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    report = check_equal(capturing, make_gan, between=reload, count=24)
    assert report.why is None
    assert report.captures == 4


def test_host_tensors_among_the_arguments_are_compared_by_value(capturing: Device) -> None:
    """A captured kernel would keep the number that it took from the host."""

    def make(device: Device) -> Made:
        made = make_accumulating(device)
        inner = made.step

        def step(x: torch.Tensor, scale: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            return inner(x[: sizes.tolist()[0]] * scale)  # type: ignore[no-any-return]

        made.step = step
        return made

    def arguments(at: int) -> dict[str, Any]:
        late = at > 5
        return {"scale": torch.tensor(2.0 if late else 1.0), "sizes": torch.tensor([3 - late])}

    report = check_equal(capturing, make, arguments=arguments, sizes=(6,))
    assert (report.why, report.captures) == (None, 2)  # one for each value

    step = hr.graphed(make(capturing).step, device=capturing)
    x = batches(capturing, 1)[0]
    step(x, torch.tensor(1.0), torch.full((2000,), 3))
    assert "2,000 values on the host" in str(step.report().why)


class SameHash:
    """Equal if its number is, and of the same hash as all others."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameHash) and other.number == self.number

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("values", [(-1, -2), (SameHash(1), SameHash(2))])
def test_values_of_one_hash_are_told_apart(capturing: Device, values: tuple[Any, Any]) -> None:
    """-1 and -2 have the same hash. Only calls with the second value draw on the host."""
    one, other = values

    def make(device: Device) -> Made:
        random.seed(3)
        made = make_accumulating(device)
        inner = made.step

        def step(x: torch.Tensor, value: Any) -> torch.Tensor:
            return inner(x * random.choice((1.0, 2.0)) if value == other else x)

        made.step = step
        return made

    report = check_equal(
        capturing, make, sizes=(6,), arguments=lambda at: {"value": one if at < 6 else other}
    )
    assert (report.captures, "random module" in str(report.why)) == (1, True)


def test_what_a_step_writes_to_its_batch_is_seen_by_the_caller(capturing: Device) -> None:
    def make(device: Device) -> Made:
        made = make_accumulating(device)
        inner = made.step

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = inner(x)
            x.mul_(2.0)
            return loss

        made.step = step
        return made

    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        step = make(capturing).step
        called = hr.graphed(step, device=capturing) if graphed else step
        xs = batches(capturing, 6, sizes=(6,))
        found.append([[host(called(x)) for x in xs + xs], [host(x) for x in xs]])
    assert found[0] == found[1]
    assert called.report().replays == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize("shared", ["written as argument", "written elsewhere", "weight", "read"])
def test_an_argument_that_shares_memory_with_the_steps_own_tensors(
    capturing: Device, shared: str
) -> None:
    """A graph gets copies of its arguments, so the step may not write to such memory."""

    def make(device: Device) -> Made:
        model = network(4, 4).to(device.torch_device)
        optimizer, table = fused(model.parameters()), torch.ones(4, 4, device=device.torch_device)

        def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            if shared == "written as argument":
                other.mul_(0.9)
            elif shared == "written elsewhere":
                table.mul_(0.9)
            optimizer.zero_grad()
            loss = (model(x) @ table).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach() + other.mean()

        made = Made(step, [model], [optimizer])
        first: Any = model[0]
        passed.append(first.weight.detach() if shared == "weight" else table[1:])
        return made

    passed: list[torch.Tensor] = []
    report = check_equal(
        capturing, make, sizes=(6,), count=9, arguments=lambda at: {"other": passed[-1]}
    )
    assert report.replays == (6 if shared == "read" else 0)
    assert ("shares memory" in str(report.why)) == (shared != "read")


@pytest.mark.parametrize(
    ("table_at", "passed_at"), [(0, 0), (0, 2), (2, 0)], ids=["same", "later", "earlier"]
)
def test_an_argument_that_shares_memory_later_is_not_copied(
    capturing: Device, table_at: int, passed_at: int
) -> None:
    """Also if one of the two begins at another place of that memory."""

    def make(device: Device) -> Made:
        made = make_accumulating(device)
        memory, inner = torch.ones(8, device=device.torch_device), made.step
        table, other = memory[table_at:], memory[passed_at : passed_at + 4]

        def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            table.mul_(0.9)
            return inner(x * other)  # type: ignore[no-any-return]

        made.step = step
        passed[:] = [other.clone(), other]
        return made

    passed: list[torch.Tensor] = []
    report = check_equal(
        capturing, make, sizes=(6,), arguments=lambda at: {"other": passed[at >= 8]}
    )
    assert (report.why, report.captures) == (None, 1)
    assert 0 < report.replays < 8


def test_a_changed_value_is_captured_again(capturing: Device) -> None:
    def make(device: Device) -> Made:
        made = make_accumulating(device)
        inner, settings = made.step, {"weight": 1.0}

        def step(x: torch.Tensor) -> torch.Tensor:
            return inner(x) * settings["weight"]

        made.step, made.settings = step, settings  # type: ignore[attr-defined]
        return made

    def change(at: int, made: Any) -> None:
        if at == 10:
            made.settings["weight"] = 2.0

    report = check_equal(capturing, make, between=change, count=24)
    assert report.why is None
    assert report.captures == 4


class Trainer:
    """A step with all that may be replaced between two calls."""

    weight = 1.0

    def __init__(self, device: Device) -> None:
        self.model = network(4, 8, 1).to(device.torch_device)
        self.optimizer = fused(self.model.parameters())
        self.rows = torch.ones(4, device=device.torch_device)

    def loss(self, found: torch.Tensor) -> torch.Tensor:
        weight = self.weight * self.rows.sum()
        return found.square().mean() * weight + getattr(self, "offset", 0.0)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x))
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def doubled(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


REPLACED: dict[str, tuple[Callable[[Trainer], object], str | None]] = {
    "an attribute of the class, in the object": (lambda t: setattr(t, "weight", 2.0), None),
    "an attribute that had a default": (lambda t: setattr(t, "offset", 2.0), None),
    "a method, in the object": (lambda t: setattr(t, "loss", torch.mean), None),
    "a method, in the class": (lambda t: setattr(type(t), "loss", _other_loss), None),
    "fewer rows, in the same memory": (
        lambda t: setattr(t.rows, "data", t.rows.data[:2]),
        None,
    ),
    "a module's forward": (lambda t: setattr(t.model[2], "forward", torch.sigmoid), None),
    "a new hook": (lambda t: t.model[0].register_forward_hook(doubled), "a hook of module '0'"),
    "a hook after accumulation": (
        lambda t: t.model[0].weight.register_post_accumulate_grad_hook(double_gradient),
        "a hook of parameter '0.weight'",
    ),
    "a hook before accumulation": (
        lambda t: accumulation(t).register_prehook(lambda gradients: (gradients[0] * 2,)),
        "a hook of parameter '0.weight'",
    ),
    "a hook of the node": (
        lambda t: accumulation(t).register_hook(lambda *_: double_gradient(t.model[0].weight)),
        "a hook of parameter '0.weight'",
    ),
    "a hook of several gradients": (
        lambda t: torch.autograd.graph.register_multi_grad_hook(
            tuple(t.model[0].parameters()), lambda gradients: gradients[0].mul_(2)
        ),
        "a hook of parameter '0.weight'",
    ),
}


def double_gradient(parameter: Any) -> None:
    parameter.grad.mul_(2)


def accumulation(trainer: Any) -> Any:
    """The node that adds to the first weight's gradient. It lives while somebody holds it."""
    trainer.node = torch.autograd.graph.get_gradient_edge(trainer.model[0].weight).node
    return trainer.node


def _other_loss(self: Trainer, found: torch.Tensor) -> torch.Tensor:
    return found.abs().mean()


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_between_calls_is_noticed(capturing: Device, name: str) -> None:
    replace, why = REPLACED[name]

    def make(device: Device) -> Made:
        kind = type("Fresh", (Trainer,), {"__module__": __name__, "loss": Trainer.loss})
        trainer = kind(device)
        made = Made(trainer.step, [trainer.model], [])
        made.trainer = trainer  # type: ignore[attr-defined]
        return made

    def change(at: int, made: Any) -> None:
        if at == 7:
            replace(made.trainer)

    report = check_equal(capturing, make, between=change, sizes=(6,))
    assert report.captures == (1 if why else 2)
    assert (report.why is None) if why is None else (why in str(report.why))


def test_a_lazy_module_is_captured_once_it_has_its_parameters(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).to(device.torch_device)
        kept: dict[str, Any] = {}

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            optimizer = kept.setdefault("optimizer", None) or fused(model.parameters())
            kept["optimizer"] = optimizer
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Made(step, [model], [])

    assert check_equal(capturing, make, sizes=(6,)).replays > 8


def test_an_optimizer_that_only_a_call_shows_is_found(capturing: Device) -> None:
    """The search does not enter libraries; the watched calls see what is used."""
    report = check_equal(capturing, make_hidden)
    assert report.why is None
    assert report.replays >= 8


def test_a_module_that_lives_for_one_call_is_no_part_of_the_state(capturing: Device) -> None:
    def make(device: Device) -> Made:
        made = make_accumulating(device)
        model, optimizer = made.modules[0], made.optimizers[0]

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = nn.MSELoss()(model(x), x[:, :1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Made(step, made.modules, made.optimizers)

    report = check_equal(capturing, make, sizes=(6,))
    assert (report.why, report.replays > 9) == (None, True)


def test_a_step_that_makes_an_optimizer_for_each_call(capturing: Device) -> None:
    def make(device: Device) -> Made:
        model = network(4, 8, 1).to(device.torch_device)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Made(step, [model], [])

    report = check_equal(capturing, make, sizes=(6,))
    assert "each call makes another SGD" in str(report.why)


class Hidden:
    """Keeps its optimizer where no code of the step names it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.keep = {"it": [optimizer]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["keep"]["it"][0], name)


def make_hidden(device: Device) -> Made:
    model = network(4, 8, 1).to(device.torch_device)
    hidden = Hidden(momentum(model.parameters()))

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        hidden.step()
        return loss.detach()

    return Made(step, [model], [])


class Meter(list[int]):
    """A list that counts in an attribute of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def count(self) -> None:
        self.steps += 1


def with_change(change: Callable[[dict[str, Any], torch.Tensor], object]) -> Any:
    def make(device: Device) -> Made:
        random.seed(3)
        numpy.random.seed(3)
        made, kept = make_accumulating(device), {"count": 0, "seen": [], "loss": 0.0}
        kept["weight"] = next(made.modules[0].parameters())
        kept["numbers"] = numpy.random.RandomState(3)
        kept["draw"] = random.Random(3).random
        kept["meter"], kept["log"] = Meter(), io.StringIO()
        rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
        kept["rows"] = made.modules[0].rows = rows.to(device.torch_device)  # type: ignore[assignment]
        made.modules[0].seen = 0
        more: list[int] = []
        kept["append"] = more.append
        kept["scheduler"] = torch.optim.lr_scheduler.StepLR(made.optimizers[0], 100)
        inner = made.step

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = inner(x)
            change(kept, loss)
            return loss

        made.step = step
        return made

    return make


def move_first_key(kept: dict[str, Any]) -> None:
    first = next(iter(kept))
    kept[first] = kept.pop(first)


SYSTEM = random.SystemRandom()
REFUSED = {
    "a host read": (lambda kept, loss: loss.item(), "test_graphed_function.py"),
    "a counter": (lambda kept, loss: kept.update(count=kept["count"] + 1), "kept['count']"),
    "a list that grows": (lambda kept, loss: kept["seen"].append(1), "kept['seen']"),
    "a kept tensor": (lambda kept, loss: kept.update(loss=loss * 2 + kept["loss"]), "copy_()"),
    # What they decide seldom differs: two calls in a row may do the same.
    "Python's generator": (
        lambda kept, loss: random.random() < 0.05 and loss.mul_(2),
        "from the random module",
    ),
    "NumPy's stored normal number": (
        lambda kept, loss: numpy.random.randn() > 2 and loss.mul_(2),
        "from numpy.random",
    ),
    "PyTorch's generator of the host": (
        lambda kept, loss: int(torch.randint(20, (1,))) == 0 and loss.mul_(2),
        "from torch's CPU generator, on the host at",
    ),
    "a generator of one's own": (
        lambda kept, loss: kept["numbers"].rand() < 0.05 and loss.mul_(2),
        "kept['numbers']",
    ),
    "a method of a generator": (
        lambda kept, loss: kept["draw"]() < 0.05 and loss.mul_(2),
        "kept['draw']",
    ),
    "a generator without a state": (
        lambda kept, loss: SYSTEM.random() < -1 and loss.mul_(2),
        "SYSTEM changes",
    ),
    "an attribute of a list": (lambda kept, loss: kept["meter"].count(), "kept['meter'].steps"),
    "the order of keys": (lambda kept, loss: move_first_key(kept), "kept"),
    "a method of a list": (lambda kept, loss: kept["append"](1), "kept['append']"),
    "a scheduler": (
        lambda kept, loss: kept["scheduler"].step(),
        "call the scheduler's step() in the loop",
    ),
    "a nested tensor": (
        lambda kept, loss: kept["rows"].mul_(2),
        "the step uses a nested tensor at ",
    ),
    "a parameter's memory": (
        lambda kept, loss: setattr(kept["weight"], "data", kept["weight"].data * 0.9),
        "p.data.copy_(…)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_no_graph_can_repeat_runs_as_written(
    capturing: Device, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, expected = REFUSED[name]
    with caplog.at_level(logging.WARNING, "headrace"):
        report = check_equal(capturing, with_change(change), count=24)
    assert report.why is not None
    assert expected in report.why
    assert report.why in caplog.text
    assert report.shapes == 0


def test_an_attribute_that_only_the_loop_changes_is_not_read(capturing: Device) -> None:
    def count(at: int, made: Any) -> None:
        made.modules[0].seen += 1

    make = with_change(lambda kept, loss: None)
    for between in (lambda at, made: None, count):  # with a nested tensor, unused
        report = check_equal(capturing, make, sizes=(6,), between=between)
        assert (report.why, report.captures) == (None, 1)


class Wrapped(torch.optim.Optimizer):
    """A wrapper that does not call its base class's constructor, as some published ones do not."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, {}
        self.state = inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_without_its_base_classs_attributes(capturing: Device) -> None:
    def make(device: Device) -> Made:
        made = make_accumulating(device)
        wrapped = Wrapped(made.optimizers[0])
        model = made.modules[0]

        def step(x: torch.Tensor) -> torch.Tensor:
            wrapped.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            wrapped.step()
            return loss.detach()

        return Made(step, [model], made.optimizers)

    report = check_equal(capturing, make, sizes=(6,))
    assert (report.why, report.replays > 9) == (None, True)


def test_a_step_may_write_to_a_file(capturing: Device) -> None:
    report = check_equal(capturing, with_change(lambda kept, loss: kept["log"].write("a step")))
    assert (report.why, report.replays > 0) == (None, True)


def test_an_empty_tensor_may_be_made_on_the_host(capturing: Device) -> None:
    """As the caches of transformers' models do: nothing is copied, and nobody waits."""

    def make(device: Device) -> Made:
        made = make_accumulating(device)
        inner = made.step

        def step(x: torch.Tensor) -> torch.Tensor:
            return inner(torch.cat([torch.tensor([], device=x.device), x]))

        made.step = step
        return made

    assert check_equal(capturing, make).replays > 0


def test_a_scheduler_inside_the_step_is_refused(capturing: Device) -> None:
    def make(device: Device) -> Made:
        made = make_accumulating(device)
        scheduler = torch.optim.lr_scheduler.StepLR(made.optimizers[0], 1, 0.9)
        inner = made.step

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = inner(x)
            scheduler.step()
            return loss

        made.step = step
        return made

    report = check_equal(capturing, make, count=24)
    assert report.why is not None
    assert "scheduler" in report.why


def test_a_hook_is_refused(capturing: Device) -> None:
    def make(device: Device) -> Made:
        made = make_accumulating(device)
        made.modules[0].register_forward_hook(lambda *_: None)
        return made

    report = check_equal(capturing, make)
    assert report.why is not None
    assert "hook" in report.why


def test_without_graphs_the_step_runs_as_written() -> None:
    device = hr.open_device("cpu")
    report = check_equal(device, make_gan)
    assert report.replays == 0
    assert "captures no graphs" in str(report.why)


def test_options_are_checked() -> None:
    with pytest.raises(StepError, match="expected a function"):
        hr.graphed(3)  # type: ignore[arg-type]
    with pytest.raises(StepError, match="at least 1"):
        hr.graphed(print, after=0)
    with pytest.raises(StepError, match="at least 1"):
        hr.graphed(shapes=0)


def test_as_a_decorator_with_options(capturing: Device) -> None:
    made = make_accumulating(capturing)

    @hr.graphed(device=capturing, after=1, modules=made.modules, optimizers=made.optimizers)
    def step(x: torch.Tensor) -> torch.Tensor:
        """Trains."""
        return made.step(x)  # type: ignore[no-any-return]

    for batch in batches(capturing, 5, sizes=(6,)):
        step(batch)
    assert step.__doc__ == "Trains."
    assert step.report().replays == 3


def test_an_engine_replays_a_step_of_ones_own(capturing: Device) -> None:
    def train(plan: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        made = make_gan(capturing)
        step = made.step

        def losses(batch: torch.Tensor) -> dict[str, torch.Tensor]:
            values = step(batch)
            return {"loss": values["d"], "g": values["g"]}

        engine = hr.Engine.from_step(losses, device=capturing, plan=plan)
        loader = [batch.cpu() for batch in batches(capturing, 16)]
        return engine.epoch(loader), engine.graphs

    plain, _ = train("pipeline")
    found, report = train("graph")
    assert found.losses == plain.losses
    assert found.metrics == plain.metrics
    assert report.why is None
    assert found.statistics.replays == report.replays >= 10


def test_gradients_that_are_assigned_anew_are_named(fake_device: Device) -> None:
    """The step reads a gradient that the loop puts somewhere else each time."""
    model = nn.Linear(3, 1).to(fake_device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = hr.graphed(step, device=fake_device)
    kept = []
    for _ in range(40):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            kept.append(parameter.grad)
        graphed(torch.ones(2, 3).to(fake_device.torch_device))
    assert "each call finds the gradients that it uses in other memory" in str(graphed.report().why)


@dataclass
class Losses:
    """What a step returns."""

    total: torch.Tensor
    parts: list[torch.Tensor]


def make_returning(device: Device, kind: Any) -> Any:
    model = nn.Linear(4, 1).to(device.torch_device)
    optimizer = fused(model.parameters())

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return kind(loss.detach())

    return step


def test_results_in_a_dataclass_may_be_kept(capturing: Device) -> None:
    torch.manual_seed(0)
    plain = make_returning(capturing, lambda loss: loss)
    expected = [plain(batch) for batch in batches(capturing, 8, sizes=(6,))]
    torch.manual_seed(0)
    step = hr.graphed(
        make_returning(capturing, lambda loss: Losses(loss, [loss + 1])), device=capturing
    )
    kept = [step(batch) for batch in batches(capturing, 8, sizes=(6,))]
    assert step.report().replays > 0
    assert [one.total.item() for one in kept] == [one.item() for one in expected]
    assert [one.parts[0].item() for one in kept] == [(one + 1).item() for one in expected]


def test_results_that_cannot_be_copied_are_named(capturing: Device) -> None:
    step = hr.graphed(
        make_returning(capturing, lambda loss: SimpleNamespace(loss=loss)), device=capturing
    )
    kept = [step(batch).loss for batch in batches(capturing, 8, sizes=(6,))]
    assert "a SimpleNamespace was returned" in str(step.report().why)
    assert len({one.item() for one in kept}) == 8


def test_requires_grad_on_a_batch_is_named(capturing: Device) -> None:
    model = nn.Linear(4, 1).to(capturing.torch_device)
    optimizer = fused(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = slope.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = hr.graphed(step, device=capturing)
    for batch in batches(capturing, 8, sizes=(6,)):
        graphed(batch)
    assert "requires_grad_()" in str(graphed.report().why)
