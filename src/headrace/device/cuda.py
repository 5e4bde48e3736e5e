"""CUDA (and ROCm, which PyTorch gives the same name): the only file that names `torch.cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headrace.device.accelerator import AcceleratorDevice


class CudaDevice(AcceleratorDevice):
    @contextmanager
    def numerics(self, precision: str) -> Iterator[None]:
        # One of PyTorch's two ways to say it, throughout: mixing them raises.
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = (matmul.allow_tf32, cudnn.allow_tf32)
        matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    def annotate(self, name: str) -> AbstractContextManager[object]:
        annotation: AbstractContextManager[object] = torch.cuda.nvtx.range(name)
        return annotation

    def _raw_event(self, timing: bool) -> Any:
        # blocking: a host that waits sleeps instead of spinning on a core the loader needs.
        # torch.Event(blocking=True) would ignore the flag, so it is CUDA's own class.
        return torch.cuda.Event(enable_timing=timing, blocking=True)
