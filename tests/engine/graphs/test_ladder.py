"""The ladder: whole step, parts, children, eager. Each is used where the one above cannot be, all
train the same, and `graphs="auto"` keeps the one that is faster."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headrace.device import Device
from headrace.engine import Engine
from headrace.engine.loss.compiled import CompiledLoss
from headrace.fake import Costs, FakeDevice
from headrace.plan import Plan
from support.training.engines import data, loss, make_engine, make_model, same, weights

GRAPH = Plan.preset("graph")
AUTO = Plan.preset("auto")
#: Launching a kernel takes longer than running it, as in small models; and the other way round.
LAUNCH_BOUND, BUSY = Costs(kernel_us=2, launch_us=30), Costs(kernel_us=20, launch_us=0)


class Picky(nn.Module):
    """A block whose host reads a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


def layers(*sizes: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for _ in range(4):
        made += [nn.Linear(sizes[0], sizes[0]), nn.Tanh()]
    return nn.Sequential(*made, nn.Linear(*sizes), nn.Dropout(0.1))


class Divided(nn.Module):
    """Two large blocks with a choice of the host between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.picky, self.decoder = layers(8, 16), Picky(), layers(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.decoder(self.picky(self.encoder(x)))
        return found


def reads_back(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that the host reads: the whole step is no graph, its parts are."""
    found = loss(model, batch)
    found.item()
    return found


def divided(device: Device, plan: Any, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = Divided().to(device.torch_device)
    return make_engine(device, plan, model=model, **options)


def picky_only(device: Device, plan: Any, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), Picky()).to(device.torch_device)
    return make_engine(device, plan, model=model, **options)


Made = Callable[..., Engine]
RUNGS: dict[str, tuple[Made, dict[str, Any]]] = {
    "whole step": (make_engine, {}),
    "parts": (make_engine, {"loss": reads_back}),
    "children": (divided, {}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping, ema": {"clip_norm": 0.1, "ema_decay": 0.9},
    "accumulation": {"accumulate": 3},
    "fp16": {"precision": "fp16"},
    "skips": {"on_nonfinite": "skip"},
}


def trained(made: Made, plan: Any, device: Device, **options: Any) -> tuple[Any, Any, Engine]:
    engine = made(device, plan, deterministic=True, **options)
    found = [engine.epoch(batches).losses for batches in (data(9), data(5, rows=3), data(6))]
    return found, weights(engine), engine


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rung", ["parts", "children"])  # the rest is in test_step_graphs.py
def test_every_rung_trains_the_same(capturing: Device, rung: str, name: str) -> None:
    made, options = RUNGS[rung]
    options = {**options, **OPTIONS[name]}
    plain = trained(made, "pipeline", capturing, **options)
    captured = trained(made, GRAPH.replace(graph_after=1), capturing, **options)
    assert captured[0] == plain[0]
    assert same(captured[1], plain[1])
    report = captured[2].graphs
    assert report is not None
    assert report.way == rung
    assert report.why is not None
    captured[2].close()


def test_the_report_says_which_rung_and_why_not_the_one_above(capturing: Device) -> None:
    engine = divided(capturing, GRAPH)
    engine.epoch(data(12))
    text = str(engine.graphs)
    assert text.startswith("steps run as: children")
    assert "not captured, because the host waits for the device" in text
    assert "Divided.encoder: " in text
    engine.close()


def test_where_nothing_can_be_captured_the_update_is(capturing: Device) -> None:
    engine = picky_only(capturing, GRAPH)
    engine.epoch(data(12))
    assert engine.graphs is not None
    assert engine.graphs.parts is not None
    kinds = {part.name: part.replays for part in engine.graphs.parts.parts}
    assert kinds["Sequential"] == 0


def test_the_model_is_left_as_it_was(capturing: Device) -> None:
    engine = make_engine(capturing, GRAPH, loss=reads_back)
    engine.epoch(data(12))
    model = engine.model
    assert "forward" in vars(model)
    engine.close()
    assert "forward" not in vars(model)
    engine.epoch(data(12))
    assert "forward" in vars(model)
    del engine
    assert "forward" not in vars(model)


class TestAuto:
    @pytest.mark.parametrize("rung", RUNGS)
    def test_a_rung_that_is_faster_is_kept(
        self, rung: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        made, options = RUNGS[rung]
        with caplog.at_level(logging.INFO, logger="headrace"):
            found = self.both(LAUNCH_BOUND, made, options)
        assert found.way == rung
        assert found.decision is not None
        assert found.decision.endswith(": graphs are used")
        assert f"plan auto: {found.decision}" in caplog.text
        assert not [
            one
            for one in caplog.records
            if "not captured" in one.message and one.levelno > logging.INFO
        ]

    @pytest.mark.parametrize("rung", RUNGS)
    def test_a_rung_that_is_not_faster_is_dropped(self, rung: str) -> None:
        made, options = RUNGS[rung]
        found = self.both(BUSY, made, options)
        assert (found.way, found.shapes, found.memory_bytes) == ("eager", 0, 0)
        assert found.decision is not None
        assert found.decision.endswith("no graphs are used")
        assert found.parts is None

    def both(self, costs: Costs, made: Made, options: dict[str, Any]) -> Any:
        """Train under `pipeline` and `auto`, compare, and return the report of the latter."""
        found = []
        for plan in ("pipeline", AUTO):
            with FakeDevice(costs=costs) as device:
                engine = made(device, plan, **options)
                found.append(engine.epoch(data(62)).losses)
                report = engine.graphs
                engine.close()
        assert found[0] == found[1]
        return report

    def test_an_optimizer_that_would_round_is_left_out(self) -> None:
        """The parts do without it, so the bits are those of the plain loop."""
        found = []
        for plan in ("pipeline", AUTO):
            with FakeDevice(costs=LAUNCH_BOUND) as device:
                model = make_model(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                engine = Engine(model, optimizer, loss, plan=plan, device=device)
                found.append((engine.epoch(data(60)).losses, weights(engine)))
                report = engine.graphs
                engine.close()
        assert found[0][0] == found[1][0]
        assert same(found[0][1], found[1][1])
        assert report is not None
        assert report.way == "parts"
        assert "AdamW is not fused" in str(report.why)
        assert report.rounding is None

    @pytest.mark.parametrize(("peak", "fits"), [(1 << 40, False), (0, True)])
    def test_a_graph_that_would_not_fit_is_not_captured(
        self, peak: int, fits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with FakeDevice(costs=LAUNCH_BOUND) as device:
            engine = make_engine(device, AUTO)
            engine.epoch(data(2))
            memory = device.memory()
            figures = replace(memory, peak_allocated=max(peak, memory.peak_allocated))
            monkeypatch.setattr(device, "memory", lambda: figures)
            engine.epoch(data(4))
            assert engine.graphs is not None
            assert (engine.graphs.captures == 1) is fits
            assert fits or "GB are free" in str(engine.graphs.why)

    @pytest.mark.parametrize("costs", [LAUNCH_BOUND, BUSY])
    @pytest.mark.parametrize("rung", RUNGS)
    def test_a_run_that_is_resumed_does_not_search_again(self, rung: str, costs: Costs) -> None:
        made, options = RUNGS[rung]
        with FakeDevice(costs=costs) as device:
            first = made(device, AUTO, **options)
            first.epoch(data(60))
            stored = copy.deepcopy(first.state_dict())
            expected = first.epoch(data(12)).losses
            decided = first.graphs
            first.close()
            second = made(device, AUTO, **options)
            second.load_state_dict(stored)
            result = second.epoch(data(12))
            assert result.losses == expected
            assert result.waits["auto"].count == 0
            assert second.graphs is not None
            assert decided is not None
            assert (second.graphs.decision, second.graphs.way) == (decided.decision, decided.way)
            second.close()

    @pytest.mark.parametrize("reads", [False, True])
    def test_code_that_asks_whether_it_is_captured_gets_the_same_answer(self, reads: bool) -> None:
        """It may choose another kernel then, and the bits of a resumed run would differ."""

        class Asks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                is_captured = torch.cuda.is_current_stream_capturing()
                out: torch.Tensor = self.layer(x)
                return out * (1.0 + 1e-3 * is_captured)

        def made(device: Device) -> Engine:
            torch.manual_seed(0)
            model = Asks().to(device.torch_device)
            return make_engine(device, AUTO, model=model, loss=reads_back if reads else loss)

        with FakeDevice(costs=LAUNCH_BOUND) as device:
            first = made(device)
            first.epoch(data(60))
            assert first.graphs is not None
            assert first.graphs.way == ("parts" if reads else "whole step")
            stored = copy.deepcopy(first.state_dict())
            expected = first.epoch(data(6)).losses
            first.close()
            second = made(device)
            second.load_state_dict(stored)
            assert second.epoch(data(6)).losses == expected
            second.close()


class TestCompiled:
    """Under `max` the parts of a compiled step run uncompiled, so they must be faster."""

    @pytest.fixture(autouse=True)
    def compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is compiled is as it was, and refuses a model that is not."""

        def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
            def compiled(model: nn.Module, *inputs: Any) -> Any:
                assert not any("forward" in vars(one) for one in model.modules())
                return function(model, *inputs)

            return compiled

        def call(self: CompiledLoss, model: Any, *inputs: Any) -> Any:
            monkeypatch.setattr(self, "_ran_compiled", True)
            return self._compiled(model, *inputs)

        monkeypatch.setattr(torch, "compile", compile_)
        monkeypatch.setattr(CompiledLoss, "_call_or_fall_back", call)
        monkeypatch.setattr(FakeDevice, "compiles", True)

    @pytest.mark.parametrize("costs", [LAUNCH_BOUND, BUSY])
    @pytest.mark.parametrize("rung", ["parts", "children"])
    def test_what_is_faster_stays_also_in_a_resumed_run(self, rung: str, costs: Costs) -> None:
        made, options = RUNGS[rung]
        with FakeDevice() as device:
            expected = made(device, "pipeline", **options).epoch(data(82)).losses
        with FakeDevice(costs=costs) as device:
            first = made(device, "max", **options)
            losses = list(first.epoch(data(70)).losses)
            stored = copy.deepcopy(first.state_dict())
            decided = first.graphs
            assert decided is not None
            assert first.compiled is not None
            pays = costs is LAUNCH_BOUND
            assert decided.way == (rung if pays else "eager")
            assert str(decided.decision).endswith("no graphs are used") is not pays
            assert first.compiled.compiled is not pays
            first.close()
            second = made(device, "max", **options)
            second.load_state_dict(stored)
            result = second.epoch(data(82)[70:])
            assert result.waits["auto"].count == 0
            assert second.graphs is not None
            assert (second.graphs.decision, second.graphs.way) == (decided.decision, decided.way)
            second.close()
        assert [*losses, *result.losses] == pytest.approx(list(expected))

    def test_a_step_of_which_no_part_can_be_captured_stays_compiled(self) -> None:
        with FakeDevice(costs=LAUNCH_BOUND) as device:
            model = nn.Sequential(nn.Linear(8, 3), Picky()).to(device.torch_device)
            optimizer = torch.optim.Adagrad(model.parameters())
            engine = Engine(model, optimizer, loss, plan="max", device=device)
            engine.epoch(data(20))
            assert engine.compiled is not None
            assert engine.compiled.compiled
            assert engine.graphs is not None
            assert engine.graphs.decision == "no part of the step can be captured"
            assert "forward" not in vars(model)
            engine.close()
