"""Reports: one HTML file that shows a stored result and needs no network.

It reads the JSON of `bench` or `tune`, or a run folder, and writes a page, or traces for Perfetto.
It measures nothing. `*_page.py` prepares the values, `templates/` lays them out, `static/` has
styles and scripts.

    from headrace.report import write_report

    write_report("bench.json")             # bench.html beside it
    write_report("runs/train/exp")         # report.html in the run folder
"""

from headrace.report.live import LiveServer
from headrace.report.writing import (
    render,
    render_diagnosis,
    try_report,
    write_perfetto,
    write_report,
    write_run_page,
)

__all__ = [
    "LiveServer",
    "render",
    "render_diagnosis",
    "try_report",
    "write_perfetto",
    "write_report",
    "write_run_page",
]
