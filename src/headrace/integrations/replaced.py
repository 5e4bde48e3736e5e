"""Methods replaced on one object, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ReplacedMethods:
    """Methods that are replaced on instances, not on their classes, until `undo()`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        own = vars(owner)
        had, before = name in own, own.get(name)
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
