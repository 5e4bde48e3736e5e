"""PyTorch's own stream sanitizer, on CUDA: our stream code is clean, and a seeded bug is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from support.paths import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A slot is read on one stream while it is filled on another: with and without the wait.
SEEDED = """
import sys, torch
from headrace.device import open_device
device = open_device("cuda")
compute, transfer = device.current_stream(), device.stream("transfer")
slot = torch.zeros(1 << 20, device=device.torch_device)
transfer.wait_stream(compute)
with device.use(transfer):
    slot.add_(1)
    filled = device.event()
    filled.record()
if sys.argv[1] == "correct":
    compute.wait_event(filled)
slot.mul_(2)
device.synchronize("test")
"""


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_seeded_bug_is_reported_and_its_twin_is_not() -> None:
    bug, correct = sanitized("-c", SEEDED, "bug"), sanitized("-c", SEEDED, "correct")
    assert bug.returncode != 0
    assert "possible data race" in bug.stderr
    assert correct.returncode == 0, correct.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (
            [
                "tests/device/test_base.py",
                "tests/device/test_opening.py",
                "tests/device/test_pinned.py",
                "tests/device/test_stream_manager.py",
            ],
            "cuda",
        ),
        (["tests/data/test_prefetcher.py", "tests/engine/values/test_deferred.py"], "cuda"),
        (
            ["tests/engine/test_engine.py"],
            "cuda and not graph and (TestSameLosses or TestLoop or TestEvaluate)",
        ),
    ],
    ids=["seam", "parts", "engine"],
)
def test_our_own_tests_are_clean(files: list[str], chosen: str) -> None:
    """All but what the sanitizer cannot follow: it takes no notice of graphs, and its hooks fail in
    forked workers, and where device memory is freed while an exception is under way (a
    generator's closing is one)."""
    run = sanitized(
        "-m", "pytest", "-m", "not unsanitized", "-k", chosen, "-p", "no:cacheprovider", *files
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert "data race" not in run.stdout + run.stderr
    assert " passed" in run.stdout
