"""Which operators make the host wait on CUDA.

One table for both devices: the fake one must find a wait exactly where `torch.cuda`'s
`set_sync_debug_mode("error")` raises, and where thrust waits inside an operator, which that mode
does not see.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import rnn
from torch.optim.swa_utils import AveragedModel


class Inputs:
    """Tensors on the device, made before the operator runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

        def here(values: torch.Tensor) -> torch.Tensor:
            return values.to(device)

        self.x = here(torch.tensor([0.5, 1.5, -2.0, 3.0, 0.25, 1.0]))
        self.p = here(torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2, 0.1]))
        self.m = here(torch.arange(16.0).view(4, 4) + 10 * torch.eye(4))
        self.spd = here(torch.eye(4) * 3 + 0.5)
        self.i = here(torch.tensor([0, 1, 2, 2, 1, 0]))
        self.mask = here(torch.tensor([True, False, True, False, True, True]))
        self.n = here(torch.tensor(2))
        self.s = here(torch.tensor(1.5))
        self.true = here(torch.tensor(True))
        self.grid = here(torch.ones(2, 3, 8, 8))
        self.sparse = torch.sparse_coo_tensor(self.i[None], self.x, (3,), check_invariants=False)
        self.host = torch.ones(6)
        self.host_i = torch.tensor([0, 2])
        self.pinned = torch.ones(6).pin_memory()
        self.weight = here(torch.ones(6)).requires_grad_()
        self.weight.grad = torch.ones_like(self.weight)
        self.layer = torch.nn.Linear(6, 6).to(device)
        self.average = AveragedModel(self.layer)
        self.average.update_parameters(self.layer)  # the first time, it copies the weights
        self.lstm = torch.nn.LSTM(4, 5).to(device)
        self.scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
        self.scaler.scale(self.s)


@dataclass(frozen=True)
class Case:
    code: str
    run: Callable[[Inputs], object]
    waits: bool

    @property
    def needs_cuda(self) -> bool:
        """Whether it asks PyTorch for a device of this name."""
        return "scaler" in self.code

    @property
    def needs_grad(self) -> bool:
        return "backward" in self.code

    def __str__(self) -> str:
        return self.code


_NAMES = {"torch": torch, "F": functional, "rnn": rnn, "io": io, "copy": copy}

_WAITS = """
a.x.sum().item()
float(a.s)
int(a.n)
bool(a.true)
a.x.tolist()
a.x.cpu()
a.x.to("cpu")
str(a.x)
f"{a.s:.3f}"
1 if a.s > 0 else 0
max(a.x[0], a.x[1])
a.s in [a.n, a.s]
range(a.n)
a.x[: a.n]
a.x[a.n]
[1, 2, 3][a.n]
a.x[a.mask]
a.x.__setitem__(a.mask, a.p[:4])
a.x.__setitem__(a.mask, a.s)
a.x.__setitem__(a.i[:2], 1.0)
a.x.__setitem__(a.i[:2], torch.tensor(1.0))
a.m.__setitem__((slice(None), a.i[:2]), 1.0)
a.x.index_put_((a.i[:2],), torch.tensor(1.0))
a.x.nonzero()
torch.argwhere(a.x)
torch.where(a.mask)
a.x.masked_select(a.mask)
a.i.unique()
a.i.unique(return_counts=True)
a.i.unique_consecutive()
torch.unique(a.m, dim=0)
a.x.repeat_interleave(a.i)
a.i.bincount()
a.i.bincount(minlength=8)
a.x.histc(4)
torch.equal(a.x, a.p)
torch.equal(a.x, a.x.clone())
a.x.masked_fill(a.mask, a.s)
a.x.masked_fill_(a.mask, a.s)
a.x.index_fill(0, a.i, a.s)
torch.allclose(a.x, a.x)
torch.is_nonzero(a.s)
torch.isin(a.i, torch.arange(64, device=a.device))
torch.linspace(a.s, 3.0, 4, device=a.device)
a.x.add(a.p, alpha=a.s)
F.one_hot(a.i)
torch.arange(a.n)
torch.full((2,), a.s.item(), device=a.device)
torch.tensor([1.0, 2.0], device=a.device)
torch.tensor(1.0, device=a.device)
torch.tensor([a.s, a.s])
a.x.numpy(force=True)
torch.as_tensor([1.0, 2.0], device=a.device)
a.x.new_tensor([1.0, 2.0])
torch.as_tensor(a.x, device="cpu")
torch.as_tensor(a.host, device=a.device)
a.x.copy_(a.host)
a.x.copy_(a.pinned)
a.host.copy_(a.x)
a.host.to(a.device)
a.x[a.host_i]
a.x.__setitem__(a.host_i, 1.0)
torch.linalg.cholesky(a.spd)
torch.linalg.matrix_exp(a.spd)
torch.linalg.inv(a.m)
torch.linalg.solve(a.m, a.m)
torch.linalg.eigh(a.spd)
torch.linalg.svd(a.m)
torch.linalg.lu_factor(a.m)
torch.linalg.lstsq(a.m, a.m)
torch.linalg.pinv(a.m)
torch.normal(a.x, a.p)
torch.save(a.x, io.BytesIO())
a.p.split(a.i.tolist())
torch.nn.utils.clip_grad_norm_([a.weight], 1.0, error_if_nonfinite=True)
torch.distributions.Normal(a.x, a.p, validate_args=True)
a.scaler.step(torch.optim.SGD([a.weight], lr=0.1))
torch.combinations(a.x)
torch.unravel_index(a.i, (2, 3))
a.x.to_sparse()
a.m.to_sparse_csr()
a.sparse.coalesce()
a.layer.weight.isnan().any().item()
a.average.update_parameters(a.layer)
"""

