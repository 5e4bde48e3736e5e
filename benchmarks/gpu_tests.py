"""Runs the GPU tests, PyTorch's stream sanitizer included, and records the outcome of each.

    python benchmarks/gpu_tests.py [--out results.json]

CI has no GPU. So these tests are run by hand, and the result is committed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from measuring import header, save

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        help="write every test's outcome to this JSON file, and failures to files beside it",
    )
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "4", "-rA", "--timeout", "110"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    line = r"^(PASSED|FAILED|ERROR|SKIPPED) (tests/.+?)(?: - .*)?$"
    outcomes = re.findall(line, run.stdout, re.MULTILINE)
    tests = {name: outcome.lower() for outcome, name in outcomes}
    if run.returncode:
        failures = run.stdout.partition("= FAILURES =")[2].partition("= PASSES =")[0]
        print(failures[:9000])
        if arguments.out is not None:
            arguments.out.with_suffix(".txt").write_text(run.stdout + run.stderr, encoding="utf-8")
    print(run.stdout.strip().splitlines()[-1])
    save(arguments.out, {**header("gpu_tests.py"), "exit": run.returncode, "tests": tests})


if __name__ == "__main__":
    main()
