"""Whole scripts on a GPU; `tests/cli/test_diagnose.py` has the same without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.diagnosis import Settings, diagnose_program, text_of
from headrace.diagnosis.what_if import MAX_ERROR

SCRIPT = """
import json, sys
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(256, 1024).pin_memory()
while True:
    loss = model(x.to("cuda", non_blocking=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sys.argv[1] == "reads":
        loss.item()
    else:
        json.dumps([0.5] * 40_000)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_script_on_a_gpu_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    settings = Settings(warmup=5, clean=10, profiled=5)
    result = diagnose_program(str(script), ["reads"], settings=settings)
    assert result.outcome == "complete", (result.missing, text_of(result))
    assert result.parts is not None
    assert result.step_ms is not None
    assert result.parts.total == pytest.approx(result.step_ms)
    assert result.waits_per_step == result.waits_in_trace == 1.0
    (line,) = result.lines
    assert line.line is not None
    assert (line.line.text, line.form) == ("loss.item()", "item")
    assert line.blocked_ms is not None
    assert result.replay_error is not None
    # If other tests use the GPU, too, the replay may be further off. Then nothing is predicted.
    predicted = ["without all waits", "with the plan pipeline"]
    holds = result.replay_error <= MAX_ERROR
    assert [one.change for one in result.predictions][:2] == (predicted if holds else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_python_between_launches_has_its_line_on_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    settings = Settings(warmup=5, clean=10, profiled=5)
    result = diagnose_program(str(script), ["writes"], settings=settings)
    assert result.outcome == "complete", (result.missing, text_of(result))
    assert result.parts is not None
    assert result.parts.host > 0.2 * result.parts.total, text_of(result)
    longest = result.python_lines[0]
    assert longest.line.text == "json.dumps([0.5] * 40_000)"
    assert longest.idle_ms > 0.5 * result.parts.host
