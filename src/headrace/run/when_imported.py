"""Calls a function as soon as a program has imported a package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def when_imported(package: str, call: Callable[[], object]) -> Iterator[None]:
    """Call `call` once in this block: now, if the package is imported already, else right after it
    has been. A program may set environment variables that the package reads when it is imported."""
    if package in sys.modules:
        call()
        yield
        return
    finder = _Finder(package, call)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


class _Finder:
    """Finds the package as others would, and has its loader call `call` at the end."""

    def __init__(self, package: str, call: Callable[[], object]) -> None:
        self._package, self._call = package, call

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._package:
            return None
        self.leave()
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute, call = loader.exec_module, self._call

        def execute_and_call(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            call()

        loader.exec_module = execute_and_call
        return spec
