"""Devices as test parameters."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
