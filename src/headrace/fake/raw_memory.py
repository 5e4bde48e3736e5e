"""The memory of tensors as bytes, behind the backs of the modes, and who still refers to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide operations inside the block from the modes, autograd and autocast."""
    with ExitStack() as stack:
        for guard in (
            torch._C.DisableTorchFunction,
            torch._C._DisableTorchDispatch,
            torch._C._DisableAutocast,
            torch.inference_mode,
        ):
            stack.enter_context(guard())
        yield


def bytes_of(memory: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """A whole storage, or that of a tensor, as bytes."""
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def references(key: int) -> int:
    """How many tensors refer to the storage with this key (`checker.storage_key`). It must be
    alive."""
    return int(torch._C._storage_Use_Count(key)) - _OF_ITS_PYTHON_OBJECT


def _references_of_one_tensor() -> int:
    with unobserved():
        tensor = torch.empty(1, device="cpu")
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# PyTorch's versions differ in whether a storage's own Python object refers to it, too.
_OF_ITS_PYTHON_OBJECT = _references_of_one_tensor() - 1
