"""The slow scripts of benchmarks/: on the fake device, `diagnose` blames the right line."""

from __future__ import annotations

import importlib.util
import sys
from itertools import islice
from typing import Any

import pytest
import torch

from headrace.diagnosis import Settings
from headrace.diagnosis.session import Session
from headrace.fake import fake_cuda
from support.paths import ROOT

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch has CUDA here")


def slow_scripts() -> Any:
    path = ROOT / "benchmarks" / "inputs" / "slow_scripts.py"
    spec = importlib.util.spec_from_file_location("slow_scripts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slow_scripts"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_a_slow_script_is_blamed_for_its_line_and_a_fixed_one_is_not() -> None:
    scripts = slow_scripts()
    blamed: dict[str, tuple[bool, bool]] = {}
    for name, case in scripts.CASES.items():
        if name == "many_launches" or case.loader == scripts.IMAGES:
            continue  # a graph of a GPU's; no wait but the copy, which the fixed one has, too
        found = []
        for fixed in (False, True):
            with (
                fake_cuda(check=False, keep_timeline=False) as device,
                Session(Settings(warmup=3, lines=2), device) as session,
            ):
                steps = scripts.train(name, torch.device("cuda"), fixed=fixed, tiny=True)
                for _ in islice(steps, 8):
                    pass
            lines = [wait.line for waits in session.seen.measured.waits for wait in waits]
            assert len(session.seen.measured.waits) == 2, name
            found.append(any(line is not None and "# slow" in line.text for line in lines))
        blamed[name] = found[0], found[1]
    waits = {name for name, case in scripts.CASES.items() if case.change == "line"}
    assert blamed == {name: (name in waits, False) for name in blamed}
