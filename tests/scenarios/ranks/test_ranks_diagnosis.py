"""`headrace diagnose` on two gloo ranks, one of which is slow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.records import DiagnosisResult
from support.processes.forked import HEADRACE, Forked

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(os.environ["RANK"]),
                        world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    if dist.get_rank() == 1:
        time.sleep(0.03)  # slow
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_the_slow_rank_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    options = ["--warmup", 4, "--steps", 3, "--lines", 8, "--out", tmp_path / "result.json"]
    options += ["--html", tmp_path / "page.html"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in range(2):
        monkeypatch.setitem(os.environ, "RANK", str(rank))
        ranks.append(Forked(HEADRACE, "diagnose", *options, script, tmp_path / "store"))
    try:
        assert [one.wait(100) for one in ranks] == [0, 0], ranks[0].stderr.read_text("utf-8")
    finally:
        for one in ranks:
            one.kill()
    stored = json.loads((tmp_path / "result.json").read_text("utf-8"))
    result = DiagnosisResult.from_dict(stored)
    assert "rank 1 waits least for the others" in result.verdict[0]
    assert "time.sleep(0.03)  # slow" in result.verdict[1]
    first, second = result.ranks
    assert (first.rank, second.rank) == (0, 1)
    assert (first.waits_ms or 0.0) > (second.waits_ms or 0.0) + 5
    text = ranks[0].stderr.read_text("utf-8")
    assert text.count("waits for others ms") == 1
    assert ranks[1].stderr.read_text("utf-8") == ""
    assert "Ranks" in (tmp_path / "page.html").read_text("utf-8")
