"""What a fake device can suffer: no memory left, and work that is never done."""

from __future__ import annotations

import threading

import torch


class Hang:
    """A device that has stopped: `device.hang = Hang()`. Queries say no, and a host that waits
    stands still, for real, until `resume`. `waited_for` is set once one does."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._over = threading.Event()

    def wait(self) -> None:
        self.waited_for.set()
        self._over.wait()

    def resume(self) -> None:
        self._over.set()


def require_room(used: int, total: int, tensor: torch.Tensor) -> None:
    """Raise as CUDA does, if there is no room for a new tensor, which is freed on the way out."""
    if used > total:
        raise torch.OutOfMemoryError(
            f"the fake device is out of memory. Tried to allocate "
            f"{tensor.untyped_storage().nbytes()} bytes, of {total} in all"
        )
