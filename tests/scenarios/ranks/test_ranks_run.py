"""`headrace run` on two gloo ranks: they train as with `python`, and rank 0 alone speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes.forked import HEADRACE, Forked

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(os.environ["RANK"]),
                        world_size=2)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)).to(device)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(6, 4).to(device)).square().mean().backward()
    optimizer.step()
print([float(p.detach().double().sum()) for p in net.parameters()])
dist.destroy_process_group()
"""
# As with `python`, what the script holds lives to the end: a process group that is deleted waits
# for its threads, and they may wait for Python.
PLAIN = """
import sys
del sys.argv[0]
sys.script = {"__name__": "__main__"}
with open(sys.argv[0], encoding="utf-8") as file:
    exec(file.read(), sys.script)
"""


def trained(code: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> list[Forked]:
    """Two ranks that have run."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(Forked(code, *arguments))
    try:
        assert [one.wait(50) for one in ranks] == [0, 0], ranks[0].stderr.read_text("utf-8")
    finally:
        for one in ranks:
            one.kill()
    return ranks


def test_ranks_train_as_with_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    plain = trained(PLAIN, "train.py", tmp_path / "plain", monkeypatch=monkeypatch)
    options = ("run", "--fake", "--after", 3)
    ranks = trained(HEADRACE, *options, "train.py", tmp_path / "store", monkeypatch=monkeypatch)
    expected = plain[0].stdout.read_text("utf-8")
    assert expected.startswith("[")
    assert [one.stdout.read_text("utf-8") for one in (*plain, *ranks)] == [expected] * 4
    told = ranks[0].stderr.read_text("utf-8")
    assert "runs as it is, because it is wrapped in DDP, which averages gradients by hooks" in told
    assert "SGD (train.py:20) is replayed as a graph from now on" in told
    assert "headrace" not in ranks[1].stderr.read_text("utf-8")
