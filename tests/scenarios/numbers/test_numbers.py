"""Numbers as the user had them: the engine against the loop by hand, bit for bit."""

from __future__ import annotations

import copy
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace.bench import Bench, entries_of, find_work, text_of
from headrace.bench.loss_comparison import LossComparison
from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.errors import StepError
from headrace.fake import FakeDevice
from headrace.plan import PRESETS, Plan, load_plan
from headrace.translation import TrainSettings
from headrace.translation.batching import resolve_plans
from support.processes.forked import run_python
from support.training.devices import needs_cuda
from support.training.engines import data, loss, make_model, same, weights

EXACT = [name for name in PRESETS if name != "max"]
Model = Callable[[Device], nn.Module]
Groups = Callable[[nn.Module], Any]


def by_hand(
    device: Device,
    batches: list[Any],
    *,
    model: Model = make_model,
    groups: Groups = nn.Module.parameters,
    clip: float | None = None,
    n: int = 1,
    fp16: bool = False,
    epochs: int = 1,
) -> tuple[list[float], list[torch.Tensor]]:
    """The loop as people write it: `(loss / n).backward()`, and a step after the last batch."""
    net = model(device)
    optimizer = torch.optim.AdamW(groups(net), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler(device.torch_device.type, enabled=fp16)
    losses = []
    for _ in range(epochs):
        for index, batch in enumerate(batches):
            moved = tuple(part.to(device.torch_device) for part in batch)
            with torch.autocast(device.torch_device.type, torch.float16) if fp16 else nullcontext():
                value = loss(net, moved)
            scaler.scale(value / n if n > 1 else value).backward()
            losses.append(value.item())
            if (index + 1) % n == 0 or index + 1 == len(batches):
                if clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return losses, [parameter.detach().cpu() for parameter in net.parameters()]


def engine_for(
    device: Device,
    plan: Any = "pipeline",
    *,
    model: Model = make_model,
    groups: Groups = nn.Module.parameters,
    loss_function: Any = loss,
    **options: Any,
) -> Engine:
    net = model(device)
    optimizer = torch.optim.AdamW(groups(net), lr=0.01, fused=True)
    options.setdefault("deterministic", True)
    return Engine(net, optimizer, loss_function, plan=plan, device=device, **options)


def assert_same(engine: Engine, batches: list[Any], expected: Any, epochs: int = 1) -> None:
    losses, final = expected
    found = [value for _ in range(epochs) for value in engine.epoch(batches).losses]
    assert found == losses
    assert same(weights(engine), final)


def assert_captured(engine: Engine) -> None:
    """Where the plan and the device have graphs, some of those batches were replays."""
    if engine.plan.graphs != "off" and engine.device.captures:
        assert engine.graphs is not None
        assert engine.graphs.replays > 0


# --- TF32 -----------------------------------------------------------------------------------------


class Asked(FakeDevice):
    """A device that remembers which arithmetic it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str | None] = []

    @contextmanager
    def numerics(self, precision: str | None) -> Iterator[None]:
        self.asked.append(precision)
        yield

    def float32_switches(self) -> str:
        return "matmul fp32, conv tf32, rnn tf32"


class TestPrecision:
    @pytest.mark.parametrize("plan", list(PRESETS))
    def test_none_is_given_unless_somebody_gives_one(self, plan: str) -> None:
        with Asked() as device:
            engine = engine_for(device, plan)
            engine.epoch(data(3))
            engine.evaluate(data(1))
            Engine.from_step(lambda batch: None, device=device, plan=plan).epoch(data(1))
        assert device.asked == [None, None, None]

    def test_the_engines_own_comes_before_the_plans(self) -> None:
        with Asked() as device:
            engine_for(device, Plan.preset("pipeline").replace(precision="tf32")).epoch(data(1))
            engine = engine_for(device, Plan(precision="tf32"), precision="fp32")
            engine.epoch(data(1))
            engine.use_plan("event")
            engine.epoch(data(1))
        assert device.asked == ["tf32", "fp32", "fp32"]

    def test_a_scaler_goes_with_fp16_alone(self) -> None:
        with FakeDevice() as device:
            engine = engine_for(device, precision=None)
            assert engine._builder.parts is not None
            assert engine._builder.parts.update.scaler is None
            engine.use_plan(Plan(precision="fp16"))
            assert engine._builder.parts.update.scaler is not None
            engine.use_plan("pipeline")
            assert engine._builder.parts.update.scaler is None

    def test_a_plan_file_may_say_none(self, tmp_path: Path) -> None:
        for text, expected in (("null", None), ("fp32", "fp32")):
            (tmp_path / "plan.yaml").write_text(f"plan: {{preset: graph, precision: {text}}}\n")
            assert load_plan(tmp_path / "plan.yaml").plan.precision == expected

    @pytest.mark.parametrize("plan", ["pipeline", "plan.yaml"])
    def test_train_has_one_of_its_own(self, plan: str, tmp_path: Path) -> None:
        path = tmp_path / "plan.yaml"
        path.write_text("plan: pipeline\n")
        settings = TrainSettings(plan=str(path) if plan == "plan.yaml" else plan)
        assert resolve_plans(settings, open_device("cpu"))[0].precision == "fp32"

    @pytest.mark.parametrize("precision", [None, "fp32"])
    def test_all_rows_of_a_bench_compute_alike(self, precision: str | None) -> None:
        work = find_work("mlp", {"width": 8, "layers": 1, "batch": 4})
        with Asked() as device:
            result = Bench(
                work,
                device,
                entries_of(["baseline", "pipeline", "graph"], precision),
                steps=1,
                repeats=1,
                warmup=1,
                watched_s=0,
                precision=precision,
            ).run()
        assert set(device.asked) == {precision}
        said = "float32 as PyTorch is set (matmul fp32, conv tf32, rnn tf32)"
        assert (precision or said) in text_of(result).replace("\n", " ")
        stored = type(result).from_dict(result.to_dict())
        assert stored.environment.float32_switches == "matmul fp32, conv tf32, rnn tf32"
        assert {row.fields["precision"] for row in stored.rows if row.fields} == {precision}

    def test_a_bench_says_what_computes_otherwise(self) -> None:
        as_set, strict = entries_of(["baseline"])[0], entries_of(["pipeline"], "fp32")[0]
        work = find_work("mlp", {"width": 8, "layers": 1, "batch": 4})
        with FakeDevice() as device:
            comparing = LossComparison(work, device, as_set, [], seed=0, tolerance=0.01)
            made = work.make(device, seed=0)
            why = comparing._why_within(strict, made, compiled=False, without_dropout=False)
        assert why == "fp32 instead of float32 as PyTorch is set"


@pytest.mark.parametrize("way", ["allow_tf32 = True", "fp32_precision = 'tf32'"])
def test_both_of_pytorchs_ways_to_set_the_switches(way: str) -> None:
    """In a process of its own: PyTorch remembers for good which way was used."""
    lines = f"""
        import torch
        from headrace.device.cuda import _switches, float32_products
        def now(): return [switch.fp32_precision for switch in _switches().values()]
        torch.backends.cuda.matmul.{way}
        before = now()
        with float32_products(tf32=True): assert now() == ["tf32"] * 3, now()
        with float32_products(tf32=False): assert "tf32" not in now(), now()
        assert now() == before, now()
    """
    done = run_python(textwrap.dedent(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("_cuda", [needs_cuda])
@pytest.mark.parametrize("matmul", [True, False])
@pytest.mark.parametrize("cudnn", [True, False])
def test_the_switches_stay_as_they_are(_cuda: str, matmul: bool, cudnn: bool) -> None:
    backends, device = torch.backends, open_device("cuda")
    was = (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32)
    seen = []

    def looking(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32))
        return loss(model, batch)

    try:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = matmul, cudnn
        assert device.float32_switches() == (
            f"matmul {'tf32' if matmul else 'fp32'}, "
            f"conv {'tf32' if cudnn else 'fp32'}, rnn {'tf32' if cudnn else 'fp32'}"
        )
        expected = {None: (matmul, cudnn), "fp32": (False, False), "tf32": (True, True)}
        for precision in expected:
            engine_for(device, loss_function=looking, precision=precision).epoch(data(1))
        assert seen == list(expected.values())
        assert (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32) == (matmul, cudnn)
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = was


# --- clipping -------------------------------------------------------------------------------------


def deep(device: Device) -> nn.Module:
    """Enough tensors of unlike sizes for the order of a sum to show."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, 33)]
    for _ in range(3):
        layers += [nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 33)]
    return nn.Sequential(*layers, nn.Linear(33, 3)).to(device.torch_device)


