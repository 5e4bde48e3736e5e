"""Random generators of the fake CUDA device.

Its default generator is the host's: PyTorch computes on CPU tensors. So `torch.cuda.manual_seed`
also seeds the host, and a state of `torch.cuda.get_rng_state` is one of the host's generator.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.testing.cuda import state

_RealGenerator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _RealGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if named.type != "cuda":
            return _RealGenerator(named)
        state.check_index(named)
        return _CudaGenerator()


class Generator(metaclass=_AnyGenerator):
    """Replaces `torch.Generator`: `Generator("cuda")` is a generator that says it is on cuda."""


class _CudaGenerator(_RealGenerator):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def clone_state(self) -> Any:
        other = _CudaGenerator()
        other.set_state(self.get_state())
        return other

    def __reduce__(self) -> Any:
        raise TypeError("a generator on cuda cannot be pickled")


class DefaultGenerator(_CudaGenerator):
    """`torch.cuda.default_generators[0]`."""

    def get_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(self, new_state: torch.Tensor) -> DefaultGenerator:
        torch.default_generator.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> DefaultGenerator:
        torch.default_generator.manual_seed(seed)
        return self

    def seed(self) -> int:
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def get_offset(self) -> int:
        raise state.not_imitated("Generator.get_offset()")

    def set_offset(self, offset: int) -> DefaultGenerator:
        raise state.not_imitated("Generator.set_offset()")


def is_cuda_generator(generator: object) -> bool:
    return isinstance(generator, _CudaGenerator)


def is_default_generator(generator: object) -> bool:
    return isinstance(generator, DefaultGenerator)
