"""`%%diagnose`, in a shell that has what it needs of IPython's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.diagnosis.magic import diagnose_cell

TRAINING = """
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(20):
    weight.sum().backward()
    optimizer.step()
"""


class Shell:
    def __init__(self) -> None:
        self.magics: dict[tuple[str, str], Callable[[str, str], Any]] = {}
        self.names: dict[str, Any] = {"torch": torch}

    def register_magic_function(self, magic: Any, kind: str, name: str) -> None:
        self.magics[kind, name] = magic

    def run_cell(self, cell: str) -> None:
        exec(cell, self.names)


def test_a_cell_is_run_in_the_notebook_and_diagnosed() -> None:
    shell = Shell()
    hr.load_ipython_extension(shell)
    magic = shell.magics["cell", "diagnose"]
    assert "--warmup" in (magic.__doc__ or "")
    diagnosis = magic("--warmup 4 --steps 6", TRAINING)
    assert "optimizer" in shell.names
    assert diagnosis.result.steps >= 10
    assert repr(diagnosis) == str(diagnosis)
    assert "A step takes" in repr(diagnosis)
    html = diagnosis._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert html.count(chr(34)) == 6  # nothing of the page ends the attribute


@pytest.mark.parametrize(
    ("line", "message"),
    [("--stepz 3", "--stepz"), ("--steps many", "invalid int value"), ("--warmup 0", "at least 1")],
)
def test_a_wrong_option_is_an_error_and_runs_nothing(line: str, message: str) -> None:
    shell = Shell()
    with pytest.raises(hr.HeadraceError, match=message):
        diagnose_cell(shell, line, TRAINING)
    assert "optimizer" not in shell.names
