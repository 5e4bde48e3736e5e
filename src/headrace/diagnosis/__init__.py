"""Somebody's training script, run unchanged and explained.

In: a script or module with its arguments. Out: what a step's time went to, which source lines made
the host wait, what each would gain if it went, and what to write instead. Its names are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.diagnosis.block import Diagnosis, diagnose
    from headrace.diagnosis.comparison import (
        compare_files,
        comparison_text,
        exit_code_of_change,
        parse_change_limits,
    )
    from headrace.diagnosis.recorded import diagnose_traces
    from headrace.diagnosis.script import diagnose_program, exit_code_of, parse_limits
    from headrace.diagnosis.session import Settings
    from headrace.diagnosis.steps import StepLine
    from headrace.diagnosis.text import text_of
    from headrace.diagnosis.trace_file import is_trace

_HOMES = {
    "Diagnosis": "block",
    "Settings": "session",
    "StepLine": "steps",
    "compare_files": "comparison",
    "comparison_text": "comparison",
    "diagnose": "block",
    "diagnose_program": "script",
    "diagnose_traces": "recorded",
    "exit_code_of": "script",
    "exit_code_of_change": "comparison",
    "is_trace": "trace_file",
    "parse_change_limits": "comparison",
    "parse_limits": "script",
    "text_of": "text",
}

__all__ = [
    "Diagnosis",
    "Settings",
    "StepLine",
    "compare_files",
    "comparison_text",
    "diagnose",
    "diagnose_program",
    "diagnose_traces",
    "exit_code_of",
    "exit_code_of_change",
    "is_trace",
    "parse_change_limits",
    "parse_limits",
    "text_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
