"""The engine: every plan gives the same losses, each exactly once, with its own host waits."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from headrace.device import Device
from headrace.engine import Engine, Progress, device_choice
from headrace.errors import PlanError, StepError
from headrace.fake import Costs, FakeDevice
from headrace.plan import PRESETS, Plan
from support.training.engines import (
    EAGER,
    data,
    loss,
    make_engine,
    make_model,
    plain_loop,
    same,
    weights,
)


class TestDevice:
    def test_a_model_that_was_left_on_the_cpu_is_said_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def make(**options: Any) -> None:
            model = torch.nn.Linear(2, 1)
            Engine(model, torch.optim.SGD(model.parameters()), loss, **options)

        device_choice._warn_of_cpu.cache_clear()
        monkeypatch.setattr(device_choice, "available_devices", lambda: ["cpu"])
        make()
        monkeypatch.setattr(device_choice, "available_devices", lambda: ["cuda:0", "cpu"])
        make(device="cpu")
        assert not caplog.records
        make()
        make()
        (said,) = caplog.records
        assert said.getMessage() == (
            "the model is on the CPU, so the engine trains there, and this machine has cuda:0: "
            "call model.to('cuda') before you create the optimizer, or pass device='cpu' to the "
            "engine if you want the CPU"
        )
        device_choice._warn_of_cpu.cache_clear()


class TestSameLosses:
    @pytest.mark.parametrize("plan", list(PRESETS))
    def test_as_the_plain_loop_bit_for_bit(self, device: Device, plan: str) -> None:
        if plan == "max" and device.torch_device.type == "cuda":
            pytest.skip("max runs other kernels, which another test compares within a tolerance")
        expected, final = plain_loop(device, data(), epochs=2)
        engine = make_engine(device, plan, deterministic=True)
        found = [*engine.epoch(data()).losses, *engine.epoch(data()).losses]
        assert found == expected
        assert same(weights(engine), final)

    @pytest.mark.parametrize("streams", [3, 4, 8])
    def test_with_any_number_of_streams(self, device: Device, streams: int) -> None:
        expected, final = plain_loop(device, data())
        engine = make_engine(device, Plan.preset("streams4").replace(streams=streams))
        assert list(engine.epoch(data()).losses) == expected
        assert same(weights(engine), final)

    @pytest.mark.parametrize("plan", EAGER)
    def test_with_everything_on(self, device: Device, plan: str) -> None:
        """Schedule, clipping, accumulation with a partial group, EMA, weights, bf16."""

        def run(name: str) -> tuple[Any, ...]:
            model = make_model(device)
            optimizer = torch.optim.AdamW(
                [
                    {"params": model[0].parameters(), "lr": 0.02},
                    {"params": model[3].parameters(), "weight_decay": 0.0},
                ],
                lr=0.01,
                fused=True,
            )
            engine = Engine(
                model,
                optimizer,
                lambda m, b: {"loss": loss(m, b), "weight": (b[1] > 0).sum(), "n": b[1].numel()},
                plan=name,
                device=device,
                scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                clip_norm=0.5,
                accumulate=4,
                precision="bf16",
                ema_decay=0.9,
            )
            result = engine.epoch(data())
            assert engine.ema is not None
            averages = [average.cpu() for average in engine.ema.averages]
            return result.losses, result.mean_loss, result.metrics, weights(engine), averages

        expected, found = run("baseline"), run(plan)
        assert found[:3] == expected[:3]
        assert same(found[3], expected[3])
        assert same(found[4], expected[4])

    @pytest.mark.unsanitized
    def test_pinned_batches_of_a_data_loader(self, device: Device) -> None:
        features = torch.cat([batch[0] for batch in data()])
        labels = torch.cat([batch[1] for batch in data()])
        loader = DataLoader(
            TensorDataset(features, labels),
            batch_size=4,
            num_workers=2,
            pin_memory=device.torch_device.type == "cuda",
        )
        results = [
            make_engine(device, plan).epoch(loader).losses for plan in ("baseline", "pipeline")
        ]
        assert len(results[0]) == math.ceil(len(features) / 4)
        assert results[0] == results[1]

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        count=st.integers(0, 25),
        plan=st.sampled_from(EAGER),
        accumulate=st.integers(1, 5),
        depth=st.integers(0, 4),
        every=st.integers(1, 12),
        fails_after=st.none() | st.integers(0, 25),
        fails_in=st.sampled_from(["loader", "loss"]),
    )
    def test_each_batch_counts_exactly_once_however_the_loop_ends(
        self,
        count: int,
        plan: str,
        accumulate: int,
        depth: int,
        every: int,
        fails_after: int | None,
        fails_in: str,
    ) -> None:
        batches = data(count, rows=2)

        def loader() -> Iterator[Any]:
            for index, batch in enumerate(batches):
                if index == fails_after and fails_in == "loader":
                    raise OSError("the disk is gone")
                yield batch

        def run(device: Device, chosen: Plan) -> tuple[Any, Any]:
            seen: list[int] = []

            def fragile(model: torch.nn.Module, batch: Any) -> torch.Tensor:
                seen.append(len(seen))
                if seen[-1] == fails_after and fails_in == "loss":
                    raise OSError("the loss is gone")
                return loss(model, batch)

            engine = make_engine(device, chosen, accumulate=accumulate, loss=fragile)
            with contextlib.suppress(OSError):
                engine.epoch(loader())
            result = engine.last_result
            assert result is not None
            return (result.losses, result.statistics.updates), weights(engine)

        chosen = Plan.preset(plan).replace(
            prefetch_depth=depth, sync_every=every, deferred_every=every
        )
        expected, expected_weights = run(hr.open_device("cpu"), Plan.preset("baseline"))
        with FakeDevice() as device:
            found, found_weights = run(device, chosen)
        assert found == expected
        assert same(found_weights, expected_weights)
        trained = min(count, fails_after) if fails_after is not None else count
        assert len(found[0]) == trained
        assert found[1] == math.ceil(trained / accumulate)


class TestWeights:
    def test_means_over_unequal_batches(self, device: Device) -> None:
        batches = [*data(3, rows=6), *data(1, rows=2)]
        engine = make_engine(
            device,
            loss=lambda m, b: {
                "loss": loss(m, b),
                "weight": b[1].numel(),
                "right": (m(b[0]).argmax(-1) == b[1]).float().mean(),
            },
            model=make_model(device, dropout=0.0),
        )
        result = engine.epoch(batches)
        shares = [6, 6, 6, 2]
        expected = sum(x * w for x, w in zip(result.losses, shares, strict=True)) / 20
        assert result.mean_loss == pytest.approx(expected)
        assert result.weights == (6.0, 6.0, 6.0, 2.0)
        assert 0 <= result.metrics["right"] <= 1
        assert result.statistics.weight_per_s is not None

    @pytest.mark.parametrize("on_device", [False, True])
    def test_accumulation_is_one_large_batch(self, device: Device, on_device: bool) -> None:
        whole = data(1, rows=12)[0]
        parts = [tuple(part[low:high] for part in whole) for low, high in ((0, 5), (5, 9), (9, 12))]

        def weighted(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
            count: Any = batch[1].numel()
            if on_device:
                count = torch.full((), count, device=device.torch_device)
            return {"loss": loss(model, batch), "weight": count}

        finals = []
        for batches, accumulate in (([whole], 1), (parts, 3), (parts, 5)):
            model = make_model(device, dropout=0.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            engine = Engine(model, optimizer, weighted, device=device, accumulate=accumulate)
            assert engine.epoch(batches).statistics.updates == 1
            finals.append(weights(engine))
        for final in finals[1:]:
            for one, two in zip(finals[0], final, strict=True):
                torch.testing.assert_close(one, two)

    def test_a_group_of_no_weight_changes_nothing(self, device: Device) -> None:
        for nothing in (0, torch.zeros((), device=device.torch_device)):
            model = make_model(device)
            before = [parameter.detach().clone().cpu() for parameter in model.parameters()]
            engine = Engine(
                model,
                torch.optim.SGD(model.parameters(), lr=0.5),
                lambda m, b, w=nothing: {"loss": loss(m, b), "weight": w},
                device=device,
                accumulate=2,
            )
            result = engine.epoch(data(2))
            assert same(weights(engine), before)
            assert math.isnan(result.mean_loss)


class TestPlans:
    def counts(self, plan: Any, batches: int) -> dict[str, int]:
        with FakeDevice() as device:
            result = make_engine(device, plan).epoch(data(batches))
        return {w.reason: w.count for w in result.waits.reasons}

    @pytest.mark.parametrize("batches", [0, 1, 9, 10, 11, 30])
    def test_host_waits_by_plan(self, batches: int) -> None:
        due = math.ceil(batches / 10)
        assert self.counts("baseline", batches).get("sync", 0) == batches
        assert self.counts("baseline", batches).get("copy", 0) == batches
        assert self.counts("interval", batches).get("sync", 0) == due
        assert self.counts("event", batches).get("sync", 0) == due
        assert self.counts("streams4", batches).get("sync", 0) == due
        assert self.counts(Plan(sync="batch"), batches).get("sync", 0) == batches
        waits = self.counts("pipeline", batches)
        assert set(waits) <= {"data", "run_ahead", "losses"}
        assert waits.get("run_ahead", 0) == max(0, batches - 8)

    @pytest.mark.parametrize(
        ("plan", "lanes"),
        [
            ("baseline", {"transfer", "forward"}),
            ("interval", {"transfer", "forward"}),
            ("event", {"transfer", "forward"}),
            ("streams4", {"transfer", "transfer_next", "forward", "backward"}),
            (Plan.preset("streams4").replace(streams=3), {"transfer", "forward", "backward"}),
            ("pipeline", {"transfer", "default", "losses"}),
        ],
    )
    def test_streams_by_plan(self, plan: Any, lanes: set[str]) -> None:
        with FakeDevice() as device:
            engine = make_engine(device, plan)
            before = len(device.timeline().spans)
            engine.epoch(data())
            spans = device.timeline().spans[before:]
        assert {span.lane for span in spans if span.kind in ("kernel", "copy")} == lanes

    @pytest.mark.parametrize(("plan", "ms_per_step"), [("baseline", 12.0), ("pipeline", 10.0)])
    def test_time_per_step(self, plan: str, ms_per_step: float) -> None:
        """A copy of 2 ms, compute of 10 ms: baseline runs them in turn, pipeline overlaps them."""
        costs = Costs(kernel_us=0, query_us=0, by_name={"copy h2d": 2000, "copy d2h": 0})
        with FakeDevice(costs=costs) as device:
            weight = torch.nn.Linear(1, 1).to(device.torch_device)

            def timed(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
                device.work(10.0, "compute", reads=[batch])
                return model(batch).sum()

            engine = Engine(
                weight,
                torch.optim.SGD(weight.parameters(), lr=0.1),
                timed,
                plan=plan,
                device=device,
            )
            batches = [torch.ones(4, 1).pin_memory() for _ in range(50)]
            elapsed_ms = engine.epoch(batches).statistics.elapsed_s * 1e3
        assert elapsed_ms == 50 * ms_per_step + (2.0 if plan == "pipeline" else 0.0)

    def test_the_four_edges_of_streams4(self) -> None:
        with FakeDevice(costs=Costs(kernel_us=100)) as device:
            engine = make_engine(device, "streams4")
            engine.epoch(data(6))
            spans = device.timeline().spans
        backward = [s for s in spans if s.lane == "backward" and s.name.startswith("aten::_fused")]
        forward = [s for s in spans if s.lane == "forward" and s.name == "aten::addmm"]
        assert len(backward) == 6
        assert len(forward) == 12
        for update, next_forward in zip(backward, forward[2::2], strict=False):
            assert update.end_ns <= next_forward.start_ns

    def test_the_run_ahead_is_bounded_in_bytes(self) -> None:
        size = 5 * 8 * 4 + 5 * 8
        with FakeDevice() as device:
            plan = Plan.preset("pipeline").replace(run_ahead_bytes=2 * size)
            result = make_engine(device, plan).epoch(data(20))
        assert result.waits["run_ahead"].count == 18

    def test_batches_are_cached_on_the_device(self) -> None:
        batches = data(6)
        with FakeDevice() as device:
            engine = make_engine(device, Plan.preset("pipeline").replace(cache_batches=6))
            first = engine.epoch(batches)
            copies = sum(span.name == "copy h2d" for span in device.timeline().spans)
            second = engine.epoch(batches)
            assert sum(span.name == "copy h2d" for span in device.timeline().spans) == copies
        expected, _ = plain_loop(hr.open_device("cpu"), batches, epochs=2)
        assert [*first.losses, *second.losses] == expected

    def test_the_ledger_has_all_waits_of_a_pipeline_step(self) -> None:
        with FakeDevice() as device:
            engine = make_engine(device, "pipeline", clip_norm=1.0, ema_decay=0.9)
            device.hidden_waits.clear()
            engine.epoch(data())
        assert device.hidden_waits == []


class TestPrecision:
    @pytest.mark.parametrize("fused", [False, True])
    def test_fp16_waits_only_without_a_fused_optimizer(self, fused: bool) -> None:
        with FakeDevice() as device:
            model = make_model(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
            engine = Engine(
                model, optimizer, loss, plan="pipeline", device=device, precision="fp16"
            )
            device.hidden_waits.clear()
            result = engine.epoch(data(6))
        assert result.waits["fp16_found_inf"].count == (0 if fused else 6)
        assert (device.hidden_waits == []) is fused
        assert all(math.isfinite(value) for value in result.losses)

    def test_the_engine_overrides_the_plan(self, device: Device) -> None:
        assert make_engine(device, precision="bf16").plan.precision == "bf16"
        with pytest.raises(PlanError, match="precision = 'bf61'"):
            make_engine(device, precision="bf61")


class TestLoop:
    def test_steps_is_the_callers_loop(self, device: Device) -> None:
        expected, final = plain_loop(device, data())
        engine = make_engine(device)
        arrived: list[float] = []
        for index, info in enumerate(engine.steps(data())):
            assert info.batch == index
            assert info.updates == index + 1
            arrived += [entry.values["loss"] for entry in info.arrived]
        assert engine.last_result is not None
        assert list(engine.last_result.losses) == expected
        assert arrived == expected[: len(arrived)]
        assert same(weights(engine), final)

    @pytest.mark.parametrize("plan", EAGER)
    @pytest.mark.unsanitized
    def test_leaving_early_loses_nothing(self, device: Device, plan: str) -> None:
        expected, _ = plain_loop(device, data(6))
        engine = make_engine(device, plan)
        for info in engine.steps(data()):
            if info.batch == 5:
                break
        assert engine.last_result is not None
        assert list(engine.last_result.losses) == expected
        assert engine.epochs == 1
        assert device.pinned.lent == 0

    @pytest.mark.unsanitized
    def test_leaving_early_uses_a_partial_group(self, device: Device) -> None:
        engine = make_engine(device, accumulate=4)
        for info in engine.steps(data()):
            if info.batch == 4:
                break
        assert engine.last_result is not None
        assert engine.last_result.statistics.updates == 2

    @pytest.mark.parametrize("plan", EAGER)
    @pytest.mark.unsanitized
    def test_an_error_in_the_loss_is_raised_unchanged(self, device: Device, plan: str) -> None:
        calls = []

        def fragile(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            calls.append(batch)
            if len(calls) == 4:
                raise ZeroDivisionError("mine")
            return loss(model, batch)

        engine = make_engine(device, plan, loss=fragile)
        with pytest.raises(ZeroDivisionError, match="mine"):
            engine.epoch(data())
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == 3
        assert engine.epochs == 0
        assert device.pinned.lent == 0
        assert len(engine.epoch(data(5)).losses) == 5  # and it goes on working

    @pytest.mark.unsanitized
    def test_an_error_in_the_loss_keeps_the_groups_earlier_gradients(self, device: Device) -> None:
        """Batches trained on before the error count, as after an error in the loader."""
        calls: list[int] = []

        def fragile(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            calls.append(0)
            if len(calls) == 6:
                raise ZeroDivisionError("mine")
            return loss(model, batch)

        expected = make_engine(device, accumulate=3)
        expected.epoch(data()[:5])
        engine = make_engine(device, accumulate=3, loss=fragile)
        with pytest.raises(ZeroDivisionError):
            engine.epoch(data())
        assert engine.last_result is not None
        assert engine.last_result.statistics.updates == 2
        assert same(weights(engine), weights(expected))

    @pytest.mark.unsanitized
    def test_a_batch_whose_backward_raised_is_not_reported(self, device: Device) -> None:
        calls: list[int] = []

        def fragile(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            value = loss(model, batch)
            calls.append(0)
            if len(calls) == 4:
                value.register_hook(lambda gradient: gradient.new_ones(7))  # of a wrong shape
            return value

        engine = make_engine(device, loss=fragile)
        with pytest.raises(RuntimeError):
            engine.epoch(data())
        assert engine.last_result is not None
        assert len(engine.last_result.losses) == engine.last_result.statistics.batches == 3

    def test_max_steps_fetches_no_batch_too_many(self, device: Device) -> None:
        source = iter(data(10))
        engine = make_engine(device, accumulate=2)
        result = engine.epoch(source, max_steps=3)
        assert (result.statistics.updates, result.statistics.batches) == (3, 6)
        assert len(list(source)) == 4

    def test_an_empty_loader(self, device: Device) -> None:
        result = make_engine(device).epoch([])
        assert result.losses == ()
        assert math.isnan(result.mean_loss)

    def test_samplers_get_the_epoch(self, device: Device) -> None:
        epochs: list[int] = []

        class Sampler(torch.utils.data.SequentialSampler):
            def set_epoch(self, epoch: int) -> None:
                epochs.append(epoch)

        dataset = TensorDataset(torch.randn(6, 8), torch.zeros(6, dtype=torch.int64))
        loader = DataLoader(dataset, batch_size=2, sampler=Sampler(dataset))
        engine = make_engine(device)
        for _ in range(3):
            engine.epoch(loader)
        assert epochs == [0, 1, 2]

    def test_schedulers_by_epoch(self, device: Device) -> None:
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        engine = Engine(
            model,
            optimizer,
            lambda m, b: loss(m, b) * 0 + 1,
            device=device,
            scheduler=scheduler,
            scheduler_every="epoch",
        )
        for _ in range(3):
            engine.epoch(data(2))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

    def test_frozen_parameters_stay(self, device: Device) -> None:
        model = make_model(device)
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        make_engine(device, model=model, accumulate=2, clip_norm=1.0).epoch(data(4))
        assert torch.equal(model[0].weight, before)

    def test_on_step_and_on_epoch_are_called(self, device: Device) -> None:
        steps: list[Progress] = []
        epochs: list[hr.EpochResult] = []
        engine = make_engine(device, on_step=steps.append, on_epoch=epochs.append)
        result = engine.epoch(data(4))
        assert [info.batch for info in steps] == [0, 1, 2, 3]
        assert epochs == [result]

    def test_a_non_finite_loss_is_named(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls: list[int] = []

        def bad_once(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            calls.append(0)
            return loss(model, batch) + (math.nan if len(calls) == 3 else 0.0)

        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        result = Engine(model, optimizer, bad_once, device=device).epoch(data(5))
        assert result.non_finite[0] == 2
        assert "loss not finite at batch 3 of epoch 1" in caplog.text
        assert json.loads(result.to_json())["losses"][2] is None

    def test_nvtx_ranges_do_no_harm(self, device: Device) -> None:
        assert len(make_engine(device, nvtx=True).epoch(data(3)).losses) == 3

    def test_settings_of_pytorch_are_restored(self, device: Device) -> None:
        make_engine(device, deterministic=True).epoch(data(2))
        assert not torch.are_deterministic_algorithms_enabled()


class TestEvaluate:
    def test_without_gradients_and_in_eval_mode(self, device: Device) -> None:
        engine = make_engine(device)
        before = weights(engine)
        one, two = engine.evaluate(data(5)), engine.evaluate(data(5))
        assert one.losses == two.losses  # no dropout
        assert same(weights(engine), before)
        assert engine.model.training
        assert engine.epochs == 0
        assert all(parameter.grad is None for parameter in engine.model.parameters())

    def test_with_the_averaged_weights(self, device: Device) -> None:
        engine = make_engine(device, ema_decay=0.5)
        engine.epoch(data(5))
        own, plain = weights(engine), engine.evaluate(data(5)).mean_loss
        assert engine.ema is not None
        with engine.ema.applied():
            assert not same(weights(engine), own)
            averaged = engine.evaluate(data(5)).mean_loss
        assert same(weights(engine), own)
        assert averaged != plain


class TestCustomStep:
    def test_two_optimizers(self, device: Device) -> None:
        one, two = make_model(device), make_model(device)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]

        def step(batch: Any) -> dict[str, torch.Tensor]:
            losses = []
            for model, optimizer in zip((one, two), optimizers, strict=True):
                value = loss(model, batch)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.detach())
            return {"loss": losses[0], "other": losses[1]}

        engine = Engine.from_step(step, device=device, plan="streams4")
        result = engine.epoch(data(7))
        assert len(result.losses) == 7
        assert "other" in result.metrics
        with pytest.raises(StepError, match="this engine is from Engine"):
            engine.evaluate(data(2))

    def test_a_step_may_report_nothing(self, device: Device) -> None:
        seen: list[int] = []
        engine = Engine.from_step(lambda batch: seen.append(len(batch[0])), device=device)
        assert engine.epoch(data(4)).losses == ()
        assert seen == [5, 5, 5, 5]


class TestBadInput:
    @pytest.mark.parametrize(
        ("bad_loss", "message"),
        [
            (lambda m, b: m(b[0]), r"a loss that has shape \(5, 3\): expected a single number"),
            (lambda m, b: loss(m, b).detach(), "a loss that does not require grad"),
            (lambda m, b: 3.0, "returned the number 3.0: expected a 0-dim tensor"),
            (lambda m, b: None, "the loss function <lambda> at .* returned None: expected"),
            (lambda m, b: {"los": loss(m, b)}, r"a dict without 'loss' \(it has los\): expected"),
            (
                lambda m, b: {"loss": loss(m, b), "weight": torch.ones(2)},
                r"'weight', which has shape \(2,\): expected a single number",
            ),
            (lambda m, b: {"loss": loss(m, b), "x": "y"}, "'x', which is a str: expected a number"),
        ],
    )
    def test_of_the_loss(self, device: Device, bad_loss: Any, message: str) -> None:
        with pytest.raises(StepError, match=message):
            make_engine(device, loss=bad_loss).epoch(data(2))

    def test_a_loss_on_the_wrong_device(self) -> None:
        with (
            FakeDevice() as device,
            pytest.raises(StepError, match="a loss that is on cpu: expected"),
        ):
            make_engine(device, loss=lambda m, b: loss(m, b).cpu()).epoch(data(2))

    def test_a_batch_without_a_tensor(self, device: Device) -> None:
        with pytest.raises(StepError, match=r"batch 0 \(a str\) holds no tensor"):
            make_engine(device).epoch(["text"])

    def test_a_model_on_the_wrong_device(self) -> None:
        with FakeDevice() as device:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters())
            with pytest.raises(
                StepError, match="the model is on cpu, but the engine runs on fake:1"
            ):
                Engine(model, optimizer, loss, device=device)

    def test_of_optimizers_and_schedulers(self) -> None:
        model = torch.nn.Linear(8, 3)
        sgd, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        schedule = torch.optim.lr_scheduler.ConstantLR(sgd)
        with pytest.raises(StepError, match="LBFGS needs a closure"):
            Engine(model, torch.optim.LBFGS(model.parameters()), loss)
        with pytest.raises(StepError, match="a scheduler without an optimizer"):
            Engine(model, None, loss, scheduler=schedule)  # type: ignore[arg-type]
        with pytest.raises(StepError, match="the scheduler belongs to another optimizer"):
            Engine(model, other, loss, scheduler=schedule)
        with pytest.raises(StepError, match="scheduler_every = 'batch'"):
            Engine(model, sgd, loss, scheduler=schedule, scheduler_every="batch")  # type: ignore[arg-type]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
        with pytest.raises(StepError, match="ReduceLROnPlateau needs the epoch"):
            Engine(model, sgd, loss, scheduler=plateau)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"accumulate": 0}, "accumulate = 0: expected"),
            ({"accumulate": 1.5}, "accumulate = 1.5: expected"),
            ({"clip_norm": 0}, "clip_norm = 0: expected a number above 0"),
            ({"ema_decay": 1.0}, "ema_decay = 1.0: expected"),
        ],
    )
    def test_of_numbers(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(StepError, match=message):
            make_engine(hr.open_device("cpu"), **options)

    def test_of_the_model(self) -> None:
        with pytest.raises(StepError, match=r"model is a function: expected a torch\.nn\.Module"):
            Engine(lambda x: x, None, loss)  # type: ignore[arg-type,misc]

    def test_of_the_plan(self) -> None:
        with pytest.raises(PlanError, match="no plan 'pipelin'"):
            make_engine(hr.open_device("cpu"), "pipelin")


def test_the_result_is_a_frozen_record(device: Device) -> None:
    result = make_engine(device).epoch(data(6))
    content = json.loads(result.to_json())
    assert content["losses"] == list(result.losses)
    assert content["plan"] == "pipeline"
    assert content["statistics"]["batches"] == 6
    assert content["statistics"]["samples"] == 30
    assert content["waits"]["reasons"]["data"]["count"] == 7
    assert 0 <= content["statistics"]["host_blocked_share"] <= 1
    with pytest.raises(AttributeError):
        result.mean_loss = 0.0  # type: ignore[misc]


class TestInsideALoop:
    """What a caller may do between two batches of `steps()`."""

    def test_evaluate_does_not_change_the_epochs_statistics(self, device: Device) -> None:
        def waits(evaluates: bool) -> dict[str, int]:
            engine = make_engine(device, "baseline")
            for info in engine.steps(data(8)):
                if evaluates and info.batch == 4:
                    found = engine.evaluate(data(3))
                    assert found.waits["data"].count == 4
            assert engine.last_result is not None
            total = {one.reason: one.count for one in device.ledger.statistics().reasons}
            assert total["data"] >= 9
            return {one.reason: one.count for one in engine.last_result.waits.reasons}

        assert waits(evaluates=True) == waits(evaluates=False)

    def test_use_plan_takes_effect_in_the_next_epoch(self, device: Device) -> None:
        whole, engine = make_engine(device), make_engine(device)
        torch.manual_seed(1)
        expected = whole.epoch(data(8)).losses
        torch.manual_seed(1)
        for info in engine.steps(data(8)):
            if info.batch == 3:
                engine.use_plan(Plan.preset("event").replace(precision="bf16"))
                assert engine.plan.name == "pipeline"
        assert engine.last_result is not None
        assert engine.last_result.losses == expected
        assert engine.plan.precision == "bf16"

    def test_leave_ends_the_loop(self, device: Device) -> None:
        engine = make_engine(device, accumulate=3)
        seen = 0
        for info in engine.steps(data(8)):
            seen += 1
            if info.batch == 4:
                engine.leave()
        assert engine.last_result is not None
        assert (seen, len(engine.last_result.losses), engine.updates) == (5, 5, 2)
        assert engine.is_between_updates


@pytest.mark.parametrize(
    ("dtype", "options", "is_told"),
    [
        (torch.float16, {"accumulate": 2}, True),
        (torch.float16, {"accumulate": 2, "accumulate_by": "count"}, False),
        (torch.float16, {}, False),
        (torch.bfloat16, {"accumulate": 2}, False),
    ],
)
def test_weights_may_be_too_large_for_float16(
    dtype: torch.dtype, options: dict[str, Any], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeDevice() as device:
        make_engine(device, model=make_model(device).to(dtype), **options)
    assert ("or accumulate_by='count'" in caplog.text) == is_told
