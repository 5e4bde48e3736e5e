"""`headrace.diagnose()`: the training code inside a block, watched and explained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import torch

from headrace.bench import environment_of
from headrace.device import open_device
from headrace.diagnosis.explanation import explain
from headrace.diagnosis.session import Session, Settings
from headrace.diagnosis.steps import StepLine
from headrace.diagnosis.text import text_of
from headrace.errors import ProgramError
from headrace.records import DiagnosisResult
from headrace.report import render_diagnosis


class Diagnosis:
    """The result of a `with headrace.diagnose()` block. It can be read after the block."""

    def __init__(self) -> None:
        self._result: DiagnosisResult | None = None

    @property
    def result(self) -> DiagnosisResult:
        """The result with all its figures."""
        if self._result is None:
            raise ProgramError("the block of headrace.diagnose() has not ended: read this after it")
        return self._result

    def __str__(self) -> str:
        return text_of(self.result)

    def __repr__(self) -> str:
        return object.__repr__(self) if self._result is None else str(self)

    def _repr_html_(self) -> str:
        """The page, which a notebook shows inline. It is in a frame of its own, so that its styles
        and those of the notebook do not mix."""
        page = escape(render_diagnosis(self.result))
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width: 100%; height: 40em; '
            'border: 0"></iframe>'
        )


@contextmanager
def diagnose(
    *,
    warmup: int = 10,
    clean: int = 20,
    profiled: int = 8,
    lines: int = 5,
    step_line: str | None = None,
    cupti: bool = True,
) -> Iterator[Diagnosis]:
    """Watch the training steps inside the block, in a notebook for example.

        with headrace.diagnose() as diagnosis:
            train(steps=60)
        print(diagnosis)

    The numbers are the steps of the warm-up and of each window. The block should train for at least
    their sum, and `lines` more if the GPU waits for Python; what is known after fewer is shown.
    `step_line` names a line that runs once per step, as in "train.py:120", if no optimizer says
    what a step is. With `cupti=False`, CUDA events take the place of the profiler, as they do where
    it records no kernels. Inside a `fake_cuda()` block, waits and races are found, without times.
    """
    line = StepLine.parse(step_line) if step_line is not None else None
    settings, fake = Settings(warmup, clean, profiled, lines, line, cupti), _fake_device()
    races_before = 0 if fake is None else len(fake.findings())
    diagnosis, session = Diagnosis(), Session(settings, fake)
    session.seen.is_block = True
    try:
        with session:
            yield diagnosis
    finally:
        seen = session.seen
        races = None if fake is None else len(fake.findings()) - races_before
        with torch._C.DisableTorchFunction():
            environment = environment_of(seen.device or open_device("cpu"), "")
        diagnosis._result = explain(seen, "", None, environment, races)


def _fake_device() -> Any:
    if "headrace.fake.cuda" not in sys.modules:  # then it has not been used
        return None
    from headrace.fake import FakeCuda

    return FakeCuda.in_use()
