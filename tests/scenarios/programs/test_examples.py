"""Each script in examples/: at most 60 lines, and its one line changes no loss."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace as hr
from headrace.fake import fake_cuda
from support.paths import ROOT

MARK = "# <- the one line"
SMALL: dict[str, dict[str, int]] = {
    "classifier": {"width": 8, "blocks": 2, "batch": 4},
    "gpt": {"width": 32, "layers": 2, "length": 8, "batch": 2},
    "gan": {"width": 8, "noise": 4, "batch": 4},
    "diffusion": {"width": 8, "blocks": 2, "batch": 4},
    "lstm": {"width": 8, "layers": 1, "length": 5, "batch": 4},
    "ppo": {"steps": 3, "width": 8, "carts": 4, "length": 3},
}


def script(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


def run(name: str, text: str, **sizes: int) -> float:
    """The last loss of an example's text."""
    names: dict[str, Any] = {"__name__": name, "__file__": str(script(name))}
    exec(compile(text, script(name), "exec"), names)
    loss, ms = names["main"](**sizes)
    assert ms > 0
    return float(loss)


def test_all_examples_are_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_it_is_short_and_its_line_is_marked(name: str) -> None:
    lines = script(name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    (line,) = (line for line in lines if MARK in line)
    assert line.strip().startswith("hr.speed_up(")


@pytest.mark.parametrize("name", SMALL)
def test_it_trains_on_the_cpu(name: str) -> None:
    text = script(name).read_text(encoding="utf-8")
    assert math.isfinite(run(name, text, **{**SMALL[name], "steps": 3}))


@pytest.mark.parametrize("name", SMALL)
def test_the_line_changes_no_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake device, where the line captures graphs."""
    speed_up, handles = hr.speed_up, []
    monkeypatch.setattr(hr, "speed_up", lambda *parts: handles.append(speed_up(*parts)))
    text = script(name).read_text(encoding="utf-8")
    plain = "\n".join(line for line in text.splitlines() if MARK not in line)
    with fake_cuda():
        expected = run(name, plain, **{"steps": 8, **SMALL[name]})
    with fake_cuda():
        assert run(name, text, **{"steps": 8, **SMALL[name]}) == expected
    (handle,) = handles
    for part in handle.report().parts:
        assert part.replays > 0, part
        assert part.why is None


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    display = SimpleNamespace(IFrame=lambda page, **size: shown.append(page))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    notebook = ROOT / "examples" / "diagnose.ipynb"
    names: dict[str, Any] = {}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            written = tmp_path / f"cell_{number}.py"  # diagnose shows lines of files
            written.write_text("".join(cell["source"]), encoding="utf-8")
            exec(compile(written.read_text(encoding="utf-8"), written, "exec"), names)
    assert shown == ["diagnosis.html"]
    assert "<!doctype html>" in Path("diagnosis.html").read_text(encoding="utf-8")
    before, after = (names[name].result.waits_per_step for name in ("before", "after"))
    assert before == 4
    assert after < 1
