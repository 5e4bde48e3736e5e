"""Methods replaced on one object, and put back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class ReplacedMethods:
    """Methods that are replaced on instances, not on their classes, until `undo()`. What replaces
    a method has its signature, which others may read."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        own = vars(owner)
        had, before = name in own, own.get(name)
        if inspect.ismethod(new):
            new = _with_signature_of(getattr(owner, name), new)
        own[name] = new

        def undo() -> None:
            if own.get(name) is not new:
                return  # somebody has replaced it since
            if had:
                own[name] = before
            else:
                del own[name]

        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _with_signature_of(method: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    return call
