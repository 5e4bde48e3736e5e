"""Somebody's training script, run unchanged and explained.

In: a script or module with its arguments. Out: what a step's time went to, which source lines made
the host wait, what each would gain if it went, and what to write instead. Its names are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.diagnosis.steps import StepLine

_HOMES = {
    "StepLine": "steps",
}

__all__ = [
    "StepLine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
