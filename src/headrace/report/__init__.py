"""Reports: a stored result as one HTML file that needs no network.

In goes the JSON of `bench` or `tune`, or a run's folder; out comes one page with its charts, or a
Perfetto trace. Nothing is measured here.

    from headrace.report import write_report

    write_report("bench.json")             # report.html beside it
    write_report("runs/train/exp")         # report.html in the run's folder
"""

from headrace.report.writing import render, try_report, write_perfetto, write_report

__all__ = ["render", "try_report", "write_perfetto", "write_report"]
