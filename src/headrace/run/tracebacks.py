"""Tracebacks that a script prints itself, or logs: without frames of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from headrace.main_program import users_part
from headrace.replacing import replaced

#: What Python's `traceback` and `logging` read a traceback with. The second is not public.
_WALKS = ("walk_tb", "_walk_tb_with_full_positions")


@contextmanager
def users_tracebacks() -> Iterator[None]:
    """In the block, Python's `traceback` sees no frames of ours. The exceptions keep theirs."""
    with ExitStack() as stack:
        for name in _WALKS:
            walk = getattr(traceback, name, None)
            if walk is not None:
                stack.enter_context(replaced(traceback, name, _without_ours(walk)))
        yield


def _without_ours(walk: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def walk_users_part(tb: TracebackType | None) -> Any:
        return walk(users_part(tb) or tb)

    return walk_users_part
