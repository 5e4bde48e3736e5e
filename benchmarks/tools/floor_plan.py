"""The structure of the package: subpackages, imports, fields, and the calls that one batch makes.

    python benchmarks/tools/floor_plan.py [--package CHECKOUT/src/headrace]
        [--classes Pass,EagerStep] [--flags Group.phase,…] [--no-trace] [--out results.json]

Every figure but the last six is read from the source text, so an older checkout can be measured
with `--package`. The last six come from an engine that trains on the CPU under `pipeline` in a
process of its own, with that checkout on its path.

Definitions
-----------
subpackage      a folder of the package. A top-level module is a file beside the subpackages;
                `__init__` and `__main__` are neither.
import          an `import` statement anywhere in a file, also inside functions; imports under
                `if TYPE_CHECKING` are left out. `from a import b` imports the module `a.b` if there
                is one, else `a`.
edge            two subpackages (or top-level modules) of which one imports the other, counted once.
chain           the longest path along edges; its length is the number of subpackages on it. Those
                that import each other in a circle all count. "subpackages" looks at edges between
                subpackages alone, "subpackages and top-level modules" at all.
chain within    the longest path of modules in one subpackage along imports at the top level of a
a subpackage    file. An `__init__` adds nothing to the length. The subpackage's own `__init__` is
                left out. "that runs": without imports whose names are only in annotations.
field           a name assigned as `self.name` in any method, or declared in the class body with an
                annotation or in `__slots__`; those of base classes in the package included.
rebound         a field assigned as `self.name` in a method other than `__init__`, `__post_init__`
                or `__new__`; or assigned in another module as `thing.name`, where `thing` is
                annotated with the class or made by calling it there, or is named like the class or
                the last word of its name (`step` for `TrainingStep`). Those assignments are also
                counted by themselves, on whichever path they are: the trace below sees one path.
flag            a field that answers "is the state whole?": those of `--flags` that exist, each as
                Class.field, or as a field of any class.
call            a Python function of the package that is entered, generators each time they go on.
                Comprehensions are no calls. Its caller is the nearest frame of the package up the
                stack, so that a call through `contextlib` or PyTorch counts as the package's own.
                Only the thread that trains is watched.
cross-module    a call whose caller is in another module of the package; cross-subpackage: in
call            another subpackage. A top-level module is a subpackage of its own here.
border          an ordered pair of modules between which there is at least one such call.
steady batch    from one call of the loss function to the next. Twenty in a row are traced, after 30
                others; the figures are those of the one with the median number of calls.
outside set     a place (function and field) that sets a field of an object of the package, where
                the object's class and its bases are defined in other modules than the code that
                sets it, and that code is no method of the object. Of all twenty batches.
call back       a place (caller and callee) where a method, or a closure over `self`, is called from
                another module, by code that is no method of the same object, while a method of the
                same object is on the stack: the object was passed down and is entered again from
                below. Of all twenty batches.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

CLASSES = "Pass,EagerStep"
FLAGS = "Group.phase"
MAKING = ("__init__", "__post_init__", "__new__")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
BEFORE, TRACED = 30, 20


# --- what the source text says ---


@dataclass(frozen=True)
class Module:
    """A file of the package. `name` is dotted and begins with the package's."""

    name: str
    is_init: bool
    tree: ast.Module = field(repr=False)

    @property
    def unit(self) -> str:
        """Its subpackage; a file at the top level is its own."""
        return unit_of(self.name)


