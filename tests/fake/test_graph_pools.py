"""Memory of a graph pool on the fake device: what is freed goes to a later capture, and a replay of
one graph then overwrites what another one keeps there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from headrace.device import Graph
from headrace.fake import FakeDevice, fake_cuda
from support.graphs.captures import on

Capture = Callable[[Callable[[], Any]], tuple[Graph, Any]]


class Halves:
    """A model whose forward and backward are captured apart, in one pool, and its static input."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self.capture, self.device = capture, device
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        ).to(device)
        self.parameters = list(self.model.parameters())
        self.graphs: dict[str, Graph] = {}
        self.losses: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, Sequence[torch.Tensor]] = {}
        self.inputs: dict[str, torch.Tensor] = {}

    def forward(self, name: str) -> torch.Tensor:
        """Capture a forward. Returns the loss, with its autograd graph."""
        static = self.inputs[name] = torch.ones(3, 4, device=self.device)
        self.graphs[f"forward {name}"], loss = self.capture(
            lambda: self.model(static).square().sum()
        )
        self.losses[name] = loss.detach()
        return loss  # type: ignore[no-any-return]

    def backward(self, name: str, loss: torch.Tensor) -> None:
        """Capture the backward of a captured forward."""
        self.graphs[f"backward {name}"], self.gradients[name] = self.capture(
            lambda: torch.autograd.grad(loss, self.parameters)
        )

    def both(self, *names: str) -> None:
        for name in names:
            self.backward(name, self.forward(name))

    def replay(self, *graphs: str) -> None:
        for graph in graphs:
            self.graphs[graph].replay()

    def eager(self, name: str) -> tuple[float, list[list[float]]]:
        loss = self.model(self.inputs[name]).square().sum()
        found = torch.autograd.grad(loss, self.parameters)
        return loss.item(), [one.flatten().tolist() for one in found]

    def captured(self, name: str) -> tuple[float, list[list[float]]]:
        return self.losses[name].item(), [one.flatten().tolist() for one in self.gradients[name]]

    def is_poisoned(self, name: str) -> bool:
        return any(bool(one.isnan().any()) for one in self.gradients[name])


def by_the_device(device: FakeDevice) -> Capture:
    pool = device.graph_pool()
    return lambda work: device.capture(work, pool)


