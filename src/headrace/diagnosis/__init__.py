"""Somebody's training script, run unchanged and explained.

In: a script or module with its arguments. Out: what a step's time went to, which source lines made
the host wait, what each would gain if it went, and what to write instead. Its names are loaded on
first use.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.diagnosis.block import Diagnosis as Diagnosis
    from headrace.diagnosis.block import diagnose as diagnose
    from headrace.diagnosis.comparison import compare_files as compare_files
    from headrace.diagnosis.comparison import comparison_text as comparison_text
    from headrace.diagnosis.comparison import exit_code_of_change as exit_code_of_change
    from headrace.diagnosis.comparison import parse_change_limits as parse_change_limits
    from headrace.diagnosis.monitoring import monitor_by_environment as monitor_by_environment
    from headrace.diagnosis.monitoring import monitor_steps as monitor_steps
    from headrace.diagnosis.recorded import diagnose_traces as diagnose_traces
    from headrace.diagnosis.script import diagnose_program as diagnose_program
    from headrace.diagnosis.script import exit_code_of as exit_code_of
    from headrace.diagnosis.script import parse_limits as parse_limits
    from headrace.diagnosis.session import Settings as Settings
    from headrace.diagnosis.step_figures import StepFigures as StepFigures
    from headrace.diagnosis.step_monitor import StepMonitor as StepMonitor
    from headrace.diagnosis.steps import StepLine as StepLine
    from headrace.diagnosis.text import text_of as text_of
    from headrace.diagnosis.trace_file import is_trace as is_trace

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
