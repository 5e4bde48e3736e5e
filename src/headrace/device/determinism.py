"""Kernels that give the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside the block, errors where PyTorch has none."""
    if not wanted:
        yield
        return
    # cuBLAS reads this when it is first used; without it PyTorch refuses.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    was = (cudnn.deterministic, cudnn.benchmark)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        cudnn.deterministic, cudnn.benchmark = was
