"""Finds a workload: a built-in one by name, your own as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.bench.works.builtin import BUILT_IN
from headrace.bench.works.work import Workload, work_of
from headrace.errors import BenchError, UnknownWorkError
from headrace.schema import listed, nearest
from headrace.source_lines import line_of_error


def find_work(
    named: str, options: Mapping[str, Any] | None = None, *, small: bool = False
) -> Workload:
    """The workload called `named`: a built-in one, `module:function` or `file.py:function`.

    `small` selects the defaults for a CPU. Modules in the current folder come first; a file can
    also import modules in its own folder, as a script can. An error in a workload is one line that
    names your file and line.
    """
    if ":" not in named:
        if named not in BUILT_IN:
            raise UnknownWorkError(
                f"no workload {named!r}{nearest(named, BUILT_IN)}; known: {listed(BUILT_IN)}, "
                "or your_module:make_work"
            )
        return BUILT_IN[named].work(options or {}, small=small)
    place, _, name = named.rpartition(":")
    if not place or not name:
        raise UnknownWorkError(f"work = {named!r}: expected your_module:make_work")
    return work_of(_function(_module(place, named), name), options, name=named)


def _module(place: str, named: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if place.endswith(".py"):
            return _from_file(Path(place), named)
        importlib.invalidate_caches()  # the file may be newer than Python's cache of its folder
        return importlib.import_module(place)
    except BenchError:
        raise
    except SyntaxError as problem:
        raise BenchError(
            f"{problem.filename}:{problem.lineno}: {place} cannot be imported: {problem.msg}"
        ) from problem
    except (Exception, SystemExit) as problem:
        raise _import_error(place, problem, here) from problem


def _import_error(place: str, problem: BaseException, here: str) -> BenchError:
    if isinstance(problem, ModuleNotFoundError) and problem.name in (
        place,
        place.partition(".")[0],
    ):
        return UnknownWorkError(f"no module {place!r} in {here} or on Python's path")
    text = " ".join(str(problem).split()) or "no message"
    site = line_of_error(problem.__traceback__)
    return BenchError(f"{site}: {place} cannot be imported: {type(problem).__name__}: {text}")


def _from_file(path: Path, named: str) -> ModuleType:
    if not path.is_file():
        raise UnknownWorkError(f"{path}: no such file (for the workload {named!r})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[path.stem] = module  # loader workers import it by this name
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    file = getattr(module, "__file__", None) or module.__name__
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise UnknownWorkError(f"{file}: has no {name!r}{nearest(name, functions)}")
    function = getattr(module, name)
    if not callable(function):
        raise UnknownWorkError(
            f"{file}: {name} is a {type(function).__name__}: expected a function that returns "
            "model, optimizer, loss and loader, or step and loader"
        )
    checked: Callable[..., Any] = function
    return checked
