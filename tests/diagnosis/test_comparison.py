"""Two diagnoses compared: made-up results with known differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.diagnosis.comparison import (
    compare,
    compare_files,
    comparison_text,
    exit_code_of_change,
    parse_change_limits,
)
from headrace.errors import ProgramError
from headrace.records import (
    DiagnosedLine,
    DiagnosisComparison,
    DiagnosisResult,
    Environment,
    LineRecord,
    PythonLine,
    TimeParts,
)


def line(number: int, text: str, waits: float = 1.0, idle_ms: float | None = 0.5) -> DiagnosedLine:
    where = LineRecord("train.py", number, "main", text)
    return DiagnosedLine("item", ".item()", "", where, per_step=waits, idle_ms=idle_ms)


BEFORE = DiagnosisResult(
    step_ms=10.0,
    noise_ms=0.1,
    parts=TimeParts(computing=8.0, synchronization=1.0, launch=1.0),
    waits_per_step=2.0,
    lines=(line(20, "loss.item()"), line(30, "print(norm)")),
    environment=Environment(device_name="H200", torch="2.11"),
)
AFTER = replace(
    BEFORE,
    step_ms=12.0,
    parts=TimeParts(computing=8.0, synchronization=1.0, launch=1.2, input=1.8),
    waits_per_step=3.0,
    lines=(line(22, "loss.item()"), line(31, "acc.item()", 2.0, 0.3)),
)


def test_a_slower_step_is_explained_by_part_and_line() -> None:
    found = compare(BEFORE, AFTER)
    assert found.slower == pytest.approx(0.2)
    assert found.noise == pytest.approx(0.0141, rel=0.01)
    assert found.verdict == (
        "A step takes 12.00 ms, before 10.00 ms: 20.0% ±1.4% slower.",
        "The largest part of it is input: 1.80 ms more.",
    )
    changes = {part.name: part.ms for part in found.parts}
    assert changes["input"] == 1.8
    assert changes["launch"] == pytest.approx(0.2)
    # `loss.item()` has moved by two lines, and costs what it did.
    assert [(one.code, one.line, one.waits_before, one.waits_after) for one in found.lines] == [
        ("print(norm)", 30, 1.0, None),
        ("acc.item()", 31, None, 2.0),
    ]
    text = comparison_text(found)
    assert "input" in text
    assert "+1.80" in text
    assert "transfer" not in text  # 0 before and after
    assert "train.py:31" in text


def test_a_faster_step_names_what_became_shorter() -> None:
    found = compare(AFTER, BEFORE)
    assert found.verdict[0].endswith("16.7% ±1.2% faster.")
    assert found.verdict[1] == "The largest part of it is input: 1.80 ms less."


def test_a_difference_within_the_noise_is_none() -> None:
    found = compare(BEFORE, replace(BEFORE, step_ms=10.1))
    assert found.is_noise
    assert found.verdict == (
        "A step takes 10.10 ms, before 10.00 ms: the difference of 1.0% is within the noise "
        "(±1.4%).",
    )
    assert "No line has changed by more than the noise." in comparison_text(found)


def test_lines_with_the_same_code_count_together() -> None:
    twice = replace(BEFORE, lines=(line(20, "x.item()"), line(21, "x.item()")))
    once = replace(BEFORE, lines=(line(40, "x.item()", 2.0, 1.0),))
    assert compare(twice, once).lines == ()
    (changed,) = compare(twice, replace(once, lines=(line(40, "x.item()", 2.0, 3.0),))).lines
    assert (changed.line, changed.ms) == (40, pytest.approx(2.0))


def test_python_between_launches_is_compared() -> None:
    python = PythonLine(LineRecord("train.py", 9, "main", "tokens = split(text)"), idle_ms=2.0)
    (changed,) = compare(BEFORE, replace(BEFORE, python_lines=(python,))).lines
    assert (changed.code, changed.waits_after, changed.ms) == ("tokens = split(text)", None, 2.0)


def test_results_without_times_are_compared_by_their_waits() -> None:
    bare = DiagnosisResult(waits_per_step=2.0, lines=(line(20, "x.item()", idle_ms=None),))
    more = replace(bare, waits_per_step=4.0, lines=(line(20, "x.item()", 4.0, None),))
    found = compare(bare, more)
    assert found.verdict[1] == "The host waits 4.0 times a step, before 2.0 times."
    assert [(one.waits_before, one.waits_after) for one in found.lines] == [(1.0, 4.0)]
    assert "–" in comparison_text(found)


def test_what_else_differs_is_noted() -> None:
    other = replace(AFTER, noise_ms=None, environment=Environment(device_name="A100", torch="2.11"))
    found = compare(BEFORE, other)
    assert found.notes == (
        "device name was H200, and is A100: not only the script has changed",
        "the noise is not known: there are too few clean steps in one of the results",
    )
    assert found.verdict[0].endswith("20.0% slower.")


def test_files_are_read_and_the_comparison_is_stored(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    BEFORE.write(before)
    AFTER.write(after)
    found = compare_files(str(before), str(after))
    found.write(tmp_path / "compared.json")
    assert DiagnosisComparison.read(tmp_path / "compared.json") == found
    assert found.slower == pytest.approx(0.2)


@pytest.mark.parametrize("content", ["{}", '{"traceEvents": []}', "no JSON"])
def test_a_file_that_is_no_diagnosis_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ProgramError, match="--compare expects two results of headrace diagnose"):
        compare_files(str(tmp_path / "x.json"), str(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("limit", "after_ms", "code", "words"),
    [
        ("slower>3%", 12.0, 3, "slower is 20 % (> 3 %)"),
        ("slower>30%", 12.0, 0, ""),
        ("slower>=20%", 12.0, 3, "slower is 20 % (>= 20 %)"),
        ("slower>3%", 9.0, 0, ""),
        ("slower>0.5%", 10.1, 0, "within the noise (±1.4%), so it does not count"),
        ("slower>3%", None, 3, "slower is not known"),
    ],
)
def test_a_limit_ends_with_exit_code_3(
    limit: str, after_ms: float | None, code: int, words: str
) -> None:
    told: list[str] = []
    found = compare(BEFORE, replace(AFTER, step_ms=after_ms))
    assert exit_code_of_change(found, parse_change_limits(limit), told.append) == code
    assert bool(told) is bool(words)
    assert words in "".join(told)


@pytest.mark.parametrize("text", ["slower", "slower>3", "slower<3%", "waits>2", "slower>%", ""])
def test_a_bad_limit_names_what_was_expected(text: str) -> None:
    with pytest.raises(ProgramError, match=r"expected conditions such as slower>3%"):
        parse_change_limits(text)
