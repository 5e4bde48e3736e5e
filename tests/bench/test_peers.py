"""Peers: the same work elsewhere, with the same losses; each where it is installed."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
import torch

from headrace.bench import Bench, entries_of, find_work, peers_of, plans_here
from headrace.bench.peers import PEERS
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import work_of
from headrace.device import Device, open_device
from headrace.errors import BenchError
from headrace.records import BenchResult
from support.training.devices import needs_cuda

SMALL = {"batch": 4, "width": 8, "layers": 2}


@pytest.fixture(params=["cpu", needs_cuda])
def real(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param)


def run(device: Device, *peers: str, options: dict[str, Any] | None = None) -> BenchResult:
    return Bench(
        find_work("mlp", SMALL | (options or {})),
        device,
        entries_of(["baseline"]),
        peers=peers_of(peers),
        steps=5,
        repeats=2,
        warmup=2,
        watched_s=0.05,
        compared_steps=6,
    ).run()


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_losses(real: Device, name: str, dropout: float) -> None:
    pytest.importorskip(name)
    result = run(real, name, options={"dropout": dropout})
    row = result.row(name)
    assert row.error is None
    assert row.kind == "peer"
    assert row.equal.verdict in ("identical", "within")
    assert row.equal.largest is not None
    assert row.equal.largest < 1e-5
    assert row.ms_per_step is not None
    assert len(row.ms_per_step.repeats) == 2
    assert row.speedup == pytest.approx(
        result.row("baseline").ms_per_step.median / row.ms_per_step.median  # type: ignore[union-attr]
    )
    assert row.waits is None  # nobody counts them there
    assert row.score is None
    assert row.per_s is not None
    assert row.cpu_share is not None


@pytest.mark.parametrize("real", [needs_cuda], indirect=True)
def test_reduce_overhead(real: Device) -> None:
    result = run(real, "reduce-overhead")
    assert result.row("reduce-overhead").error is None
    assert result.row("reduce-overhead").equal.verdict in ("identical", "within")
    with_dropout = run(real, "reduce-overhead", options={"dropout": 0.3})
    assert with_dropout.row("reduce-overhead").equal.verdict == "not compared"


@pytest.mark.parametrize("real", [needs_cuda], indirect=True)
def test_max_is_compared_without_dropout(real: Device) -> None:
    result = Bench(
        find_work("mlp", SMALL | {"dropout": 0.3}),
        real,
        entries_of(["baseline", "graph", "max"]),
        steps=5,
        repeats=2,
        watched_s=0.05,
    ).run()
    assert plans_here(real)[-1] == "max"
    assert result.row("graph").equal.verdict == "identical"
    assert result.row("max").equal.verdict in ("identical", "within")
    assert "without dropout" in result.row("max").equal.why
    assert not result.failed
    gpu = result.row("graph").gpu
    assert gpu is not None
    assert 0 < gpu.busy_share <= 1
    assert result.row("graph").timeline is not None


def test_one_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ImportError("a library of another version")

    peer = PEERS["reduce-overhead"]
    monkeypatch.setitem(PEERS, "reduce-overhead", type(peer)(peer.name, None, broken))
    result = run(open_device("cpu"), "reduce-overhead")
    assert result.row("reduce-overhead").error is not None
    assert "another version" in result.row("reduce-overhead").error
    assert result.row("baseline").error is None
    assert result.failed


def test_unknown_and_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match=r"no peer 'lightnin' \(did you mean 'lightning'\?\)"):
        peers_of(["lightnin"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'headrace\[transformers\]'"):
        peers_of(["accelerate"])
    assert [peer.name for peer in peers_of(["reduce-overhead"])] == ["reduce-overhead"]


def test_fp16_needs_a_scaler() -> None:
    with pytest.raises(BenchError, match="expected bf16"):
        PEERS["reduce-overhead"].make(find_work("mlp"), open_device("cpu"), "fp16", 0)


def test_losses_are_read_in_one_go() -> None:
    pytest.importorskip("accelerate")
    way: Any = PEERS["accelerate"].make(find_work("mlp", SMALL), open_device("cpu"), "fp32", 0)
    assert way._read([torch.tensor(1.5), torch.tensor(2.5)]) == (1.5, 2.5)
    way.close()


def test_ctrl_c_in_lightning_is_an_interrupt_as_any_other() -> None:
    pytest.importorskip("lightning")
    before = signal.getsignal(signal.SIGINT)
    calls = itertools.count()

    def make() -> ModelTraining:
        model = torch.nn.Linear(3, 1)

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            if next(calls) == 2:
                raise KeyboardInterrupt
            found: torch.Tensor = model(batch).mean()
            return found

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ModelTraining(model, optimizer, loss, [torch.ones(2, 3)])

    way = PEERS["lightning"].make(work_of(make), open_device("cpu"), "fp32", 0)
    with pytest.raises(KeyboardInterrupt):
        way.run(5)
    assert signal.getsignal(signal.SIGINT) is before
    assert way.trained == 2
    way.close()