def by_torch() -> Capture:
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Any]) -> tuple[Graph, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = work()
        return graph, result  # type: ignore[return-value]

    return capture


@pytest.fixture(params=["FakeDevice", "fake_cuda"])
def halves(request: pytest.FixtureRequest) -> Iterator[Halves]:
    if request.param == "FakeDevice":
        with FakeDevice() as device:
            yield Halves(by_the_device(device), device.torch_device)
    else:
        with fake_cuda():
            yield Halves(by_torch(), torch.device("cuda"))


class TestForwardAndBackwardApart:
    def test_they_are_the_eager_step_bit_for_bit(self, halves: Halves) -> None:
        halves.both("A")
        for step in range(3):
            halves.inputs["A"].fill_(step + 1)
            torch.manual_seed(step)
            expected = halves.eager("A")
            torch.manual_seed(step)
            halves.replay("forward A")
            other = torch.ones(100, device=halves.device) * 2  # work between the two
            halves.replay("backward A")
            assert halves.captured("A") == expected
            assert other.sum().item() == 200

    def test_one_after_the_other_is_right(self, halves: Halves) -> None:
        halves.both("A", "B")
        for name in ("A", "B", "A"):
            torch.manual_seed(7)
            expected = halves.eager(name)
            torch.manual_seed(7)
            halves.replay(f"forward {name}", f"backward {name}")
            assert halves.captured(name) == expected

    def test_another_forward_overwrites_what_a_backward_needs(self, halves: Halves) -> None:
        halves.both("A", "B")
        halves.replay("forward A", "forward B", "backward A")
        assert halves.is_poisoned("A")
        # B's activations lie in memory that A had freed, so it works neither way round.
        halves.replay("forward B", "forward A", "backward B")
        assert halves.is_poisoned("B")

    def test_it_does_not_where_the_first_was_held_while_the_second_was_captured(
        self, halves: Halves
    ) -> None:
        losses = {name: halves.forward(name) for name in ("A", "B")}
        for name in ("B", "A"):
            halves.backward(name, losses.pop(name))
        torch.manual_seed(7)
        expected = [halves.eager(name) for name in ("A", "B")]
        torch.manual_seed(7)
        halves.replay("forward A", "forward B", "backward B", "backward A")
        assert [halves.captured(name) for name in ("A", "B")] == expected

    def test_results_that_are_held_stay(self, halves: Halves) -> None:
        halves.both("A", "B")
        halves.replay("forward A", "backward A")
        before = halves.captured("A")
        halves.replay("forward B", "backward B")
        assert halves.captured("A") == before

    def test_gradients_of_a_later_capture_lie_in_what_an_earlier_one_had_freed(
        self, halves: Halves
    ) -> None:
        halves.both("A", "B")
        halves.replay("forward B", "backward B")
        assert not halves.is_poisoned("B")
        halves.replay("forward A")
        assert halves.is_poisoned("B")

    def test_backward_into_grad(self, halves: Halves) -> None:
        loss = halves.forward("A")
        graph, _ = halves.capture(loss.backward)
        torch.manual_seed(3)
        _, expected = halves.eager("A")
        torch.manual_seed(3)
        halves.replay("forward A")
        graph.replay()
        found = [one.grad for one in halves.parameters]
        assert [one is not None and one.flatten().tolist() for one in found] == expected


def written_and_read(
    device: FakeDevice, pool: object, work: Callable[[], torch.Tensor]
) -> tuple[Graph, Graph, torch.Tensor, list[torch.Tensor]]:
    """A graph of `work`, one that copies its result, the copy, and a list that holds the result."""
    held: list[torch.Tensor] = []
    graph, _ = device.capture(lambda: held.append(work()), pool)
    reader, copied = device.capture(lambda: held[0] + 0, pool)
    return graph, reader, copied, held


class TestWhatIsShared:
    def test_memory_freed_during_its_own_capture(self, device: FakeDevice) -> None:
        value, pool = on(device, 4), device.graph_pool()
        one, result = device.capture(lambda: (value + 1) * 2, pool)
        two, other = device.capture(lambda: value * 5, pool)
        one.replay()
        two.replay()
        assert (result.tolist(), other.tolist()) == ([4.0] * 4, [5.0] * 4)
        one.replay()  # its first operation writes where the second graph may have its result
        assert result.tolist() == [4.0] * 4
        assert other.isnan().all()

    def test_memory_freed_between_captures(self, device: FakeDevice) -> None:
        value, pool = on(device, 4), device.graph_pool()
        one, reader, copied, held = written_and_read(device, pool, lambda: value * 2)
        held.clear()
        two, other = device.capture(lambda: value * 5, pool)
        for graph in (one, reader, two, reader):
            graph.replay()
        assert copied.isnan().all()
        for graph in (one, reader):
            graph.replay()
        assert copied.tolist() == [2.0] * 4
        assert other.isnan().all()

    def test_memory_freed_after_the_last_capture(self, device: FakeDevice) -> None:
        value, pool = on(device, 4), device.graph_pool()
        one, reader, copied, held = written_and_read(device, pool, lambda: value * 2)
        two, _ = device.capture(lambda: value * 5, pool)
        held.clear()
        for graph in (one, two, reader):
            graph.replay()
        assert copied.tolist() == [2.0] * 4

    @pytest.mark.parametrize("apart", ["pool", "size class", "stream"])
    def test_memory_that_no_later_capture_could_get(self, device: FakeDevice, apart: str) -> None:
        value, pool, side = on(device, 4), device.graph_pool(), device.stream("side")
        large = on(device, 1 << 19)

        def second() -> torch.Tensor:
            if apart != "stream":
                return large * 5 if apart == "size class" else value * 5
            side.wait_stream(device.current_stream())
            with device.use(side):
                made = value * 5
            device.current_stream().wait_stream(side)
            return made

        one, reader, copied, held = written_and_read(device, pool, lambda: value * 2)
        held.clear()
        two, _ = device.capture(second, device.graph_pool() if apart == "pool" else pool)
        for graph in (one, two, reader):
            graph.replay()
        assert copied.tolist() == [2.0] * 4

    def test_whole_numbers_are_poisoned_too(self, device: FakeDevice) -> None:
        value, pool = on(device, 4), device.graph_pool()
        one, reader, copied, held = written_and_read(device, pool, lambda: value.long() + 2)
        held.clear()
        two, _ = device.capture(lambda: value.long() * 5, pool)
        for graph in (one, two, reader):
            graph.replay()
        assert copied.tolist() == [-1] * 4

    def test_a_backward_is_captured_whose_forward_saved_indices(self, device: FakeDevice) -> None:
        """They are garbage then. On CUDA nobody looks at them during the capture."""
        value, pool = on(device, 2, 3).requires_grad_(), device.graph_pool()

        def forward() -> torch.Tensor:
            return value.gather(1, value.argmax(1, keepdim=True)).sum()

        first, loss = device.capture(forward, pool)
        second, (gradient,) = device.capture(lambda: torch.autograd.grad(loss, [value]), pool)
        first.replay()
        second.replay()
        assert gradient.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]

    def test_a_backward_outlives_its_forwards_graph(self, device: FakeDevice) -> None:
        """The pool keeps the memory until its last graph is closed: nothing was freed."""
        value, pool = on(device, 4).requires_grad_(), device.graph_pool()
        losses: list[torch.Tensor] = []
        first, _ = device.capture(lambda: losses.append(value.square().exp().sum()), pool)
        second, (gradient,) = device.capture(
            lambda: torch.autograd.grad(losses.pop(), [value]), pool
        )
        first.replay()
        first.close()
        second.replay()
        assert gradient.tolist() == pytest.approx([2 * 2.718281828] * 4)

    def test_a_closed_graph_gives_all_memory_back(self, device: FakeDevice) -> None:
        value, pool = on(device, 1000), device.graph_pool()
        before = device.memory().allocated
        graphs = [device.capture(lambda: (value * 2).relu().sum(), pool)[0] for _ in range(3)]
        for graph in graphs:
            graph.replay()
            graph.close()
        del graph, graphs
        gc.collect()
        assert device.memory().allocated == before


def test_indices_in_another_pool_are_no_garbage_to_a_capture() -> None:
    """PyTorch computes during a capture, on the CPU, and would refuse a class of -1."""
    with FakeDevice() as device:
        x, classes = (torch.ones(2, 3, device=device.torch_device) for _ in range(2))
        x.requires_grad_()

        def forward() -> torch.Tensor:
            return torch.nn.functional.cross_entropy(x, classes[:, 0].long() + 1)

        first, loss = device.capture(forward, device.graph_pool())
        second, gradients = device.capture(
            lambda: torch.autograd.grad(loss, [x]), device.graph_pool()
        )
        first.replay()
        second.replay()
        expected = torch.autograd.grad(forward(), [x])
        assert torch.equal(gradients[0], expected[0])
