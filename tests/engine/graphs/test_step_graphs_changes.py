"""Changes during training: the graph plan keeps the losses and weights of a plan without graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.capture.guards.obstacles import state_obstacle
from headrace.capture.state.state import StepState
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.errors import StepError
from headrace.fake import FakeDevice
from headrace.plan import Plan
from support.training.engines import data, loss, make_model, same, weights

GRAPH = Plan.preset("graph").replace(graph_after=1)
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def optimizer_of(engine: Engine) -> torch.optim.Optimizer:
    assert engine._builder.parts is not None
    return engine._builder.parts.optimizer


def both(
    device: Device,
    between: Callable[[Engine], object],
    *,
    model: Callable[[], nn.Module] | None = None,
    make: Optimizer = adamw,
    batches: Any = None,
    begin: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> Engine:
    """Train two epochs under both plans, call `between` in the middle, and compare the results."""
    found = []
    for plan in (Plan.preset("pipeline"), GRAPH):
        torch.manual_seed(0)
        chosen = make_model(device) if model is None else model().to(device.torch_device)
        begin(chosen)
        engine = Engine(
            chosen,
            make(list(chosen.parameters())),
            options.pop("loss", loss) if plan is GRAPH else options.get("loss", loss),
            plan=plan,
            device=device,
            deterministic=True,
            **{name: value for name, value in options.items() if name != "loss"},
        )
        torch.manual_seed(5)
        first = engine.epoch(batches or data(8))
        between(engine)
        second = engine.epoch(batches or data(8))
        found.append((first.losses, second.losses, second.metrics, weights(engine)))
    assert found[0][:3] == found[1][:3]
    assert same(found[0][3], found[1][3])
    return engine


@pytest.mark.parametrize("make", [adamw, sgd])
class TestState:
    """The optimizer's state of a parameter outlives a step, so no graph may create it."""

    def test_a_parameter_is_unfrozen(self, capturing: Device, make: Optimizer) -> None:
        engine = both(
            capturing,
            lambda engine: engine.model[0].weight.requires_grad_(True),  # type: ignore[index]
            begin=lambda model: model[0].weight.requires_grad_(False),  # type: ignore[index]
            make=make,
        )
        assert engine.graphs is not None
        assert engine.graphs.why is None

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_the_state_is_cleared(
        self, capturing: Device, make: Optimizer, accumulate: int
    ) -> None:
        both(
            capturing,
            lambda engine: optimizer_of(engine).state.clear(),
            make=make,
            accumulate=accumulate,
        )

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_parameter_is_frozen(
        self, capturing: Device, make: Optimizer, accumulate: int
    ) -> None:
        both(
            capturing,
            lambda engine: engine.model[0].weight.requires_grad_(False),  # type: ignore[index]
            make=make,
            accumulate=accumulate,
        )


