"""The graph plan: the same losses as without graphs, and what happens if a step has no graph."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.data import Cursor, Fetched
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.engine.graphs.step_graphs import StepGraphs
from headrace.engine.loss.compiled import CompiledLoss, CompileReport
from headrace.engine.loss.forward import Forward
from headrace.engine.step.eager import EagerStep
from headrace.engine.streams.lanes import Lanes
from headrace.engine.update.schedules import Schedule
from headrace.fake import Costs, FakeDevice
from headrace.parallel import Ranks
from headrace.plan import Plan
from support.training.devices import needs_cuda
from support.training.engines import data, loss, make_engine, make_model, same, weights

GRAPH = Plan.preset("graph")


def ragged(count: int = 40) -> list[Any]:
    """Batches of three sizes in random order, and one of a size that comes once."""
    generator = torch.Generator().manual_seed(3)
    sizes = [int(torch.randint(3, 6, (1,), generator=generator)) for _ in range(count)]
    sizes[count // 2] = 11
    return [
        (
            torch.randn(size, 8, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def weighted(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": loss(model, batch), "weight": (batch[1] > 0).sum(), "rows": batch[1].numel()}


Made = Callable[[Device, Any], Engine]


def with_schedule(device: Device, plan: Any) -> Engine:
    model = make_model(device)
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.02},
            {"params": model[3].parameters(), "weight_decay": 0.0},
        ],
        lr=0.01,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [0.05, 0.02], total_steps=200, cycle_momentum=False
    )
    return Engine(
        model, optimizer, loss, plan=plan, device=device, scheduler=schedule, deterministic=True
    )


def with_batch_norm(device: Device, plan: Any) -> Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 3),
    ).to(device.torch_device)
    return make_engine(device, plan, model=model, deterministic=True)


def with_frozen(device: Device, plan: Any) -> Engine:
    model = make_model(device)
    model[0].weight.requires_grad_(False)
    return make_engine(device, plan, model=model, deterministic=True)


def with_sgd(device: Device, plan: Any) -> Engine:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Engine(model, optimizer, loss, plan=plan, device=device, deterministic=True)


def options(**chosen: Any) -> Made:
    return lambda device, plan: make_engine(device, plan, deterministic=True, **chosen)


MAKERS: dict[str, Made] = {
    "plain": options(),
    "clipping": options(clip_norm=0.1),
    "accumulation": options(accumulate=3, loss=weighted),
    "accumulation, clipping, ema": options(accumulate=4, clip_norm=0.1, ema_decay=0.9),
    "ema": options(ema_decay=0.9),
    "bf16": options(precision="bf16"),
    "fp16": options(precision="fp16", clip_norm=1.0),
    "fp16, accumulation": options(precision="fp16", accumulate=2),
    "weights": options(loss=weighted),
    "schedule": with_schedule,
    "batch norm": with_batch_norm,
    "frozen": with_frozen,
    "sgd": with_sgd,
}


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "clip_norm": 1.0}])
@pytest.mark.parametrize("name", ["interval", "event"])
def test_plans_with_streams_of_their_own(
    capturing: Device, name: str, options: dict[str, Any]
) -> None:
    """Replays run on the plan's own stream, which waits for the batches' copies."""
    found = []
    for graphs in ("off", "on"):
        plan = Plan.preset(name).replace(graphs=graphs, graph_after=1)
        engine = make_engine(capturing, plan, **options)
        torch.manual_seed(5)
        found.append([engine.epoch(data()).losses, engine.epoch(ragged()).losses])
        report = engine.graphs
        engine.close()
    assert found[0] == found[1]
    assert report is not None
    assert report.replays > 30


@pytest.mark.parametrize("shapes", ["one shape", "ragged"])
@pytest.mark.parametrize("name", MAKERS)
class TestSameLosses:
    def test_as_without_graphs_bit_for_bit(
        self,
        capturing: Device,
        name: str,
        shapes: str,
    ) -> None:
        if name.startswith("fp16") and isinstance(capturing, FakeDevice):
            pytest.skip("the CPU has no fp16 gradient scaling that stays on the device")
        batches = data(24) if shapes == "one shape" else ragged(24)
        found = []
        for plan in ("pipeline", GRAPH.replace(graph_after=1)):
            engine = MAKERS[name](capturing, plan)
            torch.manual_seed(5)
            results = [engine.epoch(batches) for _ in range(3)]
            report = engine.graphs
            averages = [] if engine.ema is None else [a.cpu() for a in engine.ema.averages]
            losses = [result.losses for result in results]
            means = [(result.mean_loss, result.metrics) for result in results]
            found.append((losses, means, weights(engine) + averages))
            drawn = capturing.random_state()
            found[-1] += (drawn,)
            engine.close()
        assert report is not None
        assert report.why is None
        # The shape that comes once per epoch may never begin a group.
        expected = {1} if shapes == "one shape" else {3, 4} if "accumulation" in name else {4}
        assert report.shapes in expected
        assert report.replays + report.one_by_one == 72
        # With accumulation a shape is captured only when it begins a group.
        assert report.replays >= (35 if "accumulation" in name else 45)
        assert found[0][:2] == found[1][:2]
        assert same(found[0][2], found[1][2])
        assert torch.equal(found[0][3], found[1][3])  # both drew the same number of random numbers


def waits_for_its_own_value(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    value = loss(model, batch)
    if value.item() > 1e9:  # the message must name this line
        raise ArithmeticError
    return value


LINE_OF_ITEM = waits_for_its_own_value.__code__.co_firstlineno + 2


class FailsInCapture(torch.nn.Module):
    """Waits for the device, but only during a capture: watching cannot find that before."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.is_captured = inner, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.is_captured:
            y.sum().item()
        return y


