"""The former address of `headrace.runs.records`, kept for one version."""

from headrace.runs.records import BenchResult

__all__ = ["BenchResult"]
