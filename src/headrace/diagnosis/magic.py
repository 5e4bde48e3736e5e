"""`%%diagnose` in IPython and Jupyter: a cell's training, explained below it.

%load_ext headrace

%%diagnose --steps 10
train(steps=60)
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from headrace.diagnosis.block import Diagnosis, diagnose
from headrace.errors import ProgramError


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext headrace` calls."""

    def magic(line: str, cell: str) -> Diagnosis:
        """Run the cell and say what its training steps wait for.

        %%diagnose [--warmup N] [--steps N] [--profiled N] [--lines N] [--step-line FILE:LINE]
                   [--no-cupti]
        """
        return diagnose_cell(shell, line, cell)

    shell.register_magic_function(magic, "cell", "diagnose")


def diagnose_cell(shell: Any, line: str, cell: str) -> Diagnosis:
    """Run a cell and diagnose its steps. `line` has the options. The cell's own error is shown by
    the shell; what was seen before it is diagnosed."""
    with diagnose(**vars(_options().parse_args(shlex.split(line)))) as diagnosis:
        shell.run_cell(cell)
    return diagnosis


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ProgramError(f"%%diagnose: {message}; {self.format_usage().strip()}")


def _options() -> argparse.ArgumentParser:
    options = _Options("%%diagnose", add_help=False)
    windows = (("warmup", 10), ("steps", 20), ("profiled", 8), ("lines", 5))
    for name, default in windows:
        dest = "clean" if name == "steps" else name
        options.add_argument(f"--{name}", dest=dest, type=int, default=default)
    options.add_argument("--step-line")
    options.add_argument("--no-cupti", dest="cupti", action="store_false")
    return options
