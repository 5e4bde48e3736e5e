"""`speed_up(compile=True)` without a GPU: PyTorch's compiler with a backend that counts, and a
device whose graphs do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace as hr
from support.graphs.no_graphs import NoGraphs
from support.graphs.sped_up import small


def test_compiled_code_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call compiles, the watched ones are plain, and the capture compiles nothing."""
    compiled, calls = [], []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(module)

        def run(*values: Any) -> Any:
            calls.append(len(compiled))
            return module(*values)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model, found = small(), []
    with hr.speed_up(model, device=NoGraphs(), compile=True, recheck=0) as handle:
        for _ in range(6):
            calls.clear()
            model(torch.ones(3, 4)).square().mean().backward()
            found.append(len(calls))
        report = handle.report().parts[0]
    assert (len(compiled), found) == (1, [1, 0, 0, 1, 0, 0])
    assert (report.why, report.captures, report.replays) == (None, 1, 3)
