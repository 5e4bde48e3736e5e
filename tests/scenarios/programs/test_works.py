"""The eleven works of benchmarks/inputs/works: every plan has the losses of the plain script."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from headrace.bench import find_work
from headrace.bench.endless_batches import EndlessBatches
from headrace.capture import GraphReport
from headrace.device import Device, deterministic_kernels, open_device
from headrace.fake import FakeDevice
from headrace.plan import Plan
from support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "inputs" / "works"
WORKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "samples")
NEEDS = {
    "bert_base": "transformers",
    "convnext_tiny": "timm",
    "gpt2_small": "transformers",
    "vit_small": "timm",
}
STEPS = 5  # two batches are watched, then one is captured


def work_called(name: str) -> Any:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return find_work(f"{FOLDER / name}.py:work", {"tiny": True, "workers": 0})


def plain_losses(name: str) -> tuple[float, ...]:
    """The losses of the plain script, on the CPU."""
    module = work_called(name).build.__globals__
    losses = module["train"](torch.device("cpu"), tiny=True, workers=0)
    with deterministic_kernels(True):
        return tuple(loss.item() for loss in islice(losses, STEPS))


def test_there_are_eleven() -> None:
    assert len(WORKS) == 11


def test_the_plain_script_prints_every_tenth_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = work_called("dlrm").build.__globals__
    line = "dlrm.py --tiny --steps 12 --device cpu --workers 0"
    monkeypatch.setattr("sys.argv", line.split())
    module["run"](module["__doc__"], module["train"])
    steps = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["step 10", "step 12"]


@pytest.mark.parametrize("name", WORKS)
def test_every_plan_has_the_losses_of_the_plain_script(name: str) -> None:
    expected = plain_losses(name)
    assert losses_of(name, "pipeline", open_device("cpu"))[0] == expected
    with FakeDevice() as fake:
        assert losses_of(name, "pipeline", fake, steps=2)[0] == expected[:2]
        losses, report = losses_of(name, "graph", fake)
    assert losses == expected
    assert report is not None
    assert report.why is None
    assert report.replays >= STEPS - 3


def losses_of(
    name: str, plan: str, device: Device, steps: int = STEPS
) -> tuple[tuple[float, ...], GraphReport | None]:
    """The losses of a work under a plan, and what was captured."""
    work = work_called(name)
    made = work.make(device)
    chosen = Plan.preset(plan).replace(precision=work.build.__globals__["PRECISION"])
    engine = made.engine(device, chosen, deterministic=True)
    return engine.epoch(EndlessBatches(made.loader).take(steps)).losses, engine.graphs
