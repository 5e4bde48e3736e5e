"""Random generators of the fake CUDA device.

They are of the host's kind, since PyTorch computes on CPU tensors, but not the host's: as on a GPU,
what the device draws does not move the host's generator on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.fake.cuda import state

_RealGenerator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _RealGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if named.type != "cuda":
            return _RealGenerator(named)
        state.check_index(named)
        return CudaGenerator()


class Generator(metaclass=_AnyGenerator):
    """Replaces `torch.Generator`: `Generator("cuda")` is a generator that says it is on cuda."""


class CudaGenerator(_RealGenerator):
    """A generator of the host's kind that says it is on cuda."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def clone_state(self) -> Any:
        other = CudaGenerator()
        other.set_state(self.get_state())
        return other

    def graphsafe_get_state(self) -> Any:
        return self.clone_state()

    def graphsafe_set_state(self, state: torch.Generator) -> Any:
        self.set_state(state.get_state())
        return self

    def get_offset(self) -> int:
        raise state.not_emulated("Generator.get_offset()")

    def set_offset(self, offset: int) -> Any:
        raise state.not_emulated("Generator.set_offset()")

    def __reduce__(self) -> Any:
        raise TypeError("a generator on cuda cannot be pickled")


def is_cuda_generator(generator: object) -> bool:
    return isinstance(generator, CudaGenerator)


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Draw from a generator where PyTorch draws from the host's default one."""
    host = torch.default_generator
    before = host.get_state()
    host.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(host.get_state())
        host.set_state(before)
