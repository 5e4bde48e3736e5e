"""Values from outside: every error names file and field, what was found and what was expected."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from headrace.errors import HeadraceError, RunError
from headrace.schema import (
    Checked,
    Fields,
    choice,
    number,
    read_json,
    read_yaml,
    require_whole,
    whole,
)


@dataclass(frozen=True, slots=True)
class Settings(Checked):
    error: ClassVar[type[HeadraceError]] = RunError

    steps: int = whole(5, 1, 10, "Steps.")
    rate: float | None = number(None, 0, 1, "Rate.")
    names: tuple[str, ...] = choice((), "Names.")
    mode: Literal["fast", "slow"] = choice("fast", "Mode.")


@dataclass(frozen=True, slots=True)
class Inner:
    value: float
    label: str = "none"


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    rows: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] | None = None
    count: int = 0
    kind: Literal["a", "b"] = "a"
    is_set: bool = False


def fields(**values: object) -> Fields:
    return Fields(values, "file.json", RunError)


class TestChecked:
    def test_from_values(self) -> None:
        found = Settings.from_values({"steps": 3, "rate": "1e-3", "names": ["a"]}, "x.yaml")
        assert found == Settings(steps=3, rate=0.001, names=("a",))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"steps": 0}, "x.yaml: steps = 0: expected a whole number from 1 to 10"),
            ({"rate": "fast"}, "x.yaml: rate = 'fast': expected a number from 0 to 1"),
            (
                {"mode": "fats"},
                "x.yaml: mode = 'fats' (did you mean 'fast'?): expected fast, slow",
            ),
            (
                {"step": 1},
                "x.yaml: unknown key 'step' (did you mean 'steps'?); known: steps, rate, names, "
                "mode",
            ),
        ],
    )
    def test_errors_begin_with_the_file(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(RunError) as caught:
            Settings.from_values(values, "x.yaml")
        assert str(caught.value) == message


class TestFields:
    def test_sections_and_children(self) -> None:
        given = fields(section={"k": 1}, children=[{"k": 2}], null=None)
        assert given.section("section").values == {"k": 1}
        assert [child.values for child in given.children("children")] == [{"k": 2}]
        for name in ("null", "not there"):
            assert (given.section(name).values, given.children(name)) == ({}, [])

    @pytest.mark.parametrize(
        ("read", "value", "message"),
        [
            (lambda f: f.section("x"), 3, "x = 3: expected a mapping"),
            (lambda f: f.children("x"), {}, "x = {}: expected a list"),
            (lambda f: f.children("x"), [{}, 3], "x[1] = 3: expected a mapping"),
            (lambda f: f.section("x").record(Inner), {"value": "z"}, "x.value = 'z': expected a n"),
        ],
    )
    def test_errors_name_the_path(self, read: Any, value: object, message: str) -> None:
        with pytest.raises(RunError) as caught:
            read(fields(x=value))
        assert str(caught.value).startswith(f"file.json: {message}")

    def test_a_record(self) -> None:
        stored = {
            "inner": {"value": 1, "of_a_later_version": 2},
            "rows": [{"value": 2, "label": "x"}],
            "by_name": {"k": {"value": 3}},
        }
        assert fields(**stored).record(Outer) == Outer(
            Inner(1.0), (Inner(2.0, "x"),), {"k": Inner(3.0)}
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"inner": None}, "inner is missing: expected a mapping"),
            ({"inner": {}}, "inner.value is missing: expected a number"),
            ({"rows": [{"value": 1}, {"value": "x"}]}, "rows[1].value = 'x': expected a number"),
            ({"by_name": {"k": 1}}, "by_name.k = 1: expected a mapping"),
            ({"count": 1.5}, "count = 1.5: expected a whole number"),
            ({"count": True}, "count = True: expected a whole number"),
            ({"kind": "c"}, "kind = 'c': expected a, b"),
            ({"rows": {}}, "rows = {}: expected a list"),
            ({"inner": {"value": True}}, "inner.value = True: expected a number"),
            ({"inner": {"value": float("inf")}}, "inner.value = inf: expected a finite number"),
            ({"inner": {"value": 1, "label": 2}}, "inner.label = 2: expected text"),
            ({"is_set": 1}, "is_set = 1: expected true or false"),
        ],
    )
    def test_a_record_that_is_wrong(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(RunError) as caught:
            fields(**({"inner": {"value": 1}} | changes)).record(Outer)
        assert str(caught.value) == f"file.json: {message}"

    def test_long_values_are_shortened(self) -> None:
        with pytest.raises(RunError) as caught:
            fields(value=[list(range(1000))] * 1000).record(Inner)
        assert len(str(caught.value)) < 120


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", ":1: is not JSON (Expecting value)"),
            (b'{"a":\n 1', ":2: is not JSON (Expecting ',' delimiter)"),
            (b"\xff", ": is not UTF-8 text (invalid start byte)"),
            (b"[1]", ": expected a mapping, found a list"),
            (b"[" * 100_000, ": cannot be read as JSON (maximum recursion depth exceeded"),
            (b'{"n": ' + b"9" * 5000 + b"}", ": cannot be read as JSON (Exceeds the limit"),
        ],
    )
    def test_not_json(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "file.json"
        path.write_bytes(content)
        with pytest.raises(RunError) as caught:
            read_json(path, RunError)
        assert str(caught.value).startswith(f"{path}{message}")

    def test_missing_and_too_large(self, tmp_path: Path) -> None:
        path = tmp_path / "file.json"
        with pytest.raises(RunError, match=r"file\.json: cannot be read \(No such file"):
            read_json(path, RunError)
        with pytest.raises(RunError, match=r"file\.yaml: cannot be read \(No such file"):
            read_yaml(tmp_path / "file.yaml", RunError)
        path.write_text('{"a": 1}')
        with pytest.raises(RunError, match="has 8 bytes; expected at most 7"):
            read_json(path, RunError, max_bytes=7)
        assert read_json(path, RunError, max_bytes=None).values == {"a": 1}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("a: 1\nb: 2\na: 3\n", ":3: has the key 'a' a second time; it also stands in line 1. "),
            (
                "a:\n  b: 1\n  c: 2\n  b: 1\n",
                ":4: has the key 'b' a second time; it also stands in",
            ),
            ("a: [{b: 1, b: 2}]\n", ":1: has the key 'b' a second time; it also stands in line 1"),
            ("x" * (1 << 18) + ": 1", ": has 262,147 bytes; expected at most 262,144"),
        ],
    )
    def test_yaml_that_is_refused(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "file.yaml"
        path.write_text(content)
        with pytest.raises(RunError) as caught:
            read_yaml(path, RunError)
        assert str(caught.value).startswith(f"{path}{message}")

    def test_yaml_with_aliases(self, tmp_path: Path) -> None:
        path = tmp_path / "file.yaml"
        path.write_text("\ufeffa: &x {b: 1}\nc: *x\nd: {<<: *x, b: 2}\ne: &y [*y]\n")
        found = dict(read_yaml(path, RunError))
        assert (found["c"], found["d"]) == ({"b": 1}, {"b": 2})

    def test_what_could_block_forever_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", Path("/dev/zero")):
            for read in (read_json, read_yaml):
                with pytest.raises(RunError, match=r"is a (FIFO|device).*; expected a plain"):
                    read(path, RunError)


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None])
def test_require_whole(value: object) -> None:
    require_whole("n", 0, 0, RunError)
    with pytest.raises(RunError, match=r"n = .*: expected a whole number, 0 or more"):
        require_whole("n", value, 0, RunError)