def decayed_first(model: nn.Module) -> Any:
    """The groups that most training programs make: weights, then biases and norms."""
    by_decay = [p for p in model.parameters() if p.dim() >= 2]
    without = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": by_decay}, {"params": without, "weight_decay": 0.0}]


def all_but_the_first(model: nn.Module) -> Any:
    return [p for layer in list(model)[1:] for p in layer.parameters()]  # type: ignore[call-overload]


class TestClipping:
    @pytest.mark.parametrize("plan", EXACT)
    def test_sums_in_the_models_order(self, device: Device, plan: str) -> None:
        options: Any = {"model": deep, "groups": decayed_first}
        expected = by_hand(device, data(16), clip=0.1, **options)
        engine = engine_for(device, plan, clip_norm=0.1, **options)
        assert_same(engine, data(16), expected)
        assert_captured(engine)

    def test_that_order_is_not_the_optimizers(self) -> None:
        """Else the test above could not fail."""
        net = deep(open_device("cpu"))
        norms: list[list[float]] = [[], []]
        for batch in data(16):
            loss(net, batch).backward()
            groups = decayed_first(net)
            for found, order in zip(
                norms, (net.parameters(), [p for g in groups for p in g["params"]]), strict=True
            ):
                found.append(nn.utils.get_total_norm([p.grad for p in order]).item())
            net.zero_grad()
        assert norms[0] != norms[1]

    def test_then_over_those_that_only_the_optimizer_has(self, device: Device) -> None:
        """A learned scale of the loss, say."""
        found = []
        for plan in ("by hand", *EXACT):
            net = deep(device)
            scale = nn.Parameter(torch.ones(3, device=device.torch_device))

            def scaled(model: nn.Module, batch: Any, scale: Any = scale) -> torch.Tensor:
                return nn.functional.cross_entropy(model(batch[0]) * scale, batch[1])

            parameters = [scale, *net.parameters()]
            optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
            if plan == "by hand":
                for batch in data(12):
                    scaled(net, tuple(part.to(device.torch_device) for part in batch)).backward()
                    nn.utils.clip_grad_norm_([*net.parameters(), scale], 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                engine = Engine(
                    net, optimizer, scaled, plan=plan, device=device, clip_norm=0.1,
                    deterministic=True,
                )  # fmt: skip
                engine.epoch(data(12))
            found.append([parameter.detach().cpu() for parameter in parameters])
        for one in found[1:]:
            assert same(one, found[0])

    @pytest.mark.parametrize(
        ("plan", "fp16"), [*((plan, False) for plan in EXACT), ("pipeline", True), ("graph", True)]
    )
    def test_counts_what_the_optimizer_does_not_have(
        self, device: Device, plan: str, fp16: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Those gradients are never cleared, so the norm grows: as by hand, and it is said."""
        options: Any = {"model": deep, "groups": all_but_the_first}
        expected = by_hand(device, data(12), clip=0.1, fp16=fp16, epochs=2, **options)
        engine = engine_for(
            device, plan, clip_norm=0.1, precision="fp16" if fp16 else None, **options
        )
        with caplog.at_level(logging.WARNING, "headrace"):
            assert_same(engine, data(12), expected, epochs=2)
        (said,) = [
            r.getMessage() for r in caplog.records if "not in the optimizer" in r.msg % r.args
        ]
        assert said.startswith("2 of the model's parameters (0.weight, 0.bias) get gradients")
        assert "requires_grad_(False)" in said

    def test_and_goes_on_with_that_after_a_resume(self, device: Device) -> None:
        options: Any = {"model": deep, "groups": all_but_the_first, "clip_norm": 0.1}
        whole = engine_for(device, **options)
        expected = whole.epoch(data(12)).losses
        first = engine_for(device, **options)
        for info in first.steps(data(12)):
            if info.batch == 4:
                stored = copy.deepcopy(first.state_dict())
                break
        other = engine_for(device, **options)
        other.load_state_dict(stored)
        assert other.epoch(data(12)).losses == expected
        assert same(weights(other), weights(whole))

    def test_frozen_ones_are_nobodys(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        def frozen(where: Device) -> nn.Module:
            net = deep(where)
            net[0].requires_grad_(False)  # type: ignore[index]
            return net

        options: Any = {"model": frozen, "groups": all_but_the_first}
        expected = by_hand(device, data(5), clip=0.1, **options)
        assert_same(engine_for(device, clip_norm=0.1, **options), data(5), expected)
        assert "not in the optimizer" not in caplog.text

    def test_is_refused_where_gradients_are_divided_afterwards(self, device: Device) -> None:
        engine = engine_for(
            device, model=deep, groups=all_but_the_first, clip_norm=0.1, accumulate=2
        )
        with pytest.raises(StepError, match=r"\(0\.weight, 0\.bias\) get gradients but are not"):
            engine.epoch(data(4))

    def test_follows_a_group_that_is_added(self, device: Device) -> None:
        """What is unfrozen between two epochs is clipped as well, in the model's order."""
        found = []
        for goes_on_by_hand in (True, False):
            net = deep(device)
            first: Any = net[0]  # type: ignore[index]
            optimizer = torch.optim.AdamW(all_but_the_first(net), lr=0.01, fused=True)
            first.requires_grad_(False)
            engine = Engine(net, optimizer, loss, device=device, clip_norm=0.1)
            engine.epoch(data(2))
            first.requires_grad_(True)
            optimizer.add_param_group({"params": list(first.parameters())})
            for batch in data(9) if goes_on_by_hand else ():
                loss(net, tuple(part.to(device.torch_device) for part in batch)).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            if not goes_on_by_hand:
                engine.epoch(data(9))
            found.append(weights(engine))
        assert same(*found)


# --- accumulation ---------------------------------------------------------------------------------


class TestAccumulationByCount:
    @pytest.mark.parametrize("n", [3, 4])
    @pytest.mark.parametrize("plan", EXACT)
    def test_is_the_loop_that_divides_the_loss(self, device: Device, plan: str, n: int) -> None:
        """Eleven batches: the last group is partial with each n, and divided by n as well."""
        expected = by_hand(device, data(11), n=n, epochs=2)
        engine = engine_for(device, plan, accumulate=n, accumulate_by="count")
        assert_same(engine, data(11), expected, epochs=2)
        assert_captured(engine)

    @pytest.mark.parametrize("plan", EXACT)
    def test_with_clipping_and_groups(self, device: Device, plan: str) -> None:
        options: Any = {"model": deep, "groups": decayed_first}
        expected = by_hand(device, data(11), n=3, clip=0.1, epochs=2, **options)
        engine = engine_for(
            device, plan, accumulate=3, accumulate_by="count", clip_norm=0.1, **options
        )
        assert_same(engine, data(11), expected, epochs=2)
        assert_captured(engine)

    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph"])
    def test_with_gradients_outside_the_optimizer(self, device: Device, plan: str) -> None:
        options: Any = {"model": deep, "groups": all_but_the_first}
        expected = by_hand(device, data(11), n=3, clip=0.1, epochs=2, **options)
        engine = engine_for(
            device, plan, accumulate=3, accumulate_by="count", clip_norm=0.1, **options
        )
        assert_same(engine, data(11), expected, epochs=2)

    @pytest.mark.parametrize("plan", ["baseline", "streams4", "pipeline", "graph"])
    def test_with_a_scaler(self, device: Device, plan: str) -> None:
        expected = by_hand(device, data(11), n=3, clip=0.5, fp16=True, epochs=2)
        engine = engine_for(
            device, plan, accumulate=3, accumulate_by="count", clip_norm=0.5, precision="fp16"
        )
        assert_same(engine, data(11), expected, epochs=2)

    def test_a_weight_only_weighs_what_is_reported(self, device: Device) -> None:
        def weighted(model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"loss": loss(model, batch), "weight": (batch[1] > 0).sum()}

        expected = by_hand(device, data(11), n=4)
        engine = engine_for(device, accumulate=4, accumulate_by="count", loss_function=weighted)
        losses, final = expected
        result = engine.epoch(data(11))
        assert list(result.losses) == losses
        assert same(weights(engine), final)
        counts = [int((batch[1] > 0).sum()) for batch in data(11)]
        mean = sum(map(float.__mul__, losses, map(float, counts))) / sum(counts)
        assert result.mean_loss == pytest.approx(mean)

    def test_agrees_with_weights_where_all_weigh_the_same(self, device: Device) -> None:
        """Full groups of batches of equal weight, and a power of two to divide by: no rounding."""
        by_weight = engine_for(device, accumulate=4)
        losses = by_weight.epoch(data(8)).losses
        by_count = engine_for(device, accumulate=4, accumulate_by="count")
        assert by_count.epoch(data(8)).losses == losses
        assert same(weights(by_weight), weights(by_count))

    def test_differs_in_a_last_partial_group(self, device: Device) -> None:
        """AdamW hardly sees how long a gradient is; plain SGD does."""
        found = []
        for by in ("weight", "count"):
            net = make_model(device, 0.0)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            before = [p.detach().clone() for p in net.parameters()]
            Engine(
                net, optimizer, loss, device=device, accumulate=4, accumulate_by=by,  # type: ignore[arg-type]
            ).epoch(data(1))  # fmt: skip
            found.append([p.detach() - b for p, b in zip(net.parameters(), before, strict=True)])
        for by_weight, by_count in zip(*found, strict=True):
            assert torch.allclose(by_weight, by_count * 4, rtol=1e-4, atol=1e-7)

    @pytest.mark.parametrize("plan", ["pipeline", "graph"])
    def test_goes_on_inside_a_group(self, device: Device, plan: str) -> None:
        expected = by_hand(device, data(11), n=4)
        first = engine_for(device, plan, accumulate=4, accumulate_by="count")
        for info in first.steps(data(11)):
            if info.batch == 5:
                stored = copy.deepcopy(first.state_dict())
                break
        other = engine_for(device, plan, accumulate=4, accumulate_by="count")
        other.load_state_dict(stored)
        assert_same(other, data(11), expected)
        for options in ({"accumulate": 4}, {"accumulate": 8, "accumulate_by": "count"}):
            another = engine_for(device, plan, **options)
            with pytest.raises(StepError, match=r"2 batches into a group accumulated by count \(4"):
                another.load_state_dict(stored)

    def test_a_state_by_weight_is_not_gone_on_with_by_count(self, device: Device) -> None:
        first = engine_for(device, accumulate=4)
        for info in first.steps(data(11)):
            if info.batch == 5:
                stored = copy.deepcopy(first.state_dict())
                break
        other = engine_for(device, accumulate=4, accumulate_by="count")
        with pytest.raises(StepError, match="by weight, and this engine accumulates by count"):
            other.load_state_dict(stored)

    def test_a_batch_in_halves(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the whole batch, to rounding: its parts are divided by what they weigh, then by n."""

        def run(fails_at: int | None) -> list[torch.Tensor]:
            engine = engine_for(
                device,
                model=lambda where: make_model(where, 0.0),
                loss_function=sometimes_full,
                on_oom="halve",
                accumulate=3,
                accumulate_by="count",
            )
            full[:] = [] if fails_at is None else [data(7, 6)[fails_at][0]]
            engine.epoch(data(7, 6))
            assert engine._builder.parts is not None
            assert engine._builder.parts.group.split_batches == len(full)
            return weights(engine)

        full: list[torch.Tensor] = []

        def sometimes_full(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs = batch[0]
            if any(inputs.shape == one.shape and torch.equal(inputs.cpu(), one) for one in full):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss(model, batch)

        expected = run(None)
        for fails_at in (0, 1, 6):
            for one, other in zip(run(fails_at), expected, strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)

    def test_another_word_is_refused(self) -> None:
        with pytest.raises(StepError, match="accumulate_by = 'mean': expected 'weight' or 'count'"):
            engine_for(open_device("cpu"), accumulate_by="mean")
