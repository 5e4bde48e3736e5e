"""Stateful loaders: those with a `state_dict` that works, such as `StatefulDataLoader`."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any

log = logging.getLogger("headrace")
# By id: loaders whose `state_dict()` has worked, and those that were logged as stateless.
_stateful: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_stateless: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def as_stateful(loader: Any) -> Any | None:
    """The loader if it has `state_dict` and `load_state_dict`, else None. Only `first_state` finds
    out whether they work."""
    methods = ("state_dict", "load_state_dict")
    return loader if all(callable(getattr(loader, name, None)) for name in methods) else None


def first_state(loader: Any) -> tuple[Any | None, Any]:
    """Ask a loader for its state when a pass begins. Returns (loader, state) if it is stateful,
    else (None, None).

    Loaders prepared by Accelerate or the Hugging Face Trainer have a `state_dict` that raises,
    unless they were made with `use_stateful_dataloader=True`. So a loader whose very first
    `state_dict()` raises counts as stateless. If `state_dict()` has worked before, the error is
    raised.
    """
    stateful = as_stateful(loader)
    if stateful is None:
        return None, None
    # The loader itself, not a wrapper that was made for this pass.
    itself = getattr(stateful.state_dict, "__self__", stateful)
    try:
        state = stateful.state_dict()
    except Exception as problem:
        if id(itself) in _stateful:
            raise
        if id(itself) not in _stateless:
            log.info(
                "%s.state_dict() raised %s: treating this loader as stateless",
                type(itself).__name__,
                f"{type(problem).__name__}: {problem}",
            )
            _remember(_stateless, itself)
        return None, None
    _remember(_stateful, itself)
    return stateful, state


def _remember(loaders: weakref.WeakValueDictionary[int, Any], loader: Any) -> None:
    with suppress(TypeError):  # its class does not support weak references
        loaders[id(loader)] = loader
