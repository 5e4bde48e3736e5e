"""Kernels that compute the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Use deterministic kernels inside the block. Operations without one raise."""
    if not wanted:
        yield
        return
    # cuBLAS reads this at its first use. Without it, PyTorch raises.
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
