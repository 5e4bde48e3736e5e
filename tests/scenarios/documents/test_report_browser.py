"""Reports in a real browser, by `benchmarks/tools/look.py`: drawn, readable, usable.

Skipped where there is none. HEADRACE_BROWSER_PYTHON may name a Python that has playwright, and
HEADRACE_BROWSER a Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.report import write_report
from support.paths import BENCHMARKS
from support.report_samples import bench_sample, run_sample, tune_sample

LOOK = BENCHMARKS / "tools" / "look.py"
PYTHON = os.environ.get("HEADRACE_BROWSER_PYTHON", sys.executable)
BROWSER = os.environ.get("HEADRACE_BROWSER") or shutil.which("chromium")


def why_not() -> str | None:
    found = subprocess.run([PYTHON, "-c", "import playwright"], capture_output=True, check=False)
    if found.returncode:
        return f"needs playwright, which {PYTHON} has not"
    return None if BROWSER else "needs a Chromium: apt install chromium, or HEADRACE_BROWSER"


@pytest.mark.timeout(400)
def test_pages_in_a_browser(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "bench.json").write_text(json.dumps(bench_sample()))
    cpu = bench_sample(("baseline", "pipeline"), steps=1)
    for row in cpu["rows"]:
        row |= {"gpu": None, "timeline": None, "samples": [], "streams": [], "score": None}
    cpu["rows"][1] |= {"ms_per_step": None, "error": "step 3 failed: " + "x" * 300}
    (tmp_path / "cpu.json").write_text(json.dumps(cpu))
    (tmp_path / "tune.json").write_text(json.dumps(tune_sample()))
    run_sample(tmp_path / "run")
    pages = [
        write_report(tmp_path / source, tmp_path / f"{source}.html")
        for source in ("bench.json", "cpu.json", "tune.json", "run")
    ]
    done = subprocess.run(
        [PYTHON, LOOK, *pages, "--browser", str(BROWSER)],
        capture_output=True, text=True, check=False, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
