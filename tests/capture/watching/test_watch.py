"""Trials of steps that ask whether they are being captured, as transformers' masks do."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.device import CaptureQuery, Device
from headrace.device.cuda import CudaDevice


class Masked(nn.Module):
    """Leaves a mask of ones out, which it finds out on the host, unless it is being captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if not torch.cuda.is_current_stream_capturing() and mask.all():
            return out
        return out * mask


class CautiousAdam(torch.optim.Adam):
    """Refuses a capture if it is not capturable, as PyTorch's optimizers did before 2.12."""

    def step(self, closure: Any = None) -> Any:
        if torch.cuda.is_current_stream_capturing():
            assert all(group["capturable"] for group in self.param_groups)
        return super().step(closure)


def batches(device: Device, count: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(5, 4, generator=generator).to(device.torch_device),
            (torch.rand(5, 1, generator=generator) < (1.0 if at % 3 else 0.5)).to(
                device.torch_device
            ),
        )
        for at in range(count)
    ]


def made(device: Device, kind: type[torch.optim.Adam] = torch.optim.Adam, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Masked().to(device.torch_device)
    return model, kind(model.parameters(), lr=0.1, **options)


def engine_results(device: Device, plan: str, loss: Any) -> tuple[Any, Any]:
    model, optimizer = made(device, fused=True)
    engine = hr.Engine(model, optimizer, loss, plan=plan, device=device)
    return engine.epoch(batches(device)).losses, engine.graphs


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch).square().mean()


def read_back(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = square(model, batch)
    return loss * 2 if loss.item() > 1e9 else loss


def test_an_engine_captures_a_step_that_reads_only_outside_captures(capturing: Device) -> None:
    plain, _ = engine_results(capturing, "pipeline", square)
    losses, graphs = engine_results(capturing, "graph", square)
    assert losses == plain
    assert (graphs.why, graphs.replays) == (None, 5)  # one batch more than usual is watched


def test_only_what_a_capture_would_read_is_reported(capturing: Device) -> None:
    plain, _ = engine_results(capturing, "pipeline", read_back)
    losses, graphs = engine_results(capturing, "graph", read_back)
    assert losses == plain
    assert graphs.replays == 0
    assert graphs.why.count("the host waits") == 1
    assert f"{__file__}:{read_back.__code__.co_firstlineno + 2}" in graphs.why


@pytest.mark.parametrize("kind", [torch.optim.Adam, CautiousAdam])
def test_a_step_of_ones_own_is_told_so_too_but_not_its_optimizer(
    capturing: Device, kind: type[torch.optim.Adam]
) -> None:
    found = []
    for graphs in (False, True):
        model, optimizer = made(capturing, kind, capturable=graphs is False)

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = square(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        called = hr.graphed(step, device=capturing) if graphs else step
        for batch in batches(capturing):
            called(batch)
        found.append(model.layer.weight.detach().to("cpu"))
    assert isinstance(called, hr.GraphedFunction)
    assert (called.report().why, called.report().replays) == (None, 5)
    assert torch.allclose(*found, atol=1e-5)


class Choosing(nn.Module):
    """Computes otherwise in a capture, and needs not: as transformers without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out * 2 if torch.cuda.is_current_stream_capturing() else out


class Waiting(Choosing):
    """Waits for the device whatever it is told."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask) * float(mask.sum() > 0)


def test_a_model_that_was_told_in_vain_says_so(capturing: Device) -> None:
    """Its trials may have drawn other numbers than the plain loop."""
    model = Waiting().to(capturing.torch_device)
    with hr.speed_up(model, device=capturing) as handle:
        for batch in batches(capturing):
            square(model, batch).backward()
        report = handle.report().parts[0]
    assert report.captures == 0
    assert "the host waits" in str(report.why)
    assert "may differ from the plain loop's" in str(report.rounding)


@pytest.mark.parametrize("kind", [Choosing, Masked])
def test_a_model_is_told_that_it_is_captured_only_if_it_waits_else(
    capturing: Device, kind: type[nn.Module]
) -> None:
    found, reports = [], []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = kind().to(capturing.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = hr.speed_up(model, optimizer, device=capturing) if graphs else None
        losses = []
        for batch in batches(capturing):
            loss = square(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append([one.to("cpu").tolist() for one in losses])
        if handle is not None:
            reports.append(handle.report().parts[0])
    assert found[0] == found[1]
    assert (reports[0].why, reports[0].captures) == (None, 1)
    assert (reports[0].rounding is None) == (kind is Choosing)


class TestCudaAnswers:
    """CUDA's part, without a GPU: only the function that PyTorch's own ones call is replaced."""

    @pytest.fixture(autouse=True)
    def _truth(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = False
        name = "_cuda_isCurrentStreamCapturing"
        monkeypatch.setattr(torch.cuda.graphs, name, lambda: self.captures)

    def test_this_thread_and_autograds_are_answered(self) -> None:
        query, others = CaptureQuery(answer=True), []
        with CudaDevice.answering(object.__new__(CudaDevice), query):
            assert not query.asked
            assert torch.cuda.is_current_stream_capturing()
            assert query.asked
            other = threading.Thread(
                target=lambda: others.append(torch.cuda.is_current_stream_capturing())
            )
            other.start()
            other.join()
            query.is_paused = True
            assert not torch.cuda.is_current_stream_capturing()
            self.captures = True
            assert torch.cuda.is_current_stream_capturing()
            self.captures = False
        assert others == [False]
        assert not torch.cuda.is_current_stream_capturing()

    def test_a_query_may_answer_in_captures(self) -> None:
        others, self.captures = [], True
        query = CaptureQuery(answer=False, in_captures=True)
        with CudaDevice.answering(object.__new__(CudaDevice), query):
            assert not torch.cuda.is_current_stream_capturing()
            other = threading.Thread(
                target=lambda: others.append(torch.cuda.is_current_stream_capturing())
            )
            other.start()
            other.join()
        assert others == [True]
        assert torch.cuda.is_current_stream_capturing()

    def test_a_query_may_only_listen(self) -> None:
        query = CaptureQuery()
        with CudaDevice.answering(object.__new__(CudaDevice), query):
            assert not torch.cuda.is_current_stream_capturing()
        assert query.asked
