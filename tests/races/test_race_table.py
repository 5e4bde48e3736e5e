"""Stream bugs as short programs: each is reported at its two lines, and no twin is."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from itertools import groupby

import pytest
import torch

from headrace.device import open_device
from headrace.fake import FakeDevice
from support.races import race_cases
from support.races.race_oracle import patched_once
from support.races.race_table import CASES, Case

GROUPS = [list(cases) for _, cases in groupby(CASES, key=lambda case: case.group)]


def reported(case: Case, *, bug: bool) -> set[tuple[int, int]]:
    with FakeDevice(check=False, keep_timeline=False) as device:
        case.run(device, bug=bug)
    assert all(race.missing for race in device.races)
    return {(race.first.site.line, race.second.site.line) for race in device.races}


@pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: cases[0].name)
def test_bugs_are_reported_and_twins_are_not(cases: list[Case]) -> None:
    wrong = []
    with ExitStack() as stack:
        stack.enter_context(patched_once())
        group = cases[0].group
        stack.enter_context(nullcontext() if group is None else group())
        for case in cases:
            expected = {(case.line("FIRST"), case.line("SECOND"))}
            if (found := reported(case, bug=True)) != expected:
                wrong.append(f"{case.name}: reported {found}, expected {expected}")
            if found := reported(case, bug=False):
                wrong.append(f"the twin of {case.name}: reported {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: cases[0].name)
def test_twins_compute_the_same_on_cuda(cases: list[Case]) -> None:
    cuda = open_device("cuda")
    with ExitStack() as stack:
        group = cases[0].group
        stack.enter_context(nullcontext() if group is None else group())
        for case in cases:
            if "is_completed" in case.code:
                continue  # the fake process group never says that it is done
            with FakeDevice(check=False) as device:
                expected = case.run(device, bug=False)
            found = case.run(cuda, bug=False)
            assert found == pytest.approx(expected, rel=1e-2, abs=1e-2), case.name


def test_there_are_enough() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(CASES) + len(race_cases.CASES) >= 150
