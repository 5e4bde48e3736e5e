"""Loaders that keep a state of their own, as `StatefulDataLoader` does."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any

log = logging.getLogger("headrace")
# By id: loaders whose `state_dict()` has worked, and those that were said to keep no state.
_keeping: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_stateless: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def state_keeper(loader: Any) -> Any | None:
    """The loader, if it has the methods of one that keeps a state, as `StatefulDataLoader` does.
    Whether it does keep one, only `first_state` tells."""
    methods = ("state_dict", "load_state_dict")
    return loader if all(callable(getattr(loader, name, None)) for name in methods) else None


def first_state(loader: Any) -> tuple[Any | None, Any]:
    """Ask a loader for its state when a pass begins. Returns the loader, if it keeps one, and the
    state.

    Loaders prepared by Accelerate or the Hugging Face Trainer have a `state_dict` that raises,
    unless they were made with `use_stateful_dataloader=True`. So a loader whose very first
    `state_dict()` raises keeps no state; if it has worked before, the error is raised.
    """
    keeper = state_keeper(loader)
    if keeper is None:
        return None, None
    itself = getattr(keeper.state_dict, "__self__", keeper)  # not a wrapper made for this pass
    try:
        state = keeper.state_dict()
    except Exception as problem:
        if id(itself) in _keeping:
            raise
        if id(itself) not in _stateless:
            log.info(
                "%s.state_dict() raised %s: this loader is taken to keep no state of its own",
                type(itself).__name__,
                f"{type(problem).__name__}: {problem}",
            )
            _remember(_stateless, itself)
        return None, None
    _remember(_keeping, itself)
    return keeper, state


def _remember(loaders: weakref.WeakValueDictionary[int, Any], loader: Any) -> None:
    with suppress(TypeError):  # of classes whose objects cannot be referred to weakly
        loaders[id(loader)] = loader
