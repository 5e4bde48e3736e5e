"""Names of a package that are loaded when they are first used.

    TYPE_CHECKING = False
    if TYPE_CHECKING:
        from headrace.lifecycle.folder import RunFolder as RunFolder

    __all__, __getattr__, __dir__ = lazy(__name__, __file__)

These imports are the only list of the names: type checkers read it, and so does `lazy`. A name that
needs a package of an extra has the comment `# extra`, and is not in `__all__`.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing `typing` would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def lazy(
    package: str, file: str, *own: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of the package in `file`. Its names are those that the
    indented lines `from module import name as name` import, and `own`."""
    homes: dict[str, str] = {}
    listed = [*own]
    with open(file, encoding="utf-8") as source:  # noqa: PTH123 - pathlib takes long to import
        for line in source:
            words = line.split()
            if line.startswith("    from ") and words[4:5] == ["as"]:
                homes[words[5]] = words[1]
                if words[6:] != ["#", "extra"]:
                    listed.append(words[5])
    names = sorted(listed)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return names, load, lambda: names
