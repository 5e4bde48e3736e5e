"""Gradients that are elsewhere in each step, copied to where an optimizer's graphs read them.

A graphed model's backward leaves its gradients in the same memory each time. An eager one does not:
that of a model that cannot be captured, or of the parts of it that are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from headrace.errors import CaptureError

# Copying takes the device time and memory, which a large model cannot spare.
_MAX_BYTES = 256_000_000


class GradientCopies:
    """Memory for the gradients of some parameters, which all graphs of their optimizer share."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._own: dict[int, torch.Tensor] = {}

    def make(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make memory for these gradients. Raises `CaptureError` if they cannot be copied."""
        there = [one for one in gradients if one is not None]
        if any(one.layout is not torch.strided for one in there):
            raise CaptureError("some of its gradients are sparse")
        if sum(one.nbytes for one in there) > _MAX_BYTES:
            raise CaptureError(
                "its gradients are in other memory in each step, as an eager backward leaves them, "
                f"and are more than the {_MAX_BYTES / 1e6:.0f} MB that are copied for a graph"
            )
        for at, one in enumerate(gradients):
            if one is not None and at not in self._own:
                self._own[at] = torch.empty_like(one)

    @contextmanager
    def in_place(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """In the block, the parameters' gradients are the copies. Raises `CaptureError` if the
        block writes to them: the user would not see it."""
        there = [at for at, one in enumerate(gradients) if one is not None]
        versions = [self._own[at]._version for at in there]
        try:
            for at in there:
                self._parameters[at].grad = self._own[at]
            yield
        finally:
            for at in there:
                self._parameters[at].grad = gradients[at]
        if versions != [self._own[at]._version for at in there]:
            raise CaptureError(
                "its step writes to its gradients, which are in other memory each time, as an "
                "eager backward leaves them"
            )

    def write(self) -> None:
        """Copy the present gradients."""
        pairs = [(one, self._parameters[at].grad) for at, one in self._own.items()]
        there = [(one, gradient) for one, gradient in pairs if gradient is not None]
        with torch.no_grad():
            torch._foreach_copy_([one for one, _ in there], [other for _, other in there])