class TestFallback:
    def run(
        self, device: Device, make: Callable[[Any], Engine], caplog: pytest.LogCaptureFixture
    ) -> str:
        """Train under both plans. Losses are equal, also in the 40 steps after the failure.
        Returns why nothing was captured, which the log must say exactly once."""
        batches = data(50)
        expected = make("pipeline")
        torch.manual_seed(5)
        losses = expected.epoch(batches).losses
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="headrace"):
            engine = make("graph")
            torch.manual_seed(5)
            found = engine.epoch(batches).losses
        assert found == losses
        assert same(weights(engine), weights(expected))
        report = engine.graphs
        assert report is not None
        assert report.why is not None
        assert (report.shapes, report.memory_bytes) == (0, 0)
        said = [
            record.getMessage() for record in caplog.records if "as a graph" in record.getMessage()
        ]
        assert len(said) == 1
        assert report.why in said[0]
        return report.why

    def test_a_model_that_reads_values_back(
        self,
        capturing: Device,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        why = self.run(
            capturing,
            lambda plan: make_engine(
                capturing, plan, loss=waits_for_its_own_value, deterministic=True
            ),
            caplog,
        )
        assert f"{__file__}:{LINE_OF_ITEM}" in why

    def test_a_capture_that_fails(
        self,
        capturing: Device,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        models: list[FailsInCapture] = []
        capture = capturing.capture

        def capture_and_tell_model(*args: Any, **options: Any) -> Any:
            models[-1].is_captured = True
            try:
                return capture(*args, **options)
            finally:
                models[-1].is_captured = False

        def make(plan: Any) -> Engine:
            models.append(FailsInCapture(make_model(capturing)))
            return make_engine(capturing, plan, model=models[-1], deterministic=True)

        monkeypatch.setattr(capturing, "capture", capture_and_tell_model)
        why = self.run(capturing, make, caplog)
        assert __file__ in why
        assert why.startswith("the capture failed with ")

    def test_an_optimizer_that_counts_on_the_host(
        self,
        capturing: Device,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def make(plan: Any) -> Engine:
            model = make_model(capturing)
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)
            return Engine(model, optimizer, loss, plan=plan, device=capturing, deterministic=True)

        assert self.run(capturing, make, caplog).startswith("Adagrad may count its steps")

    def test_a_hook_that_would_not_run(
        self,
        capturing: Device,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        seen: list[int] = []

        def count(*_: Any) -> None:
            seen.append(1)

        def make(plan: Any) -> Engine:
            model = make_model(capturing)
            model[0].register_forward_hook(count)
            return make_engine(capturing, plan, model=model, deterministic=True)

        why = self.run(capturing, make, caplog)
        assert "a hook of module '0' would not run" in why
        assert f"{__file__}:{count.__code__.co_firstlineno}" in why
        assert len(seen) == 100

    def test_a_setting_that_changes_every_step(
        self,
        capturing: Device,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def make(plan: Any) -> Engine:
            engine = make_engine(capturing, plan, deterministic=True)
            assert engine._builder.parts is not None
            optimizer = engine._builder.parts.optimizer
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=300)
            engine._builder.schedule = Schedule(cycle, "step")
            return engine

        assert "the optimizer's betas changes from step to step" in self.run(
            capturing, make, caplog
        )

    def test_values_that_change_from_batch_to_batch(
        self,
        capturing: Device,
    ) -> None:
        """A number in a batch is part of its signature: a graph must not repeat another batch's."""
        batches = [(*batch, number) for number, batch in enumerate(data(20))]

        def scaled(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return loss(model, batch[:2]) * batch[2]

        found = [
            make_engine(capturing, plan, loss=scaled, deterministic=True).epoch(batches).losses
            for plan in ("pipeline", "graph")
        ]
        assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestHostRandomNumbers:
    def test_a_loss_that_draws_on_the_host_is_not_captured(self) -> None:
        device = open_device("cuda")

        def dropped(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return loss(model, batch) * (1 + float(torch.rand(1) > 0.5))

        engine = make_engine(device, "graph", loss=dropped)
        engine.epoch(data(10))
        assert engine.graphs is not None
        assert engine.graphs.why is not None
        assert "random numbers from torch's CPU generator" in engine.graphs.why


class TestBetweenEpochs:
    """The next epoch follows what a user changes between epochs."""

    def both(self, device: Device, between: Callable[[Engine], object]) -> Engine:
        found = []
        for plan in ("pipeline", "graph"):
            engine = make_engine(device, plan, deterministic=True)
            torch.manual_seed(5)
            first = engine.epoch(data(12)).losses
            between(engine)
            second = engine.epoch(data(12)).losses
            found.append((first, second, weights(engine)))
        assert found[0][:2] == found[1][:2]
        assert same(found[0][2], found[1][2])
        assert engine.graphs is not None
        assert engine.graphs.why is None
        assert engine.graphs.replays >= 9
        return engine

    def test_evaluation(self, capturing: Device) -> None:
        self.both(capturing, lambda engine: engine.evaluate(data(4)))

    def test_another_learning_rate(self, capturing: Device) -> None:
        def slower(engine: Engine) -> None:
            assert engine._builder.parts is not None
            engine._builder.parts.optimizer.param_groups[0]["lr"] = 0.001

        self.both(capturing, slower)

    def test_another_weight_decay(self, capturing: Device) -> None:
        def heavier(engine: Engine) -> None:
            assert engine._builder.parts is not None
            engine._builder.parts.optimizer.param_groups[0]["weight_decay"] = 0.5

        assert self.both(capturing, heavier).graphs.captures == 2  # type: ignore[union-attr]

    def test_a_checkpoint_is_loaded(self, capturing: Device) -> None:
        def reload(engine: Engine) -> None:
            assert engine._builder.parts is not None
            optimizer = engine._builder.parts.optimizer
            optimizer.load_state_dict(optimizer.state_dict())

        self.both(capturing, reload)

    def test_a_parameter_is_frozen(self, capturing: Device) -> None:
        self.both(capturing, lambda engine: engine.model[0].weight.requires_grad_(False))  # type: ignore[index]

    def test_another_batch_size(self, capturing: Device) -> None:
        self.both(capturing, lambda engine: engine.epoch(data(12, rows=7)))

    def test_another_plan_and_back(self, capturing: Device) -> None:
        def change(engine: Engine) -> None:
            chosen = engine.plan
            engine.use_plan("event")
            engine.epoch(data(6))
            engine.use_plan(chosen)

        self.both(capturing, change)

    def test_a_failed_epoch(self, capturing: Device) -> None:
        def fail(engine: Engine) -> None:
            def broken() -> Any:
                yield from data(5)
                raise OSError("the disk is gone")

            with pytest.raises(OSError, match="the disk is gone"):
                engine.epoch(broken())

        self.both(capturing, fail)

    def test_memory_is_freed_on_close(self, capturing: Device) -> None:
        engine = make_engine(capturing, "graph")
        engine.epoch(data(6))
        engine.close()
        gc.collect()  # free what earlier tests left
        capturing.release_unused()
        before = capturing.memory().reserved
        engine.epoch(data(6))
        assert engine.graphs is not None
        assert engine.graphs.shapes == 1
        assert engine.graphs.memory_bytes > 0
        engine.close()
        assert engine.graphs.memory_bytes == 0
        capturing.release_unused()
        assert capturing.memory().reserved == before


def test_a_cpu_has_no_graphs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    device = open_device("cpu")
    device._warned.clear()
    engine = make_engine(device, "graph")
    assert engine.graphs is None
    assert "cpu captures no graphs" in caplog.text


class TestClock:
    def test_a_graph_is_launched_once(self) -> None:
        """At 30 µs per kernel launch, the host limits an eager step; the device limits a graph."""

        def ms_a_step(plan: Any) -> float:
            with FakeDevice(costs=Costs(kernel_us=2, launch_us=30, copy_us=1)) as device:
                engine = make_engine(device, plan)
                engine.epoch(data(10))
                start = device.now_ms
                engine.epoch(data(40))
                device.synchronize("test")
                return (device.now_ms - start) / 40

        assert ms_a_step(Plan.preset("graph").replace(recheck=0)) < ms_a_step("pipeline") / 3


@pytest.mark.parametrize("device_name", [needs_cuda])
class TestMax:
    def test_within_a_tolerance_of_eager(self, device_name: str) -> None:
        device = open_device(device_name)
        found = []
        for plan in ("pipeline", "max"):
            engine = make_engine(device, plan, model=make_model(device, dropout=0.0))
            found.append(engine.epoch(data(20)).losses)
        assert engine.graphs is not None
        assert engine.graphs.why is None
        # After one step that compiles and two that are watched; one is checked again.
        assert (engine.graphs.replays, engine.graphs.rechecks) == (16, 1)
        assert found[1] == pytest.approx(found[0], rel=1e-4)

    def test_a_step_that_cannot_be_compiled_runs_uncompiled(
        self, device_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        device = open_device(device_name)
        engine = make_engine(device, "max", model=make_model(device, dropout=0.0))
        assert engine._builder.parts is not None

        def broken(*_: Any) -> Any:
            raise torch._dynamo.exc.InternalTorchDynamoError("broken on purpose")

        engine._builder.parts.forward.loss._compiled = broken  # type: ignore[attr-defined]
        expected = make_engine(device, "pipeline", model=make_model(device, dropout=0.0))
        assert engine.epoch(data(20)).losses == expected.epoch(data(20)).losses
        assert "the step is not compiled and runs as it is" in caplog.text
        assert engine.graphs is not None
        # After one step that compiles and two that are watched; one is checked again.
        assert (engine.graphs.replays, engine.graphs.rechecks) == (16, 1)


class NcclRanks(Ranks):
    """One rank whose gradients are averaged on the device, as with NCCL."""

    uses_nccl = True


def test_ddp_is_watched_after_its_first_steps(
    fake_device: FakeDevice,
) -> None:
    """DDP copies from the host in its second step, when it rebuilds its buckets, and never again.
    That must not prevent a graph."""
    model = make_model(fake_device)
    calls = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    class CopiesOnce(Forward):
        def __call__(self, batch: Any, *, averages: bool = True) -> Any:
            calls.append(1)
            if len(calls) == 2:
                torch.zeros(()).to(fake_device.torch_device)
            return super().__call__(batch)

    engine = Engine(model, optimizer, loss, plan="baseline", device=fake_device)
    assert engine._builder.parts is not None
    forward = CopiesOnce(
        *(fake_device, model, optimizer, loss),
        user_loss=loss,
        precision=None,
        distributed=False,
        carry=None,
    )
    parts = replace(engine._builder.parts, forward=forward, parallelism="ddp", ranks=NcclRanks())
    graphs = StepGraphs(parts, GRAPH)
    batch = tuple(part.to(fake_device.torch_device) for part in data(1)[0])
    fetched = Fetched(0, batch, nbytes=0, samples=1, cursor=Cursor(1))
    eager = EagerStep(parts, Lanes(fake_device, GRAPH, split=False))
    replayed = [graphs.train(fetched, eager).replayed for _ in range(20)]
    assert graphs.report().why is None
    assert replayed[-1]


def test_a_compiled_step_is_checked_by_its_own_guards(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trace is compared: run as it was written, it would round otherwise."""
    model = make_model(fake_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    engine = Engine(model, optimizer, loss, plan="baseline", device=fake_device)
    assert engine._builder.parts is not None
    compiled = CompiledLoss(loss, fake_device)
    monkeypatch.setattr(compiled, "_compiled", loss)  # what PyTorch would return
    forward = Forward(
        *(fake_device, model, optimizer, compiled),
        user_loss=loss,
        precision=None,
        distributed=False,
        carry=None,
    )
    parts = replace(engine._builder.parts, forward=forward)
    graphs = StepGraphs(parts, Plan.preset("graph").replace(recheck=5))
    batch = tuple(part.to(fake_device.torch_device) for part in data(1)[0])
    fetched = Fetched(0, batch, nbytes=0, samples=1, cursor=Cursor(1))
    eager = EagerStep(parts, Lanes(fake_device, GRAPH, split=False))
    for _ in range(10):
        graphs.train(fetched, eager)
    assert (graphs.report().rechecks, graphs.report().differed) == (1, None)
    counts = iter(range(9))
    monkeypatch.setattr(compiled, "report", lambda: CompileReport(True, compilations=next(counts)))
    for _ in range(5):
        graphs.train(fetched, eager)
    assert "PyTorch compiled it again" in str(graphs.report().differed)
