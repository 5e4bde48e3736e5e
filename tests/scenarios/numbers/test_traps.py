"""A graph never repeats an old value in silence: each trap of `support/graphs/traps.py` is refused,
noticed before the replay, or noticed when the graph is checked again."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.fake import FakeDevice
from support.graphs.traps import FOUND_BEFORE, FOUND_LATER, REFUSED, Trap

CALLS, CHANGED_AT = 14, 6  # replays begin at call 2; the tenth, call 11, is checked


class Clock:
    time = 1.0

    def now(self) -> float:
        return float(str(self.__dict__.get("set", 1.0)))

    def tick(self) -> None:
        self.__dict__["set"] = 2.0


@pytest.fixture
def trapped(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that traps import."""
    module = types.ModuleType("trapped")
    module.__file__ = __file__
    code = "def get(): return 1.0\n"
    code += "def __getattr__(name):\n    if name == 'late': return cfg.late\n"
    code += "    raise AttributeError(name)\n"
    exec(code, vars(module))
    found: Any = module
    found.beta, found.cfg, found.clock = 1.0, types.SimpleNamespace(beta=1.0, late=1.0), Clock()
    inner: Any = types.ModuleType("trapped.inner")
    inner.__file__, inner.beta = __file__, 1.0
    found.inner, found.__path__ = inner, []
    monkeypatch.setitem(sys.modules, "trapped.inner", inner)
    monkeypatch.setitem(sys.modules, "trapped", module)
    monkeypatch.setitem(sys.modules, "a_program", types.ModuleType("a_program"))
    monkeypatch.setenv("HEADRACE_TRAP", "1")
    return module


class Program:
    """A step that multiplies by what a trap reads."""

    def __init__(self, trap: Trap, folder: Path) -> None:
        _, setup, body, self._change = trap
        self.names: dict[str, Any] = {"PATH": str(folder / "file"), "FOLDER": str(folder)}
        self.names["__name__"] = "a_program"
        exec(setup, self.names)
        lines = body.split("\n")
        if "return" not in body:
            lines[-1] = f"return {lines[-1]}"
        exec("def read():\n" + textwrap.indent("\n".join(lines), "    "), self.names)
        exec("def step(x):\n    return x * read()", self.names)

    def change(self, step_again: Any) -> None:
        self.names["step_again"] = step_again
        exec(self._change, self.names)


def run(trap: Trap, folder: Path) -> tuple[list[int], hr.GraphReport]:
    """The calls that gave another value than the plain step, and the report."""
    program = Program(trap, folder)
    wrong = []
    with FakeDevice(check=False, keep_timeline=False) as device:
        x = torch.ones(1, device=device.torch_device)
        step = hr.graphed(program.names["step"], device=device)
        for call in range(CALLS):
            if call == CHANGED_AT:
                program.change(lambda: step(x))
            found = step(x)
            with device.ledger.waiting("test"):
                if found.item() != pytest.approx(program.names["read"]()):
                    wrong.append(call)
        return wrong, step.report()


def name(trap: Any) -> str:
    return str(trap[0])


@pytest.mark.parametrize("trap", FOUND_BEFORE, ids=name)
def test_what_code_spells_is_noticed_before_the_replay(
    trap: Trap, tmp_path: Path, trapped: types.ModuleType
) -> None:
    wrong, report = run(trap, tmp_path)
    assert wrong == []
    assert (report.why, report.captures, report.replays > 4) == (None, 2, True)


@pytest.mark.parametrize("trap", FOUND_LATER, ids=name)
def test_anything_else_is_noticed_when_the_graph_is_checked(
    trap: Trap, tmp_path: Path, trapped: types.ModuleType
) -> None:
    if "import pandas" in trap[1]:
        pytest.importorskip("pandas")
    if trap[0] == "the recursion limit":
        limit = sys.getrecursionlimit()
    wrong, report = run(trap, tmp_path)
    if trap[0] == "the recursion limit":
        sys.setrecursionlimit(limit)
    assert wrong == list(range(CHANGED_AT, 11))
    assert report.replays == 9
    found = re.search(r"Replays (\d+) to (\d+) may have", str(report.differed))
    assert found is not None
    assert int(found[1]) <= CHANGED_AT - 1 <= int(found[2]) == 9


@pytest.mark.parametrize("trap", REFUSED, ids=name)
def test_what_changes_at_each_call_is_refused(trap: Trap, tmp_path: Path) -> None:
    program = Program(trap, tmp_path)
    with FakeDevice(check=False, keep_timeline=False) as device:
        x = torch.ones(1, device=device.torch_device)
        step = hr.graphed(program.names["step"], device=device)
        for _ in range(CALLS):
            step(x)
        report = step.report()
    assert report.why is not None
    assert report.replays == 0
