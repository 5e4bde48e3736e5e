"""The former address of `headrace.records`, kept for one version."""

from headrace.records import BenchResult

__all__ = ["BenchResult"]
