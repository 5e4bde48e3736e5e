"""The fake CUDA device in use, and the errors of what it cannot emulate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import NotEmulatedError

if TYPE_CHECKING:
    from headrace.fake.cuda.device import FakeCuda

#: One at a time: `torch.cuda` is global.
_in_use: list[FakeCuda] = []
_forked = False


def device() -> FakeCuda:
    """The device of the `fake_cuda()` block that is running."""
    if _forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must use the 'spawn' start method"
        )
    if not _in_use:
        raise RuntimeError(
            "a fake CUDA stream, event or graph was used after its fake_cuda() block"
        )
    return _in_use[-1]


def in_use() -> bool:
    return bool(_in_use) and not _forked


def in_forked_child() -> bool:
    return _forked


def begin(cuda: FakeCuda) -> None:
    _in_use.append(cuda)


def end(cuda: FakeCuda) -> None:
    _in_use.remove(cuda)


def after_fork_in_child() -> None:
    """A child may not use its parent's device, as on CUDA."""
    global _forked
    if _in_use:
        _forked = True


def check_index(target: Any) -> None:
    """Raise CUDA's error if `target` names a device other than the first."""
    index = target if isinstance(target, int) else None
    if isinstance(target, str | torch.device):
        named = torch.device(target)
        if named.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {target}")
        index = named.index
    if index not in (None, 0, -1):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal (cuda:{index}: fake_cuda() has one device, cuda:0)"
        )


def not_emulated(what: str, instead: str = "") -> NotEmulatedError:
    """The error for a part of CUDA that has no emulation."""
    advice = instead or "run this part of the program on a GPU, or leave it out of the test"
    return NotEmulatedError(f"{what} cannot be emulated without a GPU: {advice}")
