"""Lets torchvision be imported beside a PyTorch without CUDA.

The torchvision on PyPI is built for CUDA: beside a CPU build of PyTorch its library does not load,
and `import torchvision` then fails at two operators that the library would have defined. timm needs
torchvision; transformers and torchmetrics (so Lightning) import it if it is there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_DEFINED: list[torch.library.Library] = []  # an operator lives as long as its library


def define_missing() -> None:
    """Define the operators, without kernels, if torchvision is installed and its library does not
    load. Call this before anything imports torchvision."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _DEFINED:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DEFINED.append(operators)