@dataclass(frozen=True)
class Class:
    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    def methods(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


class Package:
    """The parsed source of a package."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.modules: dict[str, Module] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            is_init = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_init else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.modules[name] = Module(name, is_init, tree)
        if self.name not in self.modules:
            raise SystemExit(f"{folder}: expected a package, a folder with an __init__.py")

    @cached_property
    def subpackages(self) -> list[str]:
        found = {m.unit for m in self.modules.values() if m.name.count(".") > 1 or m.is_init}
        return sorted(found - {self.name})

    @cached_property
    def top_modules(self) -> list[str]:
        top = {m.unit for m in self.modules.values() if not m.is_init and m.name.count(".") == 1}
        return sorted(top - {"__main__"})

    @cached_property
    def classes(self) -> list[Class]:
        return [
            Class(module, node)
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        ]

    def imports(
        self, module: Module, *, top_level: bool = False, that_run: bool = False
    ) -> set[str]:
        """The package's modules that it imports; only for what runs, if `that_run`."""
        nodes = _statements(module.tree, functions=not top_level)
        used = _names_that_run(module.tree) if that_run else None
        found: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(module, node)
                for alias in node.names:
                    if used is not None and (alias.asname or alias.name) not in used:
                        continue
                    inner = f"{source}.{alias.name}"
                    found.add(inner if inner in self.modules else source)
        return {name for name in found if name in self.modules} - {module.name}

    def edges(self) -> dict[str, set[str]]:
        """Between subpackages and top-level modules."""
        units = {*self.subpackages, *self.top_modules}
        found: dict[str, set[str]] = {unit: set() for unit in units}
        for module in self.modules.values():
            if module.unit in units:
                targets = {unit_of(target) for target in self.imports(module)}
                found[module.unit] |= (targets & units) - {module.unit}
        return found

    def chain_within(self, subpackage: str, *, that_runs: bool = False) -> list[str]:
        own = f"{self.name}.{subpackage}"
        inside = {
            name: m for name, m in self.modules.items() if m.unit == subpackage and name != own
        }
        edges = {
            name: self.imports(module, top_level=True, that_run=that_runs) & inside.keys()
            for name, module in inside.items()
        }
        chain = longest_chain(edges, zero_weight={n for n, m in inside.items() if m.is_init})
        return [name.removeprefix(f"{own}.") for name in chain]

    def find_class(self, wanted: str) -> Class:
        """By its name, or by the end of its dotted name (`loop.Loop`) where several have it."""
        found = [one for one in self.classes if f".{one.name}".endswith(f".{wanted}")]
        if len(found) == 1:
            return found[0]
        if found:
            named = ", ".join(one.name for one in found)
            raise SystemExit(f"--classes {wanted}: there are {named}: name one of them")
        word = _words(wanted)[-1]
        like = [one.name for one in self.classes if _words(one.node.name)[-1] == word]
        raise SystemExit(f"--classes {wanted}: no such class; alike: {', '.join(like) or 'none'}")

    def fields(self, of: Class) -> dict[str, bool]:
        """Each field of the class, and whether one of its own methods rebinds it."""
        found: dict[str, bool] = {}
        for one in self._family(of):
            for name in _declared(one.node):
                found.setdefault(name, False)
            for method in one.methods():
                for owner, name, _ in _attributes_set(method):
                    if owner == "self":
                        found[name] = found.get(name, False) or method.name not in MAKING
        return found

    def set_from_outside(self, of: Class) -> dict[str, list[str]]:
        """The fields of the class that other modules set, and where."""
        own = {one.module.name for one in self._family(of)}
        fields = self.fields(of)
        found: dict[str, list[str]] = {}
        for module in self.modules.values():
            if module.name not in own:
                names = _names_of(of.node.name, module.tree)
                for owner, name, line in _attributes_set(module.tree):
                    if owner.rpartition(".")[2] in names and name in fields:
                        found.setdefault(name, []).append(f"{module.name}:{line}")
        return found

    def _family(self, of: Class) -> list[Class]:
        family = [of]
        for one in family:
            bases = {ast.unparse(base).rpartition(".")[2] for base in one.node.bases}
            family += [c for c in self.classes if c.node.name in bases and c not in family]
        return family

    def has_field(self, flag: str) -> bool:
        """Whether there is a field `name`, or `Class.name`."""
        owner, _, name = flag.rpartition(".")
        return any(name in self.fields(one) for one in self.classes if owner in ("", one.node.name))


def _statements(node: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """All nodes below, but those under `if TYPE_CHECKING`, nor inside functions unless wanted."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _statements(other, functions=functions)
            continue
        if not functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from _statements(child, functions=functions)


def _names_that_run(tree: ast.Module) -> set[str]:
    """The names that code uses, other than in annotations."""
    in_annotations = {
        id(inner)
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(annotation, ast.AST)
        for inner in ast.walk(annotation)
    }
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and id(node) not in in_annotations
    }


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_init]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if not ast.unparse(child.annotation).startswith("ClassVar"):
                yield child.target.id
        elif isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__slots__":
            found = ast.literal_eval(child.value)
            yield from [found] if isinstance(found, str) else found


def _attributes_set(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(what it is set on, the attribute's name, the line) of every attribute that is assigned."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield ast.unparse(child.value), child.attr, child.lineno


def _names_of(kind: str, tree: ast.Module) -> set[str]:
    """What a module calls an object of the class, as far as its names and annotations tell."""
    words = _words(kind)
    found = {"_".join(words), words[-1]}
    is_kind = re.compile(rf"\b{kind}\b(?!\[)")

    def note(target: ast.AST, source: str) -> None:
        if is_kind.search(source):
            found.add(ast.unparse(target).rpartition(".")[2])

    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            if is_kind.search(ast.unparse(node.annotation)):
                found.add(node.arg)
        elif isinstance(node, ast.AnnAssign):
            note(node.target, ast.unparse(node.annotation))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in node.targets:
                note(target, ast.unparse(node.value.func))
    return found | {f"_{name}" for name in found}


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+[a-z0-9]*|[a-z0-9]+", name)] or [name]


def longest_chain(edges: Mapping[str, Iterable[str]], zero_weight: Iterable[str] = ()) -> list[str]:
    """The longest path; nodes on a circle count together. Zero-weight ones add nothing to it."""
    nothing = set(zero_weight)
    circles = _circles(edges)
    longest: dict[str, list[str]] = {}

    def visit(name: str) -> list[str]:
        members = circles[name]
        key = min(members)
        if key not in longest:
            below = {target for one in members for target in edges.get(one, ())} - members
            best = max((visit(target) for target in sorted(below)), key=len, default=[])
            longest[key] = sorted(members - nothing) + best
        return longest[key]

    return max((visit(name) for name in sorted(edges)), key=len, default=[])


def _circles(edges: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """For each node all that it reaches and that reach it, itself included."""
    reached: dict[str, set[str]] = {}
    for name in edges:
        seen, waiting = set[str](), [name]
        while waiting:
            for target in edges.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reached[name] = seen
    return {
        name: {name} | {other for other in reached[name] if name in reached.get(other, ())}
        for name in edges
    }


# --- what one batch does ---


@dataclass
class Batch:
    """What was called from one entry of the loss function to the next."""

    calls: int = 0
    borders: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def cross_module(self) -> int:
        return sum(self.borders.values())

    @property
    def cross_subpackage(self) -> int:
        return sum(count for (a, b), count in self.borders.items() if unit_of(a) != unit_of(b))


class Tracer:
    """Counts calls in this thread, from `begin_batch` to `begin_batch`, and notes where objects
    are set from outside or entered again from below."""

    def __init__(self, package: str) -> None:
        self.batches: list[Batch] = []
        self.outside_sets: set[str] = set()
        self.calls_back: set[str] = set()
        self._package = package
        self._restore: list[tuple[type, Any]] = []

    def begin_batch(self) -> None:
        if not self.batches:
            self._watch_setting()
        self.batches.append(Batch())
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)
        for kind, own in self._restore:
            if own is None:
                del kind.__setattr__
            else:
                kind.__setattr__ = own  # type: ignore[method-assign]
        self._restore.clear()

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name in COMPREHENSIONS:
            return
        callee = self._module(frame)
        if callee is None:
            return
        self.batches[-1].calls += 1
        caller = next(self._frames_above(frame), None)
        if caller is None:
            return
        module = self._module(caller)
        assert module is not None
        if module == callee:
            return
        borders = self.batches[-1].borders
        borders[module, callee] = borders.get((module, callee), 0) + 1
        entered = _object_of(frame)
        if entered is None or _object_of(caller) is entered:
            return
        if any(_object_of(above) is entered for above in self._frames_above(caller)):
            self.calls_back.add(f"{self._place(caller)} calls {self._place(frame)}")

    def _watch_setting(self) -> None:
        kinds = {
            kind
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == self._package
            for kind in list(vars(module).values())
            if isinstance(kind, type) and kind.__module__.partition(".")[0] == self._package
        }
        # All are looked up before the first is replaced: a subclass inherits from its base.
        originals = {kind: kind.__setattr__ for kind in kinds}
        self._restore = [(kind, vars(kind).get("__setattr__")) for kind in kinds]
        for kind, original in originals.items():
            kind.__setattr__ = self._watched(original)  # type: ignore[method-assign]

    def _watched(self, original: Any) -> Any:
        def set_attribute(thing: object, name: str, value: object) -> None:
            frame = sys._getframe(1)
            module = self._module(frame)
            if module is not None and _object_of(frame) is not thing:
                homes = {kind.__module__ for kind in type(thing).__mro__}
                if module not in homes:
                    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
                    self.outside_sets.add(f"{self._place(frame)} sets {kind}.{name}")
            original(thing, name, value)

        return set_attribute

    def _module(self, frame: FrameType) -> str | None:
        """The package's module that the frame's code is in."""
        name = frame.f_globals.get("__name__", "")
        return name if name.partition(".")[0] == self._package else None

    def _frames_above(self, frame: FrameType) -> Iterator[FrameType]:
        above = frame.f_back
        while above is not None:
            if self._module(above) is not None:
                yield above
            above = above.f_back

    def _place(self, frame: FrameType) -> str:
        return f"{self._module(frame)}.{frame.f_code.co_qualname}"


def _object_of(frame: FrameType) -> object | None:
    """The `self` of a method, or of a closure in one."""
    code = frame.f_code
    if "self" in code.co_freevars or code.co_varnames[:1] == ("self",):
        return frame.f_locals.get("self")
    return None


def trace(package: str) -> dict[str, Any]:
    """Train with the package's engine. Returns what a steady batch called."""
    import torch
    from engine_works import mlp

    import headrace as hr

    work, tracer, seen = mlp(), Tracer(package), 0
    torch.set_num_threads(1)
    model, optimizer = work.fresh(torch.device("cpu"))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if BEFORE < seen <= BEFORE + TRACED:
            tracer.begin_batch()
        elif seen == BEFORE + TRACED + 1:
            tracer.stop()
        return work.loss(model, batch)

    engine = hr.Engine(model, optimizer, loss, plan="pipeline", device="cpu", precision="tf32")
    steps = BEFORE + TRACED + 20  # the last ones are no steady batches: nothing is left to prefetch
    engine.epoch([work.batches[step % len(work.batches)] for step in range(steps)])
    median = statistics.median_low(batch.calls for batch in tracer.batches)
    batch = next(batch for batch in tracer.batches if batch.calls == median)
    return {
        "work": work.name,
        "calls of each batch": [batch.calls for batch in tracer.batches],
        "calls": batch.calls,
        "cross-module calls": batch.cross_module,
        "borders": {f"{a} -> {b}": count for (a, b), count in sorted(batch.borders.items())},
        "cross-subpackage calls": batch.cross_subpackage,
        "outside sets": sorted(tracer.outside_sets),
        "calls back": sorted(tracer.calls_back),
    }


def trace_apart(folder: Path) -> dict[str, Any]:
    """`trace` in a process that imports the package in `folder`."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder.parent.absolute()), *([before] if before else [])])
    found = subprocess.run(
        [sys.executable, __file__, "--trace-here", "--package", str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(found.stdout)


# --- the table ---


def floor_plan(folder: Path, classes: list[str], flags: list[str]) -> dict[str, Any]:
    package = Package(folder)
    edges = package.edges()
    between_subpackages = {
        subpackage: edges[subpackage] & {*package.subpackages} for subpackage in package.subpackages
    }
    within = {subpackage: package.chain_within(subpackage) for subpackage in package.subpackages}
    that_run = {
        subpackage: package.chain_within(subpackage, that_runs=True)
        for subpackage in package.subpackages
    }
    fields: dict[str, dict[str, Any]] = {}
    for name in classes:
        known = package.fields(package.find_class(name))
        outside = package.set_from_outside(package.find_class(name))
        fields[name] = {
            "all": sorted(known),
            "rebound": sorted(one for one in known if known[one] or one in outside),
            "set from outside": outside,
        }
    return {
        "subpackages": package.subpackages,
        "top-level modules": package.top_modules,
        "edges": {unit: sorted(targets) for unit, targets in sorted(edges.items())},
        "chain of subpackages": longest_chain(between_subpackages),
        "chain of subpackages and top-level modules": longest_chain(edges),
        "chains within subpackages": within,
        "chains within subpackages that run": that_run,
        "fields": fields,
        "flags": [flag for flag in flags if package.has_field(flag)],
    }


def figures(found: Mapping[str, Any]) -> dict[str, object]:
    """The table's rows."""
    subpackages, ground, edges = found["subpackages"], found["top-level modules"], found["edges"]
    rows: dict[str, object] = {
        "subpackages": len(subpackages),
        "top-level modules": len(ground),
        "edges between subpackages": sum(
            len({*edges[subpackage]} & {*subpackages}) for subpackage in subpackages
        ),
        "edges between subpackages and top-level modules": sum(map(len, edges.values())),
        "subpackages on the longest chain": len(found["chain of subpackages"]),
        "subpackages and top-level modules on it": len(
            found["chain of subpackages and top-level modules"]
        ),
    }
    for subpackage, chain in found["chains within subpackages"].items():
        runs = len(found["chains within subpackages that run"][subpackage])
        rows[f"modules on the longest chain within {subpackage} / that runs"] = (
            f"{len(chain)} / {runs}"
        )
    for name, known in found["fields"].items():
        counts = f"{len(known['all'])} / {len(known['rebound'])}"
        rows[f"{name}: fields / rebound after __init__"] = counts
        places = sum(map(len, known["set from outside"].values()))
        rows[f"{name}: places in other modules that set a field"] = places
    rows['flags that answer "is the state whole?"'] = len(found["flags"])
    if (batch := found.get("batch")) is not None:
        rows["calls of a steady batch"] = batch["calls"]
        rows["of them cross-module"] = batch["cross-module calls"]
        rows["module borders crossed"] = len(batch["borders"])
        rows["of them cross-subpackage"] = batch["cross-subpackage calls"]
        rows["places that set another module's object"] = len(batch["outside sets"])
        rows["places that call back into a caller"] = len(batch["calls back"])
    return rows


def measured_at(folder: Path) -> str | None:
    """The commit of the package's checkout, "+" if files differ from it; None outside of one."""
    git = ["git", "-C", str(folder)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if commit.returncode:
        return None
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "."], capture_output=True, text=True
    )
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def main(arguments: list[str] | None = None) -> None:
    own = Path(__file__).parents[2] / "src" / "headrace"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, default=own, help="folder of the package")
    parser.add_argument("--classes", default=CLASSES, help="whose fields are counted [%(default)s]")
    parser.add_argument("--flags", default=FLAGS, help="looked for, as Class.field [%(default)s]")
    parser.add_argument("--no-trace", action="store_true", help="read the source text only")
    parser.add_argument("--out", type=Path, help="write all that was found here, as JSON")
    parser.add_argument("--trace-here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.trace_here:
        print(json.dumps(trace(asked.package.name)))
        return
    found = floor_plan(asked.package, asked.classes.split(","), asked.flags.split(","))
    if not asked.no_trace:
        found["batch"] = trace_apart(asked.package)
    rows = figures(found)

    from measuring import header, save, table

    print(table({name: {"": value} for name, value in rows.items()}))
    for name in ("outside sets", "calls back"):
        for place in found.get("batch", {}).get(name, ()):
            print(f"{name}: {place}")
    stored = header("floor_plan.py")
    stored["command"] = stored["command"].replace(str(asked.package), "CHECKOUT/src/headrace")
    save(asked.out, {**stored, "at": measured_at(asked.package), "figures": rows, **found})


if __name__ == "__main__":
    main()
