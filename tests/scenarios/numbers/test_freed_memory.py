"""A replay uses no memory that PyTorch may free.

Before each replay all that PyTorch can free is freed and filled with a pattern, in two ways: as
another program would find it, after `empty_cache`, or handed out by the allocator at once. Then
losses and weights are those of an undisturbed run, and the pattern is untouched.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headrace as hr
from headrace.device import open_device
from headrace.device.cuda_graphs import CudaGraph
from headrace.errors import StepError
from support.translation.trainers import new, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PATTERN = 0x5A5A5A5A
SIZES = [1 << 9, 1 << 16, 1 << 20, 1 << 23, 1 << 25]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 4, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.reshape(-1, 4, 16, 16)
        return self.second(functional.relu(self.norm(self.first(images))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.reshape(-1, 16, 64)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            parts = self.project(words).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*parts.unbind(0), dropout_p=0.1)
            return self.out(seen.transpose(1, 2).flatten(2)).float()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 64, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x.reshape(-1, 16, 64))[0]


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.mix = nn.Parameter(torch.ones(501)), nn.Linear(1000, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x[:, :1000]) * self.gain
        return self.mix(torch.fft.irfft(spectrum, n=1000))


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = self.weight @ self.weight.T + torch.eye(32, device=x.device)
        return torch.linalg.solve_triangular(square.tril(), x[:, :32].T, upper=False).T


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "matrix products": dense,
    "convolutions": Convolutions,
    "attention": Attention,
    "recurrent": Recurrent,
    "fft": Spectrum,
    "solver": Solver,
}


class Pattern:
    """Memory with a pattern, taken from what PyTorch could free."""

    def __init__(self, *, unmap: bool) -> None:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        freed = torch.cuda.memory_reserved()
        if unmap:
            torch.cuda.empty_cache()
        freed -= torch.cuda.memory_reserved()
        self.blocks: list[torch.Tensor] = []
        current = torch.cuda.current_stream()
        named = [raw for _, raw in open_device("cuda").named_streams()]
        for stream in (current, *named):
            with torch.cuda.stream(stream):
                self._take(freed)
        torch.cuda.synchronize()

    def _take(self, nbytes: int) -> None:
        """Take what the allocator has for this stream, in blocks of each size, and `nbytes`."""
        for size in reversed(SIZES):
            before, taken = torch.cuda.memory_reserved(), 0
            while torch.cuda.memory_reserved() == before or taken < min(nbytes, 1 << 28):
                taken += size if size >= 1 << 20 else nbytes + size
                self.blocks.append(
                    torch.full((size // 4,), PATTERN, dtype=torch.int32, device="cuda")
                )

    def require_untouched(self) -> None:
        torch.cuda.synchronize()
        wrong = torch.stack([(one != PATTERN).any() for one in self.blocks]).tolist()
        touched = [
            len(one) * 4 for one, is_wrong in zip(self.blocks, wrong, strict=True) if is_wrong
        ]
        assert not touched, f"a replay wrote to {len(touched)} blocks of others: {touched[:5]}"


class Disturbance:
    """Frees and fills before the first replays of each graph, if it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unmap: bool | None = None
        self.times = 0
        replay = CudaGraph.replay
        seen: weakref.WeakKeyDictionary[CudaGraph, int] = weakref.WeakKeyDictionary()

        def disturbed(graph: CudaGraph) -> None:
            seen[graph] = seen.get(graph, 0) + 1
            if self.unmap is None or seen[graph] > 3 or self.times == 12:
                replay(graph)
                return
            pattern = Pattern(unmap=self.unmap)
            replay(graph)
            pattern.require_untouched()
            self.times += 1

        monkeypatch.setattr(CudaGraph, "replay", disturbed)


@pytest.fixture
def disturbance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturbance]:
    # Two runs are compared: each must use the same kernels.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    yield Disturbance(monkeypatch)
    torch.use_deterministic_algorithms(False)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train(model: nn.Module, how: str) -> tuple[list[float], torch.Tensor]:
    """Train for twelve batches. Returns the losses and all weights."""
    model.cuda()
    batches = list(torch.randn(12, 8, 1024, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[float]
    if how == "graphed":

        @hr.graphed
        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [float(step(batch.cuda())) for batch in batches]
        replays = step.replays
    else:
        engine = hr.Engine(model, optimizer, loss_of, plan=how)
        losses = engine.epoch(batches).losses
        replays = 0 if engine.graphs is None else engine.graphs.replays
    assert replays >= 4
    return losses, torch.cat([one.detach().flatten().cpu() for one in model.parameters()])


# Compiling takes long.
CASES = [(name, how) for name in MODELS for how in ("graph", "graphed")]
CASES += [("matrix products", "max"), ("convolutions", "max"), ("attention", "max")]


@pytest.mark.parametrize("unmap", [True, False], ids=["unmapped", "handed on"])
@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_replay_neither_reads_nor_writes_freed_memory(
    name: str, how: str, unmap: bool, disturbance: Disturbance
) -> None:
    results = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        disturbance.unmap = unmap if disturbed else None
        results.append(train(MODELS[name](), how))
    assert disturbance.times >= 3
    (losses, weights), (others, other_weights) = results
    assert losses == others
    assert torch.equal(weights, other_weights)


@pytest.mark.parametrize("packed", ["on", "off"])
def test_training_and_decoding_a_translator(
    packed: str, corpus: Path, tmp_path: Path, disturbance: Disturbance
) -> None:
    """Validation decodes with graphs; the updates are graphs of padded or packed batches."""
    found = []
    for disturbed in (False, True):
        disturbance.unmap = True if disturbed else None
        trainer = new(
            corpus,
            tmp_path,
            f"{packed}-{disturbed}",
            device="cuda",
            plan="graph",
            packed=packed,
            tokens=200,
            dropout=0.1,
            epochs=3,
        )
        trainer.run()
        found.append(weights_of(tmp_path / f"{packed}-{disturbed}"))
    assert disturbance.times >= 3
    assert found[0] == found[1]


def test_a_compiled_model_that_records_graphs_beside_an_engine() -> None:
    """`reduce-overhead` frees cuBLAS's workspaces and unmaps unused memory at each recording."""
    batches = list(torch.randn(12, 8, 1024, generator=torch.Generator().manual_seed(0)))
    found = []
    for has_neighbor in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, other = dense().cuda(), nn.Linear(1024, 512).cuda()
        engine = hr.Engine(
            model, torch.optim.AdamW(model.parameters(), fused=True), loss_of, plan="graph"
        )
        neighbor = torch.optim.AdamW(other.parameters(), fused=True)
        compiled: Any = torch.compile(other, mode="reduce-overhead")
        losses = []
        for _ in range(3):
            losses += engine.epoch(batches).losses
            for batch in batches if has_neighbor else ():
                loss_of(compiled, batch.cuda()).backward()
                neighbor.step()
                neighbor.zero_grad()
        assert engine.graphs is not None
        assert engine.graphs.replays > 24
        found.append(losses)
    assert found[0] == found[1]


def test_plans_of_fft_that_were_freed() -> None:
    """A graph launches kernels that belong to these plans: launching it would crash the process."""
    model = Spectrum().cuda()
    engine = hr.Engine(
        model, torch.optim.AdamW(model.parameters(), fused=True), loss_of, plan="graph"
    )
    batches = list(torch.randn(12, 8, 1024))
    engine.epoch(batches)
    torch.backends.cuda.cufft_plan_cache.clear()
    with pytest.raises(StepError, match=r"cufft_plan_cache\.clear\(\)"):
        engine.epoch(batches)
