"""A CUDA device for programs written against `torch.cuda`, on a machine without one.

    with fake_cuda():                      # raises RaceError at the end if there were races
        train()                            # torch.cuda.Stream(), x.cuda(non_blocking=True), …

In: a program that uses `torch.cuda`, unchanged. Out: the same numbers, computed on the CPU, and the
races of its streams. `namespace.py` is the table of all that is replaced in PyTorch meanwhile.
"""

from __future__ import annotations

from headrace.fake.cuda.block import fake_cuda
from headrace.fake.cuda.device import FakeCuda

__all__ = ["FakeCuda", "fake_cuda"]
