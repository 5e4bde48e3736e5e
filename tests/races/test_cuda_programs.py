"""Stream bugs in programs written against `torch.cuda`: each is found, and no twin is."""

from __future__ import annotations

import ast
import re

import pytest
import torch

from headrace.fake import fake_cuda
from headrace.races import Race
from support.races.cuda_programs import PROGRAMS, run_text


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
    assert len(PROGRAMS) >= 170


_WAIT = re.compile(r"(?:.*, or )?(\S+\.wait_stream\(.+\)) (before|after) .*:(\d+)")


@pytest.mark.filterwarnings("ignore")
def test_the_missing_wait_removes_the_race() -> None:
    tried, useless = 0, set()
    for program in PROGRAMS:
        text = program.text(bug=True)
        if "thread" in text.lower():
            continue  # which access is the first differs from run to run
        races = _races(text, program.name)
        for wait in filter(None, (_WAIT.fullmatch(race.missing) for race in races)):
            tried += 1
            fixed = _with_call(text, wait[1], wait[2], int(wait[3]))
            if len(_races(fixed, f"{program.name}, fixed")) >= len(races):
                useless.add(program.name)
    assert useless == {"torch future then"}  # a lambda is not on a line of its own
    assert tried >= 100


def _races(text: str, file: str) -> list[Race]:
    with fake_cuda(check=False, keep_timeline=False) as device:
        run_text(text, file)
    return device.races


def _with_call(text: str, call: str, place: str, line: int) -> str:
    """A program with one more call before or after the statement of a line."""
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    statement = min(around, key=lambda node: (node.end_lineno or line) - node.lineno)
    lines = text.splitlines()
    first = lines[statement.lineno - 1]
    indent = first[: len(first) - len(first.lstrip())]
    at = statement.lineno - 1 if place == "before" else statement.end_lineno or line
    return "\n".join([*lines[:at], indent + call, *lines[at:]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_twins_run_on_a_gpu() -> None:
    for program in PROGRAMS:
        program.run_on_cuda(bug=False)
