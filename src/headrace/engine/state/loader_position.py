"""Brings a loader to a batch of its epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.data import ResumedLoader, Skipping, as_stateful, with_samplers


def loader_at(loader: Iterable[Any], batch: int, state: Any) -> Iterable[Any]:
    """The loader from `batch` of its epoch on. `state` is the loader's own stored state, if it
    keeps one."""
    keeper = as_stateful(loader)
    if keeper is not None and state is not None:
        try:
            keeper.load_state_dict(state)
        except Exception as problem:
            problem.add_note(
                f"headrace: {type(loader).__name__}.load_state_dict refused the loader state in "
                "the engine's state: expected the kind of loader it was taken with"
            )
            raise
        return ResumedLoader(loader) if batch else loader
    if batch == 0:
        return loader
    for owner in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))):
        if callable(getattr(owner, "start_at", None)):
            owner.start_at(batch)  # type: ignore[union-attr]
            return ResumedLoader(loader)
    return Skipping(loader, batch)


def set_loader_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` of the loader and its samplers, which shuffle by epoch. A loader prepared by
    Accelerate has one, too, and passes its epoch on to the samplers when it begins."""
    for owner in with_samplers(loader):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
