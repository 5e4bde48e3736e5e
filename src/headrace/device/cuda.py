"""CUDA (and ROCm, which PyTorch gives the same name): the only file that names `torch.cuda`."""

from __future__ import annotations

from typing import Any

import torch

from headrace.device.accelerator import AcceleratorDevice


class CudaDevice(AcceleratorDevice):
    def _raw_event(self, timing: bool) -> Any:
        # blocking: a host that waits sleeps instead of spinning on a core the loader needs.
        # torch.Event(blocking=True) would ignore the flag, so it is CUDA's own class.
        return torch.cuda.Event(enable_timing=timing, blocking=True)