_NO_WAITS = """
torch.cholesky_inverse(a.spd)
F.embedding(a.i, a.m, max_norm=1.0)
(a.x * 2).sum()
a.x + a.s
a.x * torch.tensor(2.0)
torch.where(a.mask, a.x, -a.x)
torch.where(a.mask, a.x, 0.0)
a.x.__setitem__(a.mask, 0.5)
a.x.__setitem__(a.mask, torch.tensor(0.5))
a.x.__setitem__(slice(0, 3), 0.5)
a.m.__setitem__(0, 0.5)
a.x.__setitem__(a.i[:2], a.p[:2])
a.x.__setitem__(a.i[:2], a.s)
a.x.masked_fill(a.mask, 0.0)
a.x.masked_fill(a.mask, torch.tensor(0.5))
a.x.index_fill(0, a.i, torch.tensor(0.5))
a.x.masked_scatter(a.mask, a.p)
a.x.index_put_((a.i,), a.p, accumulate=True)
a.x.index_put_((a.i[:3],), a.p[:3])
a.x[a.i]
a.x[1:3]
a.x[0]
a.x[None, ..., ::2]
a.x.index_select(0, a.i)
a.x.index_add(0, a.i, a.p)
a.x.index_copy(0, a.i, a.p)
a.x.index_fill(0, a.i, 1.0)
a.x.gather(0, a.i)
a.x.scatter(0, a.i, a.p)
a.x.scatter_add(0, a.i, a.p)
a.x.take(a.i)
torch.nonzero_static(a.x, size=6)
a.x.repeat_interleave(a.i, output_size=6)
a.x.repeat_interleave(2)
F.one_hot(a.i, num_classes=3)
a.x.histc(4, min=0, max=3)
a.x.topk(2)
a.x.sort()
a.x.argsort()
a.x.median()
a.x.kthvalue(2)
a.x.max(0)
a.x.cumsum(0)
a.x.logsumexp(0)
a.x.isnan().any()
a.x.count_nonzero()
torch.isclose(a.x, a.x)
torch.equal(a.x, a.x)
torch.equal(a.x, a.x[:3])
torch.isin(a.x, a.s)
torch.isin(a.x, 1.5)
torch.quantile(a.x, 0.5)
torch.quantile(a.x, a.p)
torch.nanquantile(a.x, a.p)
torch.searchsorted(a.p, a.x)
torch.bucketize(a.x, a.p)
torch.multinomial(a.p, 4, replacement=True)
torch.multinomial(a.p, 2)
torch.bernoulli(a.p)
torch.rand(4, device=a.device)
torch.randn_like(a.x)
torch.randint(0, 3, (4,), device=a.device)
torch.randperm(6, device=a.device)
torch.normal(a.x, 1.0)
a.x.exponential_()
F.dropout(a.x, 0.5)
torch.zeros(3, device=a.device)
torch.full((2,), 1.5, device=a.device)
torch.arange(6, device=a.device)
torch.scalar_tensor(1.5, device=a.device)
torch.empty_like(a.x)
torch.cdist(a.m, a.m)
torch.cat([a.x, a.p])
torch.stack([a.x, a.p])
a.x.split([2, 4])
a.x.chunk(3)
list(a.x)
a.x.unbind()
len(a.x)
a.x.to("cpu", non_blocking=True)
a.x.copy_(a.pinned, non_blocking=True)
a.pinned.copy_(a.x, non_blocking=True)
a.pinned.to(a.device, non_blocking=True)
a.x.to(torch.float64)
a.x.clone()
copy.copy(a.x)
copy.deepcopy(a.x)
a.x.resize_(3)
torch.linalg.cholesky_ex(a.spd)
torch.linalg.inv_ex(a.m)
torch.linalg.solve_ex(a.m, a.m)
torch.linalg.qr(a.m)
torch.linalg.norm(a.m)
a.m @ a.m
F.cross_entropy(a.m, a.i[:4])
F.nll_loss(a.m.log_softmax(1), a.i[:4])
F.embedding(a.i, a.m)
F.embedding_bag(a.i, a.m, a.i[:1])
F.mse_loss(a.x, a.p)
F.conv2d(a.grid, a.grid[:, :, :3, :3])
F.max_pool2d(a.grid, 2)
F.interpolate(a.grid, scale_factor=2)
F.layer_norm(a.m, (4,))
F.batch_norm(a.m, a.p[:4], a.x[:4], training=True)
F.scaled_dot_product_attention(a.grid, a.grid, a.grid)
F.pad(a.x, (1, 1))
rnn.pad_sequence([a.x, a.x[:3]])
rnn.pack_padded_sequence(a.grid[0], torch.tensor([3, 3, 2, 2, 1, 1, 1, 1]))
a.lstm(a.grid[0, :, :, :4])
a.layer(a.x).sum().backward()
a.scaler.step(torch.optim.AdamW([a.weight], fused=True))
a.scaler.unscale_(torch.optim.SGD([a.weight], lr=0.1))
a.scaler.scale(a.s)
torch.nn.utils.clip_grad_norm_([a.weight], 1.0)
torch.nn.utils.clip_grad_value_([a.weight], 1.0)
torch.optim.SGD([a.weight], lr=0.1, momentum=0.9).step()
torch.optim.AdamW([a.weight], fused=True).step()
torch.optim.AdamW([a.weight], foreach=True).step()
torch.distributions.Normal(a.x, a.p, validate_args=False).rsample()
"""


def _cases() -> Iterator[Case]:
    for text, waits in ((_WAITS, True), (_NO_WAITS, False)):
        for code in text.strip().splitlines():
            run: Any = eval(compile(f"lambda a: {code}", f"<{code}>", "eval"), dict(_NAMES))
            yield Case(code, run, waits)


CASES = list(_cases())
