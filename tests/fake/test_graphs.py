"""Graphs on the fake device: nothing runs at capture, a replay is the eager step bit for bit, what
CUDA refuses is refused, and the checker and the clock see replays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.device import CaptureQuery
from headrace.errors import CaptureError, ClosedError, DeviceError, DeviceMismatchError
from headrace.fake import Costs, FakeDevice
from support.graphs.captures import TrainedModel, line, on, same


class TestCapture:
    def test_nothing_runs(self, device: FakeDevice) -> None:
        training = TrainedModel(device)
        training.eager(range(2))
        before, waits = training.state(), len(device.hidden_waits)
        spans = device.timeline().spans
        device.capture(training.step, device.graph_pool())
        assert device.timeline().spans == spans
        assert len(device.hidden_waits) == waits
        assert same(training.state(), before)

    def test_a_stream_knows_that_it_is_captured(self, device: FakeDevice) -> None:
        value = on(device, 2)
        _, inside = device.capture(
            lambda: (value + 1, device.is_capturing())[1], device.graph_pool()
        )
        assert inside
        assert not device.is_capturing()

    def test_it_needs_no_order_with_the_caller(self, device: FakeDevice) -> None:
        value = on(device, 8)
        graph, result = device.capture(lambda: value * 2, device.graph_pool())
        graph.replay()
        assert (result + value).tolist() == [3.0] * 8

    def test_results_hold_nothing_before_the_first_replay(self, device: FakeDevice) -> None:
        value = on(device, 2)
        graph, result = device.capture(lambda: value + 1, device.graph_pool())
        assert result.isnan().all()
        graph.replay()
        assert result.tolist() == [2.0, 2.0]

    def test_host_work_runs_at_capture_only(self, device: FakeDevice) -> None:
        calls, count, value = [], torch.zeros(1), on(device, 1)

        def work() -> torch.Tensor:
            calls.append(1)
            count.add_(1)
            return value + 1

        graph, _ = device.capture(work, device.graph_pool())
        graph.replay()
        graph.replay()
        assert (len(calls), count.item()) == (1, 1.0)

    def test_numbers_are_taken_at_capture_and_pinned_memory_at_replay(
        self, device: FakeDevice
    ) -> None:
        value, factor, staging = on(device, 2), torch.tensor(3.0), torch.ones(2).pin_memory()

        def work() -> torch.Tensor:
            value.copy_(staging, non_blocking=True)
            value[0] = 5.0
            return value * factor

        graph, result = device.capture(work, device.graph_pool())
        factor.fill_(100)
        staging.fill_(2)
        graph.replay()
        assert result.tolist() == [15.0, 6.0]

    def test_readback_into_pinned_memory(self, device: FakeDevice) -> None:
        value, host = on(device, 2), torch.zeros(2).pin_memory()

        def work() -> torch.Tensor:
            host.copy_(value, non_blocking=True)
            return value.to("cpu", non_blocking=True)

        graph, made = device.capture(work, device.graph_pool())
        assert host.tolist() == [0.0, 0.0]
        graph.replay()
        device.synchronize("test")
        assert host.tolist() == made.tolist() == [1.0, 1.0]

    def test_a_side_stream_joins_and_must_be_joined(self, device: FakeDevice) -> None:
        value, side = on(device, 2), device.stream("side")

        def work(join: bool) -> torch.Tensor:
            side.wait_stream(device.current_stream())
            with device.use(side):
                result = value + 1
            if join:
                device.current_stream().wait_stream(side)
            return result

        graph, result = device.capture(lambda: work(True), device.graph_pool())
        graph.replay()
        assert result.tolist() == [2.0, 2.0]
        with pytest.raises(CaptureError) as raised:
            device.capture(lambda: work(False), device.graph_pool())
        assert str(raised.value.__cause__) == "capturing stream has unjoined work: on side"

    def test_inference_mode_and_autocast_around_either(self, device: FakeDevice) -> None:
        model = torch.nn.Linear(4, 4).to(device.torch_device)
        value = on(device, 2, 4)
        expected = model(value).tolist()

        def work() -> torch.Tensor:
            with torch.inference_mode():
                result: torch.Tensor = model(value)
                return result

        graph, result = device.capture(work, device.graph_pool())
        with torch.autocast("cpu", torch.bfloat16):
            graph.replay()
        assert result.tolist() == expected

    def test_what_a_capture_needs(self, device: FakeDevice) -> None:
        with pytest.raises(DeviceMismatchError, match=r"a pool from its graph_pool\(\)"):
            device.capture(lambda: None, object())
        outside = FakeDevice(index=2)
        with pytest.raises(DeviceError, match="inside its `with device:` block"):
            outside.capture(lambda: None, outside.graph_pool())
        with pytest.raises(CaptureError) as raised:
            device.capture(
                lambda: device.capture(lambda: None, device.graph_pool()), device.graph_pool()
            )
        assert "is capturing already" in str(raised.value.__cause__)


class TestReplay:
    @pytest.mark.parametrize("options", [{}, {"fused": False}, {"fused": False, "foreach": True}])
    def test_it_is_the_eager_step(self, device: FakeDevice, options: dict[str, Any]) -> None:
        eager = TrainedModel(device, **options)
        expected = eager.eager(range(8))
        training = TrainedModel(device, **options)
        found = training.eager(range(2))
        graph, loss = device.capture(training.step, device.graph_pool())
        for number in range(2, 5):
            training.load(number)
            graph.replay()
            found.append(loss.item())
        found += training.eager(range(5, 6))  # and the eager step in between
        for number in range(6, 8):
            training.load(number)
            graph.replay()
            found.append(loss.item())
        assert found == expected
        assert same(training.state(), eager.state())

    def test_autocast_is_captured(self, device: FakeDevice) -> None:
        model, value = torch.nn.Linear(4, 4).to(device.torch_device), on(device, 2, 4)

        def work() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                result: torch.Tensor = model(value)
                return result

        graph, result = device.capture(work, device.graph_pool())
        graph.replay()
        assert result.dtype == torch.bfloat16
        assert result.tolist() == work().tolist()

    def test_results_are_overwritten(self, device: FakeDevice) -> None:
        value = on(device, 2)
        graph, result = device.capture(lambda: value * 2, device.graph_pool())
        graph.replay()
        kept = result.clone()
        value.fill_(5)
        graph.replay()
        assert (kept.tolist(), result.tolist()) == ([2.0, 2.0], [10.0, 10.0])

    def test_autograd_sees_nothing(self, device: FakeDevice) -> None:
        weight = on(device, 2).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def work() -> None:
            weight.grad = None
            weight.sum().backward()
            optimizer.step()

        graph, _ = device.capture(work, device.graph_pool())
        saved = (weight * weight).sum()  # eager work that is under way, as far as autograd goes
        graph.replay()
        saved.backward()
        assert weight.is_leaf
        assert weight.tolist() == [0.5, 0.5]

    @pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1, 0, 0, 1)])
    def test_two_graphs_of_one_pool(self, device: FakeDevice, order: tuple[int, ...]) -> None:
        pool, total = device.graph_pool(), on(device, 2)
        works: list[Callable[[], object]] = [lambda: total.mul_(3), lambda: total.add_(total + 1)]
        graphs = [device.capture(work, pool)[0] for work in works]
        expected = 1
        for number in order:
            graphs[number].replay()
            expected = expected * 3 if number == 0 else 2 * expected + 1
        assert total.tolist() == [expected, expected]

    def test_memory_is_counted_and_given_back(self, device: FakeDevice) -> None:
        value, pool = on(device, 1000), device.graph_pool()
        before = device.memory().allocated
        device.reset_peak_memory()
        graph, result = device.capture(lambda: (value * 2).relu(), pool)
        assert device.memory().allocated == before + 8000  # what lies between is kept too
        assert device.peak_memory() == before + 8000
        graph.replay()
        assert device.memory().allocated == before + 8000
        graph.close()
        assert device.memory().allocated == before + 4000
        del result
        assert device.memory().allocated == before

    def test_close(self, device: FakeDevice) -> None:
        value = on(device, 2)
        graph, result = device.capture(lambda: value + 1, device.graph_pool())
        graph.replay()
        graph.close()
        graph.close()
        with pytest.raises(ClosedError, match=r"replayed after its close\(\)"):
            graph.replay()
        assert result.tolist() == [2.0, 2.0]

    def test_the_host_pays_for_one_launch(self) -> None:
        def work() -> None:
            for _ in range(10):
                value.add_(1)

        with FakeDevice(costs=Costs(kernel_us=5, launch_us=30)) as device:
            value = on(device, 4)
            graph, _ = device.capture(work, device.graph_pool())
            device.synchronize("test")
            times = [device.now_ms]
            for run in (work, graph.replay):
                run()
                times.append(device.now_ms)
            device.synchronize("test")
        assert times[1] - times[0] == pytest.approx(10 * 0.030)
        assert times[2] - times[1] == pytest.approx(0.030)
        assert device.now_ms - times[2] == pytest.approx(10 * 0.005)
        assert value.tolist() == [21.0] * 4


class TestRaces:
    """Those that are reported are in race_cases.py."""

    def test_a_report_has_the_captured_line_too(self) -> None:
        with FakeDevice(check=False) as device:
            static, transfer = on(device, 4), device.stream("transfer")
            transfer.wait_stream(device.current_stream())
            graph, _ = device.capture(lambda: static * 2, device.graph_pool())
            captured = line() - 1
            with device.use(transfer):
                device.copy(static, torch.ones(4).pin_memory())
            graph.replay()
            replayed = line() - 1
        (race,) = device.races
        assert (race.kind, race.first.operation) == ("write-read", "copy h2d")
        assert (
            f"aten::mul reads it on stream 'default' at {__file__}:{replayed} "
            f"(captured at {__file__}:{captured})"
        ) in str(race)

    def test_memory_of_a_closed_graph_is_nobodys(self, device: FakeDevice) -> None:
        value, side = on(device, 1000), device.stream("side")
        graph, result = device.capture(lambda: value * 2, device.graph_pool())
        side.wait_stream(device.current_stream())
        with device.use(side):
            graph.replay()
        graph.close()
        del result
        with device.use(device.stream("capture")):
            on(device, 1000)


class TestWatch:
    def test_it_names_what_a_graph_could_not_repeat(self, device: FakeDevice) -> None:
        value, staging = on(device, 4), torch.ones(4).pin_memory()
        value.sum().item()
        with device.watch() as found:
            value.sum().item()
            first = line() - 1
            value.copy_(staging, non_blocking=True)
            value[0] = 1.0
            torch.nn.functional.dropout(value)
        value.sum().item()
        assert [str(obstacle) for obstacle in found] == [
            f"the host waits for the device (aten::_local_scalar_dense) at {__file__}:{first}: "
            "keep the value on the device, without .item(), .cpu(), print(), `if tensor:` or a "
            "boolean mask as index",
            f"host memory is copied to the device at {__file__}:{first + 2}: make the tensor on "
            "the device, once and outside the step, or let the loader return it in the "
            "batch",
        ]

    def test_pytorch_is_told_whether_a_capture_is_under_way(self, device: FakeDevice) -> None:
        asked = torch.cuda.is_current_stream_capturing
        value = on(device, 4)
        _, inside = device.capture(lambda: (value.add_(1), asked())[1], device.graph_pool())
        assert (inside, asked()) == (True, False)
        for answer in (True, False):
            query = CaptureQuery(answer)
            with device.answering(query):
                assert asked() is answer
            assert query.asked

    def test_a_step_without_obstacles(self, device: FakeDevice) -> None:
        training = TrainedModel(device)
        training.load(0)
        with device.watch() as found:
            training.step()
        assert found == []


def test_a_graph_that_was_never_closed_leaves_no_counts_behind(fake_device: FakeDevice) -> None:
    """Memory that has the same key later would count as used by that graph, and so as freed."""
    value = torch.ones(3).to(fake_device.torch_device)
    graph, result = fake_device.capture(lambda: value * 2, fake_device.graph_pool())
    assert sum(fake_device.captured_references.values()) > 0
    del graph, result
    gc.collect()
    assert sum(fake_device.captured_references.values()) == 0
