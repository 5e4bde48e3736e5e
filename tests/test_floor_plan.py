"""`benchmarks/tools/floor_plan.py` counts by its definitions, in a package of two subpackages."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "tools" / "floor_plan.py"
FILES = {
    "__init__.py": "",
    "__main__.py": "import house.upper.work",
    "ground.py": "",
    "lower/__init__.py": "from house.lower.part import Part",
    "lower/part.py": """
        from typing import TYPE_CHECKING
        from house import ground
        if TYPE_CHECKING:
            from house.upper import work

        class Part:
            def __init__(self) -> None:
                self.size = 1

            def use(self, whole) -> None:
                whole.size = sum(whole.grow(n) for n in [1, 2])
        """,
    "upper/__init__.py": "from house.upper.work import Work",
    "upper/work.py": """
        from house.lower import Part
        from house.upper.middle import last

        class Base:
            shared: int = 0

        class Work(Base):
            def __init__(self) -> None:
                self.size, self.state = 0, "clean"
                self.part = Part()

            def run(self) -> None:
                self.state = "dirty"
                self.part.use(self)
                last()

            def grow(self, by: int) -> int:
                return by
        """,
    "upper/middle.py": """
        from .last import last

        def meddle(work: "Work", other) -> None:
            work.part = other.size = None
        """,
    "upper/last.py": """
        def last() -> None:
            from house.upper import work
        """,
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "house"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("floor_plan", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measured(script: ModuleType, house: Path, flags: str = "Work.state") -> dict[str, Any]:
    return script.floor_plan(house, ["Work"], flags.split(","))


def test_subpackages_edges_and_chains(script: ModuleType, house: Path) -> None:
    found = measured(script, house)
    assert found["subpackages"] == ["lower", "upper"]
    assert found["top-level modules"] == ["ground"]
    # The import under TYPE_CHECKING is none, so nothing points up.
    assert found["edges"] == {"ground": [], "lower": ["ground"], "upper": ["lower"]}
    assert found["chain of subpackages"] == ["upper", "lower"]
    assert found["chain of subpackages and top-level modules"] == ["upper", "lower", "ground"]
    # The import inside a function makes no circle, and faces are left out.
    assert found["chains within subpackages"] == {
        "lower": ["part"],
        "upper": ["work", "middle", "last"],
    }


def test_fields_and_flags(script: ModuleType, house: Path) -> None:
    found = measured(script, house, "Work.state,Part.state,size,Other.size")
    assert found["fields"]["Work"] == {
        "all": ["part", "shared", "size", "state"],
        "rebound": ["part", "state"],  # `whole.size` has a name that tells no class
        "set from outside": {"part": ["house.upper.middle:5"]},
    }
    assert found["flags"] == ["Work.state", "size"]


def test_a_circle_counts_with_all_of_its_members(script: ModuleType) -> None:
    edges = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["d"]}
    assert script.longest_chain(edges) == ["a", "b", "c", "d"]
    assert script.longest_chain(edges, zero_weight="b") == ["a", "c", "d"]


def test_a_class_that_is_not_there_is_an_error_that_names_others(
    script: ModuleType, house: Path
) -> None:
    with pytest.raises(SystemExit, match=r"no such class; alike: house\.upper\.work\.Work"):
        script.floor_plan(house, ["OwnWork"], [])


@pytest.fixture
def imported(house: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(house.parent)
    yield importlib.import_module("house.upper.work")
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def test_a_traced_batch(script: ModuleType, imported: ModuleType) -> None:
    work, tracer = imported.Work(), script.Tracer("house")
    tracer.begin_batch()
    work.run()
    tracer.begin_batch()
    tracer.stop()
    work.state = "not watched any more"
    batch, after = tracer.batches
    assert batch.calls == 5  # run, use, grow twice, last; the generator expression is none
    assert batch.borders == {
        ("house.upper.work", "house.lower.part"): 1,
        ("house.lower.part", "house.upper.work"): 2,
        ("house.upper.work", "house.upper.last"): 1,
    }
    assert (batch.cross_module, batch.cross_subpackage) == (4, 3)
    assert tracer.outside_sets == {"house.lower.part.Part.use sets house.upper.work.Work.size"}
    assert tracer.calls_back == {
        "house.lower.part.Part.use.<locals>.<genexpr> calls house.upper.work.Work.grow"
    }
    assert after.calls == 0
    assert "__setattr__" not in vars(imported.Work)


def test_the_engine_of_this_project(script: ModuleType) -> None:
    batch = script.trace_apart(SCRIPT.parents[1] / "src" / "headrace")
    assert len(batch["calls of each batch"]) == script.TRACED
    assert batch["calls"] > batch["cross-module calls"] >= batch["cross-subpackage calls"] > 0
    assert sum(batch["borders"].values()) == batch["cross-module calls"]


def test_the_result_names_no_path(house: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    asked = ["--package", str(house), "--classes", "Work", "--no-trace", "--out", str(out)]
    ended = subprocess.run([sys.executable, SCRIPT, *asked], check=True, capture_output=True)
    assert b"subpackages on the longest chain" in ended.stdout
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert stored["figures"]["Work: fields / rebound after __init__"] == "4 / 2"
    assert stored["at"] is None  # no checkout
