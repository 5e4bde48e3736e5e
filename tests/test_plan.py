"""Plans: the presets, what is refused and in which words, and the ways to write one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.plan import PRESETS, LoaderPlan, Plan, load_plan, presets_table


def test_the_presets_are_the_seven_schemes_and_auto() -> None:
    names = ["baseline", "interval", "event", "streams4", "pipeline", "graph", "max", "auto"]
    assert list(PRESETS) == names
    assert [PRESETS[name].name for name in names] == names


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("baseline", {"sync": "batch", "prefetch_depth": 0, "pin": False, "deferred_every": 1}),
        ("interval", {"streams": 2, "sync": "interval", "sync_every": 10, "deferred_every": 10}),
        ("event", {"streams": 2, "sync": "event", "sync_every": 10, "pin": True}),
        ("streams4", {"streams": 4, "sync": "event", "split_backward": True}),
        ("pipeline", {"sync": "none", "prefetch_depth": 2, "graphs": "off", "compile": False}),
        ("graph", {"sync": "none", "graphs": "on", "compile": False}),
        ("auto", {"graphs": "auto", "compile": False, "sync": "none"}),
        ("max", {"sync": "none", "graphs": "on", "compile": True}),
    ],
)
def test_presets_say_what_they_do(preset: str, expected: dict[str, Any]) -> None:
    plan = Plan.preset(preset).to_dict()
    assert {key: plan[key] for key in expected} == expected


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan.preset("pipeline").streams = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync_every": 0}, "sync_every = 0: expected a whole number from 1 to 1,000,000"),
        ({"streams": 9}, "streams = 9: expected a whole number from 2 to 8"),
        ({"streams": 1}, "streams = 1: expected a whole number from 2 to 8"),
        ({"streams": True}, "streams = True: expected a whole number"),
        ({"streams": "4"}, "streams = '4': expected a whole number"),
        ({"streams": 4.0}, "streams = 4.0: expected a whole number"),
        ({"prefetch_depth": -1}, "prefetch_depth = -1: expected a whole number from 0 to 64"),
        ({"run_ahead_bytes": 0}, "run_ahead_bytes = 0: expected a whole number from 1 to"),
        ({"pin": "yes"}, "pin = 'yes': expected true or false"),
        ({"sync": "never"}, "sync = 'never'"),
        ({"sync": "evnt"}, r"sync = 'evnt' \(did you mean 'event'\?\): expected batch, interval"),
        ({"precision": "bf61"}, r"did you mean 'bf16'\?\): expected fp32, .*, fp16 or none"),
        ({"graphs": None}, "graphs = None: expected off, on, auto"),
        ({"name": ""}, "name = '': expected a name"),
        ({"streams": 10**5000}, "streams = <int too long to show>: expected a whole number"),
        ({"streams": 2, "split_backward": True}, "streams = 2: expected 3 to 8 with split_back"),
        ({"split_backward": True, "graphs": "on"}, "graphs = 'on': expected 'off' with split_"),
        ({"graphs": "auto", "prefetch_depth": 0}, "prefetch_depth = 0: expected 1 to 64 with"),
    ],
)
def test_bad_values_name_the_field_the_value_and_the_range(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**changes)


def test_unknown_keys_are_refused_with_the_nearest_known() -> None:
    with pytest.raises(PlanError, match=r"unknown key 'prefetch_dept' \(did you mean 'prefetch_"):
        Plan.from_dict({"prefetch_dept": 3})
    with pytest.raises(PlanError, match=r"unknown key 'stream' \(did you mean 'streams'\?\)"):
        Plan.preset("event").replace(stream=3)
    with pytest.raises(PlanError, match=r"no plan 'pipelin' \(did you mean 'pipeline'\?\)"):
        Plan.preset("pipelin")


def test_a_changed_preset_shows_that_it_was_changed() -> None:
    plan = Plan.preset("pipeline").replace(prefetch_depth=3)
    assert (plan.name, plan.prefetch_depth) == ("pipeline*", 3)
    assert plan.replace(streams=4).name == "pipeline*"
    assert Plan.preset("pipeline").replace() == Plan.preset("pipeline")
    assert Plan.preset("event").replace(name="mine", sync_every=5).name == "mine"


def test_whatever_may_stand_for_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("plan: event\n")
    event = Plan.preset("event")
    assert Plan.of(event) is event
    assert Plan.of("event") == Plan.of({"preset": "event"}) == event
    assert Plan.of(path) == Plan.of(str(path)) == event


@pytest.mark.parametrize("nothing", [5, None, ["event"], b"event", True])
def test_what_cannot_stand_for_a_plan(nothing: Any) -> None:
    with pytest.raises(PlanError, match=r"plan = .*: expected a Plan, a preset's name, a mapping"):
        Plan.of(nothing)


def test_a_plan_file_has_a_plan_and_a_loader(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "plan: {preset: graph, graphs: off, prefetch_depth: 4}\n"
        "loader: {workers: 2, batch_size: 30}\n"
    )
    content = load_plan(path)
    assert (content.plan.name, content.plan.graphs) == ("graph*", "off")
    assert content.loader == LoaderPlan(workers=2, prefetch_factor=None, batch_size=30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan: pipelin\n", "plan.yaml: plan: no plan 'pipelin'"),
        ("plan: {streams: 9}\n", "plan.yaml: plan: streams = 9: expected a whole number from 2"),
        ("plan: {sync_evry: 9}\n", r"plan.yaml: plan: unknown key 'sync_evry' \(did you mean"),
        ("plan: 3\n", "plan.yaml: plan: expected a mapping, found"),
        ("plan: {preset: [1]}\n", "plan.yaml: plan: no plan"),
        ("plan: event\nlaoder: {}\n", r"unknown key 'laoder' \(did you mean 'loader'\?\)"),
        ("plan: event\nloader: {workers: -1}\n", "plan.yaml: loader: workers = -1: expected"),
        ("plan: event\nloader: 4\n", "plan.yaml: loader: expected a mapping, found"),
        ("loader: {}\n", "plan.yaml: has no `plan:`"),
        ("preset: x\nstreams: 4\n", "plan.yaml: 'streams' is at the top level; .* under `plan:`"),
        ("plan: event\nworkers: 4\n", "plan.yaml: 'workers' is at the top .* under `loader:`"),
        ("- plan\n", "plan.yaml: expected a mapping, found a list"),
        ("", "plan.yaml: expected a mapping, found nothing"),
        ("plan: {a: 1\nb: }: 2\n", r"plan.yaml:\d+: is not YAML"),
        ("plan: !!python/object/apply:os.system ['true']\n", r"plan.yaml:1: is not YAML"),
        ("plan: \x00\n", "plan.yaml: is not YAML"),
        ("plan: event\nloader: []\n", "plan.yaml: loader: expected a mapping, found a list"),
        ("plan: event\nloader: 0\n", "plan.yaml: loader: expected a mapping, found"),
        ("plan: {streams: 2024-13-45}\n", r"plan.yaml: has a value that cannot be read \(month"),
        ('plan: {streams: !!int "abc"}\n', "plan.yaml: has a value that cannot be read"),
        (f"plan: {{streams: {'9' * 5000}}}\n", "plan.yaml: has a value that cannot be read"),
        (f"plan: {{streams: 0x{'f' * 5000}}}\n", "streams = <int too long to show>: expected"),
        (f"plan: {'[' * 3000}{']' * 3000}\n", "plan.yaml: is nested too deeply"),
    ],
)
def test_a_bad_plan_file_is_named_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing.yaml: cannot be read \(No such file"):
        load_plan(tmp_path / "missing.yaml")
    with pytest.raises(PlanError, match=r"cannot be read \(Is a directory"):
        load_plan(tmp_path)
    with pytest.raises(PlanError, match=r"cannot be read \(embedded null byte"):
        load_plan("nul\0.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"plan: \xff\n")
    with pytest.raises(PlanError, match="is not UTF-8"):
        load_plan(tmp_path / "latin.yaml")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "streams": st.integers(2, 8),
            "sync": st.sampled_from(["batch", "interval", "event", "none"]),
            "sync_every": st.integers(1, 100),
            "prefetch_depth": st.integers(1, 8),
            "run_ahead_bytes": st.none() | st.integers(1, 1 << 40),
            "graphs": st.sampled_from(["off", "on", "auto"]),
            "precision": st.sampled_from([None, "fp32", "tf32", "bf16", "fp16"]),
            "compile": st.booleans(),
        },
    )
)
def test_a_plan_survives_yaml(values: dict[str, Any]) -> None:
    plan = Plan(**values)
    assert Plan.from_dict(yaml.safe_load(yaml.safe_dump(plan.to_dict()))) == plan


def test_tables_show_every_field() -> None:
    table = Plan.preset("max").table()
    for field in set(Plan.field_names()) - {"name"}:
        assert field in table
    assert table.startswith("plan max")
    side_by_side = presets_table().splitlines()
    assert side_by_side[0].split() == ["field", *PRESETS]
    (depths,) = [line for line in side_by_side if "prefetch_depth" in line]
    assert depths.split()[1:] == ["0", "1", "1", "2", "2", "2", "2", "2"]
