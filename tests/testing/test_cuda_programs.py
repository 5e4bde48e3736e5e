"""Stream bugs in programs written against `torch.cuda`: each is found, and no twin is."""

from __future__ import annotations

import pytest
import torch

from headrace.testing import fake_cuda
from support.cuda_programs import PROGRAMS


@pytest.mark.filterwarnings("ignore")
def test_bugs_are_found_and_twins_are_silent() -> None:
    wrong = []
    with fake_cuda(check=False, keep_timeline=False) as device:
        for program in PROGRAMS:
            expected = {(program.line("FIRST"), program.line("SECOND"))}
            for bug in (True, False):
                before = len(device.races)
                file = program.run_on_cuda(bug=bug)
                found = {
                    (race.first.site.line, race.second.site.line) for race in device.races[before:]
                }
                if found != (expected if bug else set()):
                    wrong.append(f"{file}: reported {found}, expected {expected if bug else None}")
    assert not wrong, "\n".join(wrong)
    assert len(PROGRAMS) >= 140


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_twins_run_on_a_gpu() -> None:
    for program in PROGRAMS:
        program.run_on_cuda(bug=False)