class Sometimes(nn.Module):
    """Uses one of its layers for batches of seven rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) if len(x) == 7 else self.a(x)


class Running(nn.Module):
    """Replaces a buffer in its forward, instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("running", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return self.layer(x - self.running)


class TestModels:
    @pytest.mark.parametrize("accumulate", [1, 2])
    @pytest.mark.parametrize(
        "rows", [[7, 7, 6, 6, 6, 6, 7, 6, 6, 6, 7, 7], [6] * 6 + [7] + [6] * 5]
    )
    def test_parameters_that_only_some_batches_use(
        self, capturing: Device, accumulate: int, rows: str
    ) -> None:
        batches = [batch for count in rows for batch in data(1, rows=int(count))]
        both(
            capturing, lambda engine: None, model=Sometimes, batches=batches, accumulate=accumulate
        )

    def test_a_buffer_that_forward_replaces(self, capturing: Device) -> None:
        engine = both(capturing, lambda engine: None, model=Running)
        assert engine.graphs is not None
        assert "Running.running changes from batch to batch" in str(engine.graphs.why)

    def test_a_module_is_replaced(self, capturing: Device) -> None:
        def change(engine: Engine) -> None:
            engine.model[1] = nn.Tanh()  # type: ignore[index, operator]

        both(capturing, change)

    def test_a_hook_is_registered(self, capturing: Device) -> None:
        engine = both(
            capturing,
            lambda engine: engine.model[0].register_forward_hook(lambda m, i, o: o * 2),  # type: ignore[index, union-attr]
        )
        assert engine.graphs is not None
        assert "would not run in a replay" in str(engine.graphs.why)

    def test_a_metric_that_is_a_view_of_a_weight(self, capturing: Device) -> None:
        both(
            capturing,
            lambda engine: None,
            loss=lambda m, b: {"loss": loss(m, b), "scale": m[3].bias[0]},
        )


class TestOptimizers:
    def test_a_group_is_added(self, capturing: Device) -> None:
        found = []
        for plan in (Plan.preset("pipeline"), GRAPH):
            model = make_model(capturing)
            optimizer = adamw(model[0].parameters())  # type: ignore[operator]
            engine = Engine(model, optimizer, loss, plan=plan, device=capturing, deterministic=True)
            torch.manual_seed(5)
            first = engine.epoch(data(6)).losses
            optimizer.add_param_group({"params": list(model[3].parameters())})  # type: ignore[operator]
            found.append((first, engine.epoch(data(6)).losses, weights(engine)))
        assert found[0][:2] == found[1][:2]
        assert same(found[0][2], found[1][2])

    def test_a_checkpoint_of_a_plan_without_graphs(self, capturing: Device) -> None:
        """Its optimizer is not fused and not capturable; graphs make it capturable again."""

        def engine_of(plan: Any) -> Engine:
            model = make_model(capturing)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
            return Engine(model, optimizer, loss, plan=plan, device=capturing)

        stored = optimizer_of(engine_of("pipeline")).state_dict()
        engine = engine_of(GRAPH)
        engine.epoch(data(6))
        optimizer_of(engine).load_state_dict(stored)
        assert len(engine.epoch(data(6)).losses) == 6

    def test_a_state_taken_under_graph_is_loaded_without_graphs(self) -> None:
        with FakeDevice() as device:
            model = make_model(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            engine = Engine(model, optimizer, loss, plan=GRAPH, device=device)
            engine.epoch(data(6))
            state = engine.state_dict()
        cpu = open_device("cpu")
        model = make_model(cpu)
        other = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss, device=cpu)
        other.load_state_dict(state)
        assert len(other.epoch(data(4)).losses) == 4

    def test_a_learning_rate_that_is_a_tensor_for_a_while(self, capturing: Device) -> None:
        def change(engine: Engine) -> None:
            group = optimizer_of(engine).param_groups[0]
            group["lr"] = torch.tensor(0.1).to(capturing.torch_device)
            engine.epoch(data(3))
            group["lr"] = 0.01

        both(capturing, change)

    def test_another_decay_of_averages(self, capturing: Device) -> None:
        def change(engine: Engine) -> None:
            assert engine.ema is not None
            engine.ema.decay = 0.1

        both(capturing, change, ema_decay=0.9)


@pytest.mark.unsanitized
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scheduler_that_raises(capturing: Device, accumulate: int) -> None:
    found = []
    for plan in (Plan.preset("pipeline"), GRAPH):
        model = make_model(capturing)
        optimizer = adamw(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=6, cycle_momentum=False
        )
        engine = Engine(
            model,
            optimizer,
            loss,
            plan=plan,
            device=capturing,
            scheduler=schedule,
            accumulate=accumulate,
            ema_decay=0.9,
            deterministic=True,
        )
        torch.manual_seed(5)
        with pytest.raises(StepError, match="Tried to step"):
            engine.epoch(data(24))
        assert engine.last_result is not None
        found.append((engine.last_result.losses, weights(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


@pytest.mark.unsanitized
def test_a_python_error_in_a_capture(capturing: Device) -> None:
    """Training continues without graphs, with the same random numbers."""

    def fragile(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        if capturing.current_stream().name == "capture":
            raise KeyError("only here")
        return value

    model = make_model(capturing)
    engine = Engine(
        model, adamw(model.parameters()), fragile, plan=GRAPH, device=capturing, deterministic=True
    )
    torch.manual_seed(5)
    found = engine.epoch(data(12)).losses
    expected_model = make_model(capturing)
    expected = Engine(
        expected_model, adamw(expected_model.parameters()), loss, device=capturing,
        deterministic=True,
    )  # fmt: skip
    torch.manual_seed(5)
    assert found == expected.epoch(data(12)).losses
    assert engine.graphs is not None
    assert "KeyError: 'only here'" in str(engine.graphs.why)


def test_the_engines_precision_holds_under_another_plan(capturing: Device) -> None:
    model = make_model(capturing)
    engine = Engine(model, adamw(model.parameters()), loss, device=capturing, precision="bf16")
    engine.use_plan("graph")
    assert engine.plan.precision == "bf16"


def test_gradients_outside_the_optimizer_that_the_user_clears(capturing: Device) -> None:
    """A graph adds to the old tensors, so it is captured again when the user has cleared them."""
    found = []
    for plan in ("pipeline", "graph"):
        model = make_model(capturing, dropout=0.0)
        optimizer = adamw(list(model.parameters())[2:])
        engine = Engine(model, optimizer, loss, plan=plan, device=capturing, clip_norm=0.5)
        for info in engine.steps(data(16)):
            if info.batch == 8:
                model.zero_grad()
        outside = next(model.parameters()).grad
        assert outside is not None
        assert engine.last_result is not None
        found.append((engine.last_result.losses, weights(engine), outside.clone()))
        report = engine.graphs
        engine.close()
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])
    assert report is not None
    assert (report.why, report.captures) == (None, 2)


def _freeze(engine: Any) -> None:
    engine.model[0].weight.requires_grad_(False)


def _new_memory(engine: Any) -> None:
    engine.model[0].weight.data = engine.model[0].weight.data * 2


def _new_parameter(engine: Any) -> None:
    engine.model[0].weight = nn.Parameter(engine.model[0].weight.detach() * 2)


def _new_module(engine: Any) -> None:
    engine.model[1] = nn.Tanh()


def _one_module_more(engine: Any) -> None:
    engine.model.append(nn.Tanh())


def _no_module(engine: Any) -> None:
    del engine.model[1]


def _load_optimizer(engine: Any) -> None:
    optimizer = optimizer_of(engine)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _clear_state(engine: Any) -> None:
    optimizer_of(engine).state.clear()


def _replace_state(engine: Any) -> None:
    state = optimizer_of(engine).state[engine.model[0].weight]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _swap_state(engine: Any) -> None:
    states = optimizer_of(engine).state
    for parameter, state in list(states.items()):
        states[parameter] = {name: value * 2 for name, value in state.items()}


def _hook(engine: Any) -> None:
    engine.model[0].register_forward_hook(lambda module, inputs, output: output * 2)


def _clear_gradients(engine: Any) -> None:
    engine.model.zero_grad()


def _replace_gradients(engine: Any) -> None:
    for parameter in engine.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


DURING_AN_EPOCH: list[tuple[Callable[[Any], None], int, str | None]] = [
    *((change, 1, None) for change in (_freeze, _new_memory, _new_parameter, _new_module)),
    *((change, 1, None) for change in (_one_module_more, _no_module)),
    *((change, 1, None) for change in (_load_optimizer, _clear_state, _replace_state)),
    *((_swap_state, accumulate, None) for accumulate in (1, 3)),
    (_hook, 1, "would not run in a replay"),
    (_freeze, 3, "from some batches only"),
    *((change, 3, None) for change in (_new_memory, _load_optimizer, _clear_gradients)),
    (_replace_gradients, 3, None),
    (_replace_state, 3, None),
]


@pytest.mark.parametrize(("change", "accumulate", "why"), DURING_AN_EPOCH)
def test_a_change_during_an_epoch(
    capturing: Device, change: Callable[[Any], None], accumulate: int, why: str | None
) -> None:
    found = []
    for plan in (Plan.preset("pipeline"), GRAPH):
        model = make_model(capturing)
        engine = Engine(
            model,
            adamw(model.parameters()),
            loss,
            plan=plan,
            device=capturing,
            accumulate=accumulate,
            deterministic=True,
        )
        torch.manual_seed(5)
        for progress in engine.steps(data(6 + 6 * accumulate)):
            if progress.batch == 3 * accumulate + 1:  # in the middle of a group
                change(engine)
        assert engine.last_result is not None
        found.append((engine.last_result.losses, weights(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    report = engine.graphs
    assert report is not None
    assert (report.why is None) if why is None else (why in str(report.why))
    assert report.captures == (1 if why else 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda teacher: setattr(teacher, "weight", nn.Parameter(teacher.weight * 2)), None),
        (lambda teacher: teacher.register_forward_hook(lambda m, i, o: o * 2), "a hook of module"),
    ],
)
def test_a_teacher_in_the_loss_changes_during_an_epoch(
    capturing: Device, change: Callable[[Any], object], why: str | None
) -> None:
    found = []
    for plan in (Plan.preset("pipeline"), GRAPH):
        torch.manual_seed(0)
        teacher = nn.Linear(8, 3).to(capturing.torch_device)

        def distilled(model: nn.Module, batch: Any, teacher: nn.Module = teacher) -> torch.Tensor:
            difference: torch.Tensor = model(batch[0]) - teacher(batch[0]).detach()
            return difference.square().mean()

        model = make_model(capturing)
        engine = Engine(model, adamw(model.parameters()), distilled, plan=plan, device=capturing)
        for progress in engine.steps(data(9)):
            if progress.batch == 4:
                change(teacher)
        assert engine.last_result is not None
        found.append(engine.last_result.losses)
    assert found[0] == found[1]
    assert engine.graphs is not None
    assert engine.graphs.captures == (1 if why else 2)
    assert (engine.graphs.why is None) if why is None else (why in str(engine.graphs.why))


class Counting(torch.optim.AdamW):
    """An optimizer of one's own whose Python code decides something."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5 if self.count % 5 == 0 else 1.0)
        return super().step(closure)


class CountingInState(torch.optim.AdamW):
    """Counts in the optimizer's state, and reads a factor from there."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state["common" if self.is_common else parameter]
                state["count"] = state.get("count", 0) + self.counts
                parameter.mul_(0.5 if state["count"] % 5 == 4 else state.get("factor", 1.0))
        return result

    is_common = False
    counts = 1


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("is_common", [False, True])
@pytest.mark.parametrize("counts", [1, 0])
def test_python_numbers_in_an_optimizers_state(
    capturing: Device, counts: int, is_common: bool, accumulate: int
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        kind = type("Kind", (CountingInState,), {"is_common": is_common, "counts": counts})
        return kind(parameters, lr=0.01, fused=True)  # type: ignore[no-any-return]

    def slow_down(engine: Engine) -> None:
        optimizer = optimizer_of(engine)
        state: Any = optimizer.state
        first = optimizer.param_groups[0]["params"][0]
        state["common" if is_common else first]["factor"] = 0.9

    engine = both(capturing, slow_down, make=make, accumulate=accumulate)
    assert engine.graphs is not None
    if counts:
        assert "Kind changes 'count'" in str(engine.graphs.why)
    else:
        assert (engine.graphs.why, engine.graphs.replays > 4) == (None, True)


class Made(nn.Module):
    """A module that makes a layer at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.made = nn.Linear(8, 3), nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "last" not in self.made:
            self.made["last"] = nn.Dropout(0.0)
        hidden: torch.Tensor = self.made["last"](self.first(x))
        return hidden * (2.0 if self.made["last"].p == 0 else 3.0)


def _let_memory_move(engine: Any) -> None:
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def _change_what_was_made(engine: Any) -> None:
    if engine.updates == 8:
        engine.model.made["last"].p = 1e-9


@pytest.mark.parametrize(
    ("model", "make", "after_each", "why"),
    [
        (None, lambda p: Counting(p, lr=0.01, fused=True), lambda engine: None, "Counting.count"),
        (None, adamw, _let_memory_move, "gets other memory from batch to batch"),
        (Made, adamw, _change_what_was_made, None),
        (lambda: nn.Sequential(nn.Linear(8, 3), Sparse()), adamw, lambda engine: None, "sparse"),
    ],
)
def test_what_happens_at_every_batch(
    model: Any, make: Optimizer, after_each: Callable[[Any], object], why: str | None
) -> None:
    found = []
    for plan in (Plan.preset("pipeline"), GRAPH):
        with FakeDevice() as device:
            torch.manual_seed(0)
            chosen = make_model(device) if model is None else model().to(device.torch_device)
            engine = Engine(chosen, make(list(chosen.parameters())), loss, plan=plan, device=device)
            for _ in engine.steps(data(16)):
                after_each(engine)
            assert engine.last_result is not None
            found.append((engine.last_result.losses, weights(engine)))
            report = engine.graphs
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    assert report is not None
    assert (report.why is None) if why is None else (why in str(report.why))
    assert (report.replays > 0) is (why is None or "memory" in why)


class Sparse(nn.Module):
    """Has a sparse buffer, which no graph can use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(3).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_pytorchs_settings_change_during_an_epoch(capturing: Device) -> None:
    def ramped(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return (out.float() * torch.linspace(0, 1, 3, device=batch[0].device)).square().mean()

    found = []
    for plan in (Plan.preset("pipeline"), GRAPH):
        model = make_model(capturing)
        engine = Engine(model, adamw(model.parameters()), ramped, plan=plan, device=capturing)
        kind = capturing.torch_device.type
        autocast = torch.autocast(kind, torch.bfloat16, cache_enabled=False)
        torch.manual_seed(5)
        try:
            for progress in engine.steps(data(20)):
                if progress.batch == 5:
                    autocast.__enter__()
                elif progress.batch == 10:
                    autocast.__exit__(None, None, None)
                    torch.set_default_dtype(torch.float64)
                elif progress.batch == 15:
                    torch.set_default_dtype(torch.float32)
        finally:
            torch.set_default_dtype(torch.float32)
        assert engine.last_result is not None
        found.append((engine.last_result.losses, weights(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    assert engine.graphs is not None
    assert (engine.graphs.why, engine.graphs.captures) == (None, 3)


@pytest.mark.parametrize("by", ["torch.backends", "matmul", "conv"])
def test_float32_precisions_that_are_set_by_backend(capturing: Device, by: str) -> None:
    """PyTorch's older functions raise then."""
    owner: Any = {
        "torch.backends": torch.backends,
        "matmul": torch.backends.cuda.matmul,
        "conv": torch.backends.cudnn.conv,
    }[by]
    before = owner.fp32_precision
    model = make_model(capturing)
    engine = Engine(model, adamw(model.parameters()), loss, plan=GRAPH, device=capturing)
    try:
        for progress in engine.steps(data(12)):
            if progress.batch == 5:
                owner.fp32_precision = "ieee" if before != "ieee" else "tf32"
    finally:
        owner.fp32_precision = before
    assert engine.graphs is not None
    assert (engine.graphs.why, engine.graphs.captures) == (None, 2)


class WithoutViews(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.view_as:
            raise NotImplementedError
        return super().__torch_function__(function, types, args, kwargs or {})


def test_an_engine_is_made_where_autograd_shows_no_nodes(capturing: Device) -> None:
    """In inference mode, with lazy modules, and with tensors without views."""
    model = make_model(capturing)
    with torch.inference_mode():
        Engine(model, adamw(model.parameters()), loss, plan=GRAPH, device=capturing).close()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(WithoutViews))
    model.append(nn.LazyLinear(2, device=capturing.torch_device))
    state = StepState(capturing, loss, (model,), ())
    assert state_obstacle(state) is None
