"""The race checker: every seeded bug found at its two lines, no report on any correct twin."""

from __future__ import annotations

import inspect

import pytest

from headrace.fake import FakeDevice
from support.races import race_cases


def marked_line(case: race_cases.Case, mark: str) -> int:
    lines, first = inspect.getsourcelines(case)
    (found,) = [number for number, line in enumerate(lines, first) if f"# {mark}" in line]
    return found


@pytest.mark.parametrize("case", race_cases.CASES, ids=lambda case: case.__name__)
def test_the_bug_is_found_with_both_lines(case: race_cases.Case) -> None:
    with FakeDevice(check=False) as device:
        case(device, True)
    found = {(race.first.site.line, race.second.site.line) for race in device.races}
    assert found == {(marked_line(case, "FIRST"), marked_line(case, "SECOND"))}, device.races
    for race in device.races:
        assert race.first.site.file == race.second.site.file == race_cases.__file__
        assert race.missing


@pytest.mark.parametrize("case", race_cases.CASES, ids=lambda case: case.__name__)
def test_the_correct_twin_is_not_reported(case: race_cases.Case) -> None:
    with FakeDevice() as device:
        case(device, False)
    assert device.races == []


def test_there_are_enough_cases() -> None:
    assert len(race_cases.CASES) >= 24
